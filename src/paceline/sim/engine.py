# SPDX-License-Identifier: BSD-3-Clause
"""A virtual clock: a heap of (time, priority, sequence number).

The sequence number makes simultaneous callbacks first-in first-out within a priority, so a run is
deterministic. The clock moves *before* the callback is called. Nothing can be taken out of the
heap: who schedules a callback that may become pointless must recognise that when it comes.
"""

from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count

from paceline.errors import InternalError

__all__ = ["LAST", "NORMAL", "URGENT", "Engine"]

URGENT = 0  # reactions that take no time, before anything else that happens at the same moment
NORMAL = 1
LAST = 2  # deadlines: what arrives at the very moment is still in time

Callback = Callable[..., None]


class Engine:
    """The clock and what is to happen."""

    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[tuple[float, int, int, Callback, tuple[object, ...]]] = []
        self._numbers = count()

    def at(self, time: float, callback: Callback, *args: object, priority: int = NORMAL) -> None:
        """Call back at this time."""
        if not time >= self.now:
            raise InternalError(f"cannot schedule at {time}, it is {self.now} already")
        heappush(self._heap, (time, priority, next(self._numbers), callback, args))

    def step(self) -> bool:
        """Let the next thing happen; False: there is none."""
        if not self._heap:
            return False
        self.now, _, _, callback, args = heappop(self._heap)
        callback(*args)
        return True
