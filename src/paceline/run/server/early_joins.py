# SPDX-License-Identifier: BSD-3-Clause
"""Workers and agents of hosts that join before all servers of the run are here: they wait."""

from collections.abc import Callable
from typing import Any

from paceline.run.net.transport import PeerEnd
from paceline.run.server.other_servers import OtherServers

__all__ = ["EarlyJoins"]

Handler = Callable[[PeerEnd, Any], None]


class EarlyJoins:
    """Joins that can't be handled yet."""

    def __init__(self, others: Callable[[], OtherServers]) -> None:
        """`others`: returns the other servers of the run."""
        self._others = others
        self._waiting: list[tuple[PeerEnd, object]] = []

    def delayed(self, handle: Handler) -> Handler:
        """Return a handler that waits with a message until all servers are here."""

        def handle_in_time(end: PeerEnd, message: object) -> None:
            if self._others().missing:
                self._waiting.append((end, message))
            else:
                handle(end, message)

        return handle_in_time

    def take(self) -> list[tuple[PeerEnd, object]]:
        """Return the connections that have waited, with their messages; all servers are here."""
        waiting, self._waiting = self._waiting, []
        return waiting
