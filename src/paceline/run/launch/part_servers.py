# SPDX-License-Identifier: BSD-3-Clause
"""The other servers of a run on this machine, next to the head.

A server that is killed is restarted. The head notices that it is gone, and is restarted as well:
then all servers continue from the last checkpoint. A server that was stopped (SIGSTOP) would keep
the whole run waiting, so it is killed after a while. If one of them hangs in another way, the head
waits for it and seems to hang as well, so all servers are killed.
"""

import signal
from collections.abc import Callable
from dataclasses import replace

from paceline.run.launch.environment import Identity
from paceline.run.launch.hangs import FROZEN_SERVER_S
from paceline.run.launch.processes import Child, Processes
from paceline.run.system import SYSTEM, System

__all__ = ["PartServers"]


class PartServers:
    """The servers of a run from number 1 on."""

    def __init__(
        self, processes: Processes, say: Callable[[str], None], system: System = SYSTEM
    ) -> None:
        """`say` shows a line to the user."""
        self._processes = processes
        self._say = say
        self._system = system
        self._stopped_since: dict[Child, float] = {}
        self.children: list[Child] = []

    def create(self, head: Identity, servers: int, threads: int) -> None:
        """Create all of them; start none."""
        self.children = [
            Child(f"server {number}", replace(head, server=number), threads, is_quiet=True)
            for number in range(1, servers)
        ]

    def __contains__(self, child: Child) -> bool:
        return child in self.children

    def end_without(self, head: Child | None) -> None:
        """Kill all of them if the head neither runs nor will be started again."""
        if head is not None and head.pid is None and head.start_at is None:
            self._processes.kill_silently(self.children)

    def end_frozen(self) -> None:
        """Kill those that were stopped for too long."""
        now = self._system.monotonic()
        for child in self.children:
            if child.pid is None or not self._system.is_stopped(child.pid):
                self._stopped_since.pop(child, None)
            elif now >= self._stopped_since.setdefault(child, now) + FROZEN_SERVER_S:
                del self._stopped_since[child]
                self._say(f"{child.name} was stopped (SIGSTOP); killing it")
                self._processes.signal(child, signal.SIGKILL)

    def end_with_hung(self, head: Child) -> None:
        """Kill all of them if the head hangs, perhaps because it waits for one of them.

        Nothing more is lost: without the head, all of them go back to the last checkpoint. A head
        that was stopped (SIGSTOP) waits for nobody.
        """
        if head.pid is None or self._system.is_stopped(head.pid):
            return
        for child in self.children:
            if child.pid is not None:
                self._say(f"{child.name}, for which it may have been waiting, is killed as well")
                self._processes.signal(child, signal.SIGKILL)
