# SPDX-License-Identifier: BSD-3-Clause
"""Say where a process hangs, once per wait.

The server reports which workers it has been waiting for. A server that hangs can't report anything,
but then the launcher waits for its answer.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from paceline.run.launch.monitor import RunMonitor
from paceline.run.launch.processes import Child, Processes
from paceline.run.launch.stack_dump import StackRequest
from paceline.run.system import SYSTEM, System

__all__ = ["HangReport"]

SLOW_START_S = 10.0  # for the server to reach run.prepare(); then its stack is shown
SILENT_SERVER_S = 10.0  # without an answer, its stack is shown
LATE_S = 10.0  # after the last update, the stacks of workers that still run are shown
STACK_S = 1.0  # for a process to write its stack
NAMED = 3  # processes about which something is said at a time


@dataclass(frozen=True)
class _Wait:
    """A process that is waited for, and whose stack was asked for."""

    what: str  # the first words of the line about it
    stack: StackRequest | None
    until: float  # when to stop waiting for the stack


class HangReport:
    """Says where processes hang."""

    def __init__(
        self,
        monitor: RunMonitor,
        processes: Processes,
        say: Callable[[str], None],
        system: System = SYSTEM,
    ) -> None:
        self._monitor = monitor
        self._processes = processes
        self._say = say
        self._system = system
        self._said: set[Child] = set()  # processes about which a line was said in this wait
        self._waits: dict[Child, _Wait] = {}  # processes about which a line is due

    def tick(
        self, server: Child | None, workers: Iterable[Child], others: Iterable[Child] = ()
    ) -> None:
        """Say something about processes that have begun to hang; call it a few times a second.

        `others`: servers for which the first one may wait.
        """
        self._say_known()
        hanging = dict(self._hanging(server, workers, others))
        self._said &= hanging.keys()
        for child, what in hanging.items():
            if child not in self._said and len(self._said) < NAMED:
                self._said.add(child)
                self._begin(child, what)

    def _say_known(self) -> None:
        """Say where the processes are that have written their stacks since the last tick."""
        for child, wait in list(self._waits.items()):
            if child.is_killed:  # the launcher has said so
                del self._waits[child]
                continue
            line = self._processes.stack_line(wait.stack) if wait.stack else None
            if line or child.pid is None or self._system.monotonic() >= wait.until:
                del self._waits[child]
                self._say(f"{wait.what}; it is at {line}" if line else wait.what)

    def _hanging(
        self, server: Child | None, workers: Iterable[Child], others: Iterable[Child]
    ) -> Iterable[tuple[Child, str]]:
        """Yield the processes that are waited for, with the first words of a line about each."""
        monitor, now = self._monitor, self._system.monotonic()
        if server is not None and server.pid is not None and (what := self._why_silent(now)):
            yield server, what
            may_wait = monitor.is_serving and not self._system.is_stopped(server.pid)
            for other in others:
                if may_wait and other.pid is not None:
                    yield other, f"the server may be waiting for {other.name}"
            return  # what it said about the workers is old
        over_s = 0.0 if monitor.over_since is None else now - monitor.over_since
        for child in workers:
            if child.pid is None or child.is_killed:
                continue
            if over_s >= LATE_S:
                yield child, f"{child.name} still runs {over_s:.0f} s after the last update"
            elif child.who.worker in monitor.waiting_s:
                waited_s = monitor.waiting_s[child.who.worker]
                yield child, f"the run has been waiting for {child.name} for {waited_s:.0f} s"

    def _why_silent(self, now: float) -> str:
        """Return the first words of a line about a server that is silent; "" if it isn't."""
        monitor = self._monitor
        if not monitor.is_serving and now >= monitor.started_at + SLOW_START_S:
            return "waiting for the server to reach run.prepare()"
        silent_s = now - monitor.heard_at if monitor.is_serving and not monitor.is_saving else 0.0
        if silent_s >= SILENT_SERVER_S:
            return f"the server hasn't answered for {silent_s:.0f} s"
        return ""

    def _begin(self, child: Child, what: str) -> None:
        """Begin to find out where the process is."""
        assert child.pid is not None
        family = [child.pid, *self._system.descendants(child.pid)]
        stopped = [pid for pid in family if self._system.is_stopped(pid)]
        if child.pid in stopped:
            self._say(f"{what}; it was stopped (SIGSTOP)")
        elif stopped:
            self._say(f"{what}; process {stopped[0]}, which it started, was stopped (SIGSTOP)")
        else:
            until = self._system.monotonic() + STACK_S
            self._waits[child] = _Wait(what, self._processes.ask_stack(child), until)
