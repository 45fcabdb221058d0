# SPDX-License-Identifier: BSD-3-Clause
"""How a server that isn't the head finds the head of its run, again and again.

The head may start later than this server, and it may be restarted. Its launcher keeps listening at
the head's address meanwhile. So a server that was part of the run, and whose connections are
refused for a while, knows that the launcher is gone, and the run with it.
"""

from collections.abc import Callable
from typing import TypeVar

from paceline.errors import PeerLost
from paceline.run.net.address import NobodyListens
from paceline.run.system import System

__all__ = ["find_head"]

C = TypeVar("C")

CONNECT_TIMEOUT_S = 600.0  # to find a head; long, because its script may load a large data set
ENDED_S = 60.0  # a run has ended if no process has listened at its address for this long
QUIET_S = 5.0  # tell the user after waiting this long


def find_head(
    connect: Callable[[], C], say: Callable[[str], None], system: System, *, has_joined: bool
) -> C | None:
    """Try to connect until it works, with growing pauses; return None if the run has ended.

    `has_joined`: this server was part of the run. Raises PeerLost if it takes too long.
    """
    began, pause_s, is_quiet = system.monotonic(), 0.01, True
    held_at = began  # the last time when a process may have listened
    while True:
        try:
            return connect()
        except PeerLost as error:
            now = system.monotonic()
            if not isinstance(error, NobodyListens):
                held_at = now
            if has_joined and now - held_at > ENDED_S:
                return None
            if now - began > CONNECT_TIMEOUT_S:
                raise PeerLost(f"no head was found: {error}") from None
            if is_quiet and now - began > QUIET_S:
                say(f"waiting for the head: {error}")
                is_quiet = False
        system.sleep(pause_s)
        pause_s = min(0.5, pause_s * 1.5)
