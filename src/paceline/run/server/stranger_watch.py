# SPDX-License-Identifier: BSD-3-Clause
"""When the event loop of a server serves strangers: if they have sent something, or time is up.

Once strangers have used up their share of the processor time, the selector ignores them for a
while.
"""

import selectors

from paceline.run.server.strangers import Strangers

__all__ = ["StrangerWatch"]


class StrangerWatch:
    """The strangers of a server in its selector."""

    def __init__(self, selector: selectors.BaseSelector, strangers: Strangers) -> None:
        self._selector = selector
        self._strangers = strangers
        self._is_paused = False  # strangers have to wait
        selector.register(strangers, selectors.EVENT_READ)

    def timeout_s(self, timeout_s: float | None) -> float | None:
        """Return how long to wait for an event, if the caller wants to wait for this long."""
        pause_s = self._strangers.pause_s()
        self._pause(pause_s > 0)
        limits = timeout_s, pause_s if self._is_paused else self._strangers.due_s()
        return min((limit for limit in limits if limit is not None), default=None)

    def _pause(self, is_paused: bool) -> None:
        if is_paused and not self._is_paused:
            self._selector.unregister(self._strangers)
        elif self._is_paused and not is_paused:
            self._selector.register(self._strangers, selectors.EVENT_READ)
        self._is_paused = is_paused

    def is_due(self) -> bool:
        """Return whether to serve strangers although they have sent nothing."""
        return not self._is_paused and self._strangers.due_s() == 0
