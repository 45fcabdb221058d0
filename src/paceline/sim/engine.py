# SPDX-License-Identifier: BSD-3-Clause
"""A virtual clock: a heap of (time, priority, sequence number).

The sequence number makes simultaneous callbacks first-in first-out within a priority, so a run is
deterministic. The clock advances *before* the callback runs. A scheduled callback can't be removed:
if it may become obsolete, it must check for that itself.
"""

from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count

from paceline.errors import InternalError

__all__ = ["LAST", "NORMAL", "URGENT", "Engine"]

URGENT = 0  # immediate reactions, before anything else at the same time
NORMAL = 1
LAST = 2  # deadlines: a gradient that arrives at the same time is not late

Callback = Callable[..., None]


class Engine:
    """The clock and the scheduled callbacks."""

    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[tuple[float, int, int, Callback, tuple[object, ...]]] = []
        self._numbers = count()

    def at(self, time: float, callback: Callback, *args: object, priority: int = NORMAL) -> None:
        """Schedule a callback at this time."""
        if not time >= self.now:
            raise InternalError(f"time must be >= now={self.now}, got {time}")
        heappush(self._heap, (time, priority, next(self._numbers), callback, args))

    def step(self) -> bool:
        """Run the next callback; return False if there is none."""
        if not self._heap:
            return False
        self.now, _, _, callback, args = heappop(self._heap)
        callback(*args)
        return True
