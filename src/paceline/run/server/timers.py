# SPDX-License-Identifier: BSD-3-Clause
"""Timers of the run, on its own clock."""

from heapq import heappop, heappush
from math import inf

__all__ = ["Timers"]


class Timers:
    """Numbers that are due at some time."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int]] = []

    def start(self, timer: int, at: float) -> None:
        """Let this one be due then."""
        heappush(self._heap, (at, timer))

    @property
    def next_at(self) -> float:
        """When the next is due; inf: there is none."""
        return self._heap[0][0] if self._heap else inf

    def due(self, now: float) -> list[int]:
        """Those whose time has come; each is told of once."""
        found = []
        while self._heap and self.next_at <= now:
            found.append(heappop(self._heap)[1])
        return found
