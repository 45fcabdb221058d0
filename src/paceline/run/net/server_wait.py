# SPDX-License-Identifier: BSD-3-Clause
"""How long a process waits for a server that it can't reach, and what it says meanwhile.

Processes of a run may be started in any order, and a server may be restarted. A process that
can't reach one tries again, with growing pauses, and says so now and then: where, and for how long.
"""

from collections.abc import Callable

from paceline.errors import PeerLost

__all__ = ["LIMIT_S", "ServerWait"]

LIMIT_S = 600.0  # long, because the server's script may load a large data set first
QUIET_S = 2.0  # the user is told after waiting this long
AGAIN_S = 60.0  # between two lines
FIRST_PAUSE_S = 0.01
PAUSE_MAX_S = 0.5


class ServerWait:
    """One wait for a server, from the first failed attempt to the one that succeeds."""

    def __init__(self, server: str, say: Callable[[str], None], now: Callable[[], float]) -> None:
        """`server`: what is waited for, such as "the server". `say`: shows a line to the user."""
        self._server = server
        self.say = say
        self._now = now
        self.begin()

    def begin(self) -> None:
        """Begin to wait, with the first attempt."""
        self._began = self._tried_at = self._now()
        self._say_at = self._began + QUIET_S
        self._pause_s = FIRST_PAUSE_S
        self._has_said = False

    def fail(self, error: PeerLost) -> float:
        """Note that an attempt failed; return how long to pause before the next one.

        Raises PeerLost if it has begun too late. An attempt may last: a server may wait for others,
        and the machine may be suspended.
        """
        now = self._now()
        waited_s = now - self._began
        if self._tried_at > self._began + LIMIT_S:
            raise PeerLost(f"gave up after {_minutes(waited_s)}: {error}") from None
        if now >= self._say_at:
            waiting = "still waiting" if self._has_said else "waiting"
            left = _minutes(max(0.0, LIMIT_S - waited_s))
            self.say(f"{waiting} for {self._server}, up to {left}: {error}")
            self._has_said, self._say_at = True, now + AGAIN_S
        pause_s = self._pause_s
        self._pause_s = min(PAUSE_MAX_S, 1.5 * pause_s)
        self._tried_at = now + pause_s
        return pause_s


def _minutes(seconds: float) -> str:
    minutes = max(1, round(seconds / 60))
    return f"{minutes} minute{'s' if minutes > 1 else ''}"
