# SPDX-License-Identifier: BSD-3-Clause
"""Extract the computation times from a trace, to simulate with them again.

A trace holds the full computation time of every finished gradient. For a cancelled one it holds
only the time until it was cancelled. Such a censored time is completed with a random draw from the
longer times of the same worker, including completed ones, longest first (the order of Kaplan and
Meier). If the worker has no longer time, the draw is from the finished times of all workers; if
there is none either, only the lower bound is known and used. Both cases are counted, so that a
report can say how many times were drawn and how many are too optimistic.

If the new simulation has no network of its own, the time that parameters and gradients spent in
transit in the recording counts as computation time.
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

ROUNDING_S = 1e-9  # smaller differences between times are rounding errors
LONGER = 1 + 1e-9  # a censored time exceeds its bound by at least this factor


@dataclass(frozen=True, slots=True)
class Recording:
    """The computation times of a trace, in order, by worker; workers are renumbered from 0."""

    times: dict[int, Floats]
    drawn: int  # how many were cancelled in the trace, and completed by a random draw
    bounds: int  # how many were cancelled after a longer time than any gradient took

    @property
    def total(self) -> int:
        """The number of computation times."""
        return sum(len(t) for t in self.times.values())

    def left_to_chance(self) -> str:
        """Return a sentence on how far these times are measured, drawn or only bounds."""
        if not self.drawn and not self.bounds:
            return f"all {self.total} computation times are as recorded"
        words = f"{self.drawn + self.bounds} of {self.total} computation times were cut short by "
        words += f"cancellation; {self.drawn} are drawn from longer ones"
        if self.bounds:
            words += (
                f", and {self.bounds} are only known to be longer than any finished one, so "
                "waiting for more workers than the recording did looks better than it is"
            )
        return words


def recorded_times(trace: Trace, seed: int, *, with_travel: bool) -> Recording:
    """Return the computation times of all workers; raise `TraceError` if there are none.

    `with_travel`: include the time that the recorded network added.
    """
    seen: dict[int, list[tuple[float, bool]]] = defaultdict(list)
    for gradient in trace.gradients():
        whole = gradient.fate is not Fate.CANCELLED
        took_s = _took(gradient, with_travel)
        # Work that was cancelled before it started has no computation time.
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
    """Complete one worker's censored times; return all times and the counts of both cases."""
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

    A worker that needs more times than were recorded continues with blocks drawn from its own.
    """

    recording: Recording

    @property
    def is_stationary(self) -> bool:
        """Always true: a time depends on its position in the sequence, not on when it starts."""
        return True

    def mean(self, worker: int) -> float:
        """Return the mean of the worker's recorded times."""
        return Recorded(self.recording.times).mean(worker)

    def stream(self, worker: int, seed: int) -> TimeStream:
        """Return the worker's recorded times, followed by drawn ones."""
        beyond = Recorded(self.recording.times).stream(worker, seed)
        blocks = iter([self.recording.times[worker]])

        def draw(rng: np.random.Generator) -> Floats:
            del rng
            recorded = next(blocks, None)
            return beyond.draws(256) if recorded is None else recorded

        return TimeStream(draw, worker, seed)

    def __str__(self) -> str:
        return "replayed from a trace"
