# SPDX-License-Identifier: BSD-3-Clause
"""The computation times in a trace, to be simulated with again.

A trace has the whole computation time of every gradient that was finished. Of one that was
cancelled it has only the time until then. Such a time is completed by drawing from the longer ones
that the same worker took, completed ones included, the longest cut first (the order of Kaplan and
Meier); a worker that has none longer draws from what the others finished; and where nobody was ever
seen to take longer, all that is known is the bound. Both are counted, so that whoever reports a
result can say how much was left to chance, and what is too optimistic.

Where the new simulation has no network of its own, what gradients and parameters spent on their way
in the recording belongs to the time that a worker takes.
"""

from bisect import bisect_right, insort
from collections import defaultdict
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paceline.core.events import Fate
from paceline.errors import TraceError
from paceline.latency import Recorded, TimeStream
from paceline.trace.schema import Gradient, Trace

__all__ = ["Recording", "Replayed", "recorded_times"]

Floats = NDArray[np.float64]

ROUNDING_S = 1e-9  # a difference of times that is smaller is none
LONGER = 1 + 1e-9  # so much longer than its bound is a time at least, whatever is rounded


@dataclass(frozen=True, slots=True)
class Recording:
    """The computation times of a trace, in order, by worker; the workers are numbered anew."""

    times: dict[int, Floats]
    drawn: int  # how many of them were cut short in the trace, and completed by drawing
    bounds: int  # how many were cut short later than anything that was ever finished

    @property
    def total(self) -> int:
        """How many computation times there are."""
        return sum(len(t) for t in self.times.values())

    def left_to_chance(self) -> str:
        """What a reader must know of a result that rests on these times."""
        if not self.drawn and not self.bounds:
            return f"all {self.total} computation times are as recorded"
        words = f"of {self.total} computation times {self.drawn + self.bounds} were cut short by "
        words += f"cancellation; {self.drawn} are drawn from longer ones"
        if self.bounds:
            words += (
                f", and {self.bounds} are only known to be longer than anything that was finished, "
                "so that waiting for more workers than the recording did looks better than it is"
            )
        return words


def recorded_times(trace: Trace, seed: int, *, with_travel: bool) -> Recording:
    """The computation times of all workers; raises `TraceError` if there are none.

    `with_travel`: with what the recorded network added to them.
    """
    seen: dict[int, list[tuple[float, bool]]] = defaultdict(list)
    for gradient in trace.gradients():
        whole = gradient.fate is not Fate.CANCELLED
        took_s = _took(gradient, with_travel)
        # What was given up before it was begun is no computation.
        if gradient.fate is not Fate.DUPLICATE and (whole or took_s > 0):
            seen[gradient.worker].append((took_s, whole))
    finished = np.array([t for own in seen.values() for t, whole in own if whole])
    if not len(finished):
        raise TraceError("the trace has no finished gradient, so no computation time is known")
    rng = np.random.default_rng(seed)
    completed = [_complete(own, finished, rng) for _, own in sorted(seen.items())]
    return Recording(
        times={worker: times for worker, (times, _, _) in enumerate(completed)},
        drawn=sum(drawn for _, drawn, _ in completed),
        bounds=sum(bounds for _, _, bounds in completed),
    )


def _complete(
    own: list[tuple[float, bool]], finished: Floats, rng: np.random.Generator
) -> tuple[Floats, int, int]:
    """One worker's times with those cut short completed, and how many were drawn and bounds."""
    times = np.array([t for t, _ in own])
    whole = np.array([is_whole for _, is_whole in own])
    known = sorted(times[whole].tolist())
    drawn = bounds = 0
    for place in sorted(np.flatnonzero(~whole), key=lambda i: -times[i]):
        bound = times[place] * LONGER
        longer = known[bisect_right(known, bound) :] or finished[finished > bound]
        if len(longer):
            times[place] = rng.choice(longer)
            drawn += 1
        else:
            times[place] = bound
            bounds += 1
        insort(known, float(times[place]))
    return times, drawn, bounds


def _took(gradient: Gradient, with_travel: bool) -> float:
    travel_s = gradient.t - gradient.asked_at - gradient.compute_s
    is_real = with_travel and travel_s > ROUNDING_S
    return gradient.compute_s + (travel_s if is_real else 0.0)


@dataclass(frozen=True, slots=True, eq=False)
class Replayed:
    """Each worker's k-th computation takes as long as its k-th in the recording.

    A worker that needs more of them than were recorded goes on by drawing blocks of its own.
    """

    recording: Recording

    @property
    def is_stationary(self) -> bool:
        """A time depends on its place in the order, not on the moment."""
        return True

    def mean(self, worker: int) -> float:
        """The mean of the worker's recorded times."""
        return Recorded(self.recording.times).mean(worker)

    def stream(self, worker: int, seed: int) -> TimeStream:
        """The recorded times, then drawn ones."""
        beyond = Recorded(self.recording.times).stream(worker, seed)
        blocks = iter([self.recording.times[worker]])

        def draw(rng: np.random.Generator) -> Floats:
            del rng
            recorded = next(blocks, None)
            return beyond.draws(256) if recorded is None else recorded

        return TimeStream(draw, worker, seed)

    def __str__(self) -> str:
        return "replayed from a trace"
