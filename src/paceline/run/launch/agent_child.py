# SPDX-License-Identifier: BSD-3-Clause
"""The agent of a host, as the launcher of its workers sees it: start it, restart it, end it.

Several workers of a host share an agent, so that their traffic doesn't multiply; see
`server.host_agent`. A single worker needs none, and neither do workers on the head's own host,
which share memory with it.
"""

import secrets
import signal
from dataclasses import replace
from pathlib import Path

from paceline.errors import PacelineError, PeerLost
from paceline.run.cores import threads_of
from paceline.run.launch.environment import Identity
from paceline.run.launch.processes import Child, Processes
from paceline.run.launch.restarts import PAUSE_MAX_S
from paceline.run.net.address import dial, local_twin
from paceline.run.system import System

__all__ = ["AgentChild", "is_of_use"]

SCRIPT = Path(__file__).parents[1] / "agent.py"


def is_of_use(who: Identity, workers: int) -> bool:
    """Return whether this many workers should share an agent."""
    if workers == 1:
        return False
    try:
        dial(local_twin(who.address, who.token())).close()
    except PeerLost:
        return True
    return False  # the head is on this host


class AgentChild:
    """The process of an agent, across its restarts."""

    def __init__(self, who: Identity, processes: Processes, system: System) -> None:
        """`who`: the identity of the workers, but for the number."""
        self._processes = processes
        self._now = system.monotonic
        self._who = who
        self._address = f"unix:@paceline-agent-{secrets.token_hex(16)}"
        own = replace(who, worker=None, is_agent=True, listen=self._address)
        self.child = Child("agent", own, threads_of(1), is_quiet=True, script=str(SCRIPT))
        self._has_ended = False
        self.start()

    def start(self) -> None:
        """Start the process, or try again later; the workers wait for it."""
        self.child.start_at = None
        try:
            self._processes.start(self.child)
        except PeerLost:
            raise
        except PacelineError:
            self.on_exited()

    def on_exited(self) -> None:
        """Start it again after a pause, unless nobody needs it any more."""
        if not self._has_ended:
            pause_s = self.child.backoff.next_pause_s(0)
            self.child.start_at = self._now() + (PAUSE_MAX_S if pause_s is None else pause_s)

    def restart_if_due(self) -> None:
        """Start the process again when its pause is over."""
        if self.child.start_at is not None and self._now() >= self.child.start_at:
            self.start()

    def served(self, who: Identity) -> Identity:
        """Return the identity of a worker that the agent serves."""
        return replace(who, address=self._address, tls=None)

    def end(self) -> None:
        """End the process: all workers have ended."""
        if not self._has_ended:
            self._has_ended, self.child.start_at = True, None
            self._processes.signal(self.child, signal.SIGTERM)
