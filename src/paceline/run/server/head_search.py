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
from paceline.run.net.server_wait import ServerWait
from paceline.run.system import System

__all__ = ["find_head"]

C = TypeVar("C")

ENDED_S = 60.0  # a run has ended if no process has listened at its address for this long


def find_head(
    connect: Callable[[], C], say: Callable[[str], None], system: System, *, has_joined: bool
) -> C | None:
    """Try to connect until it works, with growing pauses; return None if the run has ended.

    `has_joined`: this server was part of the run. Raises PeerLost if it takes too long.
    """
    wait, now = ServerWait("the head", say, system.monotonic), system.monotonic
    held_at = now()  # the last time when a process may have listened
    while True:
        try:
            return connect()
        except PeerLost as error:
            if not isinstance(error, NobodyListens):
                held_at = now()
            if has_joined and now() - held_at > ENDED_S:
                return None
            pause_s = wait.fail(error)
        system.sleep(pause_s)
