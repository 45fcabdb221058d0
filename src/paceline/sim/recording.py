# SPDX-License-Identifier: BSD-3-Clause
"""The computation times in a trace, to be simulated with again.

A trace has the whole computation time of every gradient that was finished. Of one that was
cancelled it has only the time until then; such a time is completed by drawing from the longer ones
that the same worker (or, if it has none, any worker) was seen to take. What was drawn is counted,
so that whoever reports a result can say how much was left to chance.

Where the new simulation has no network of its own, what gradients and parameters spent on their way
in the recording belongs to the time that a worker takes.
"""

from collections import defaultdict
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paceline.core.events import Fate
from paceline.errors import TraceError
from paceline.latency import Recorded, TimeStream
from paceline.watch.trace import Gradient, Trace

__all__ = ["Recording", "Replayed", "recorded_times"]

Floats = NDArray[np.float64]

ROUNDING_S = 1e-9  # a difference of times that is smaller is none


@dataclass(frozen=True, slots=True)
class Recording:
    """The computation times of a trace, by worker, in order."""

    times: dict[int, Floats]
    completed: int  # how many of them were cut short in the trace, and completed by drawing

    @property
    def total(self) -> int:
        """How many computation times there are."""
        return sum(len(t) for t in self.times.values())

    def left_to_chance(self) -> str:
        """What a reader must know of a result that rests on these times."""
        if not self.completed:
            return f"all {self.total} computation times are as recorded"
        share = 100 * self.completed / self.total
        return (
            f"{self.completed} of {self.total} computation times ({share:.0f} %) were cut short "
            "by cancellation in the recording and are drawn from the longer ones"
        )


def recorded_times(trace: Trace, seed: int, *, with_travel: bool) -> Recording:
    """The computation times of all workers; raises `TraceError` if there are none.

    `with_travel`: with what the recorded network added to them.
    """
    seen: dict[int, list[tuple[float, bool]]] = defaultdict(list)
    for gradient in trace.gradients():
        if gradient.fate is not Fate.DUPLICATE:
            whole = gradient.fate is not Fate.CANCELLED
            seen[gradient.worker].append((_took(gradient, with_travel), whole))
    everyone = np.array([t for own in seen.values() for t, whole in own if whole])
    if not len(everyone):
        raise TraceError("the trace has no finished gradient, so no computation time is known")
    rng = np.random.default_rng(seed)
    completed = 0
    times: dict[int, Floats] = {}
    for worker, own in sorted(seen.items()):
        known = np.array([t for t, whole in own if whole])
        times[worker] = np.array(
            [t if whole else _longer(t, known, everyone, rng) for t, whole in own]
        )
        completed += sum(not whole for _, whole in own)
    return Recording(times, completed)


def _took(gradient: Gradient, with_travel: bool) -> float:
    travel_s = gradient.t - gradient.asked_at - gradient.compute_s
    is_real = with_travel and travel_s > ROUNDING_S
    return gradient.compute_s + (travel_s if is_real else 0.0)


def _longer(than: float, own: Floats, everyone: Floats, rng: np.random.Generator) -> float:
    """A time that was seen and is longer, the worker's own first; else the bound itself."""
    for candidates in (own, everyone):
        longer = candidates[candidates > than]
        if len(longer):
            return float(rng.choice(longer))
    return than


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
