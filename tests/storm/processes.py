# SPDX-License-Identifier: BSD-3-Clause
"""The processes of a simulated run, as its supervisor sees them."""

from __future__ import annotations

import signal
from collections.abc import Callable, Collection, Iterable

from paceline.errors import PeerLost
from paceline.run.launch.environment import Identity
from paceline.run.launch.forkserver import describe_exit
from paceline.run.launch.processes import Child
from storm.world import Process

__all__ = ["StormProcesses"]


class StormProcesses:
    """Has the interface of `launch.processes.Processes`."""

    def __init__(
        self,
        start: Callable[[Identity, str], Process],
        signal_process: Callable[[Process, int], None],
        say: Callable[[str], None],
    ) -> None:
        self._start = start
        self._signal = signal_process
        self._say = say
        self._running: dict[int, tuple[Child, Process]] = {}  # by pid
        self._exited: list[Process] = []
        self._first: dict[str, str] = {}  # failures, and the child that had each first

    def __bool__(self) -> bool:
        return bool(self._running)

    @property
    def has_exited(self) -> bool:
        """Whether `take_exited` has something to return."""
        return bool(self._exited)

    def start(self, child: Child) -> None:
        """Start a process."""
        process = self._start(child.who, child.name)
        child.pid = process.pid
        self._running[process.pid] = (child, process)
        process.on_exit.append(lambda: self._exited.append(process))
        child.start_at = None

    def take_exited(self) -> list[Child]:
        """Return the processes that exited since the last call."""
        found = []
        for process in self._exited:
            child, _ = self._running.pop(process.pid)
            self._set_exit(child, process)
            found.append(child)
        self._exited.clear()
        return found

    def _set_exit(self, child: Child, process: Process) -> None:
        """Set what the launcher knows about an exit, as `Processes.take_exited` does."""
        assert process.code is not None
        failure, has_failed = process.failure, process.code > 0
        child.pid, child.code = None, process.code
        child.has_left = process.has_left
        child.error_code = failure[1] if failure and has_failed else 0
        child.is_broken = -process.code == signal.SIGSEGV and process.has_joined
        child.exit_text = "left with notice" if child.has_left else describe_exit(process.code)
        if failure and has_failed:
            if first := self._first.get(failure[0]):
                before = "before" if first == child.name else first
                child.exit_text = f"failed in the same way as {before}"
            self._first.setdefault(failure[0], child.name)
        is_own = has_failed and child.error_code != PeerLost.exit_code
        child.failure = (failure[0] if failure else child.exit_text) if is_own else ""

    def ask_stack(self, child: Child) -> None:
        """Return None: a simulated process can't tell where it is."""

    def signal(self, child: Child, number: int) -> None:
        """Send a signal to a process, if it is running."""
        if child.pid in self._running:
            self._signal(self._running[child.pid][1], number)

    def kill(self, spared: Collection[Child | None] = ()) -> None:
        """Kill all running processes except `spared`, and say so."""
        children = [child for child, _ in self._running.values() if child not in spared]
        for child in children:
            if not child.is_killed:
                self._say(f"{child.name} was still running and was killed")
        self.kill_silently(children)

    def kill_silently(self, children: Iterable[Child]) -> None:
        """Kill those of these processes that are running."""
        for child in children:
            if child.pid is not None:
                child.is_killed = True
                self.signal(child, signal.SIGKILL)

    def forget(self) -> None:
        """Forget all processes."""
        self._running.clear()
