# SPDX-License-Identifier: BSD-3-Clause
"""The clock of a run, and its timers."""

from heapq import heappop, heappush
from math import inf

from paceline.run.system import SYSTEM, System

__all__ = ["ASLEEP_S", "RunClock", "Timers"]

ASLEEP_S = 5.0
"""A server looks at the clock more often than that, unless the machine was suspended."""


class RunClock:
    """Seconds since the run began; the clock stops while the run has no server."""

    def __init__(self, start: float = 0.0, system: System = SYSTEM) -> None:
        """Start at this time of the run."""
        self._monotonic = system.monotonic
        self._zero = self._monotonic() - start

    def now(self) -> float:
        """Return the time of the run."""
        return self._monotonic() - self._zero

    def monotonic_at(self, time: float) -> float:
        """Return what `time.monotonic()` is, or was, at that time of the run."""
        return self._zero + time


class Timers:
    """Numbered timers, each due at some time of the run."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int]] = []

    def start(self, timer: int, at: float) -> None:
        """Start a timer that is due at this time."""
        heappush(self._heap, (at, timer))

    @property
    def next_at(self) -> float:
        """When the next timer is due; inf if there is none."""
        return self._heap[0][0] if self._heap else inf

    def pop_due(self, now: float) -> list[int]:
        """Remove and return the timers that are due, in order."""
        found = []
        while self._heap and self.next_at <= now:
            found.append(heappop(self._heap)[1])
        return found
