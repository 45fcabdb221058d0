# SPDX-License-Identifier: BSD-3-Clause
"""Notice processes that are alive but never finish, and decide how long to wait for them.

A process that is busy can't be told from one in an endless loop. So a server that uses the
processor is never replaced, and only limits that users can see (after a signal, after the last
update) end a process that computes.
"""

from collections.abc import Iterable
from math import inf

from paceline.run.launch.monitor import RunMonitor
from paceline.run.launch.processes import Child
from paceline.run.system import SYSTEM, System

__all__ = [
    "EndGrace",
    "ServerWatch",
    "StopLimits",
]

STOP_WORKERS_S = 10.0  # after a signal that stops the run, for workers to end their scripts
STOP_SERVER_S = 15.0  # after such a signal, for the server to begin to save the run
FROZEN_SERVER_S = 10.0  # then a server that was stopped (SIGSTOP) is replaced
HUNG_SERVER_S = 30.0  # then a server is replaced that neither answers nor uses the processor
ASK_S = 2.0  # without news from the server, it is asked for some
SAY_S = 10.0  # between two lines about workers that run after the last update
TURNS = 3.0  # the last turn of worker 0 may take this many times as long as its longest one


class ServerWatch:
    """Tells whether the server has hung."""

    def __init__(self, monitor: RunMonitor, system: System = SYSTEM) -> None:
        self._monitor = monitor
        self._system = system
        self._alive_at = inf  # when it showed the last sign of life
        self._cpu_s = 0.0

    def begin(self) -> None:
        """Note that a server starts."""
        self._alive_at, self._cpu_s = self._system.monotonic(), 0.0

    def why_hung(self, pid: int) -> str:
        """Return why the server has to be replaced; "": it doesn't."""
        status, now = self._system.status(pid), self._system.monotonic()
        if status is None:
            return ""
        self._alive_at = max(self._alive_at, self._monitor.heard_at)
        # "D" is a slow disk, "t" a debugger.
        is_busy = status.cpu_s > self._cpu_s or status.state in "Dt"
        if is_busy and not status.is_stopped:
            self._alive_at, self._cpu_s = now, status.cpu_s
        silent_s = now - self._alive_at
        if now - self._monitor.heard_at >= ASK_S:
            self._monitor.ask()
        if status.is_stopped:
            return "was stopped (SIGSTOP)" if silent_s >= FROZEN_SERVER_S else ""
        if silent_s >= HUNG_SERVER_S and self._monitor.is_serving:
            return f"has neither answered nor used the processor for {silent_s:.0f} s"
        return ""


class StopLimits:
    """Limits how long the processes run after a signal that stops the run.

    Workers are killed first, so that a server that works can end the run without them.
    """

    def __init__(self, monitor: RunMonitor, system: System = SYSTEM) -> None:
        self._monitor = monitor
        self._system = system
        self._began = inf

    def begin(self) -> None:
        """Note that the signal has arrived."""
        self._began = self._system.monotonic()

    @property
    def are_workers_overdue(self) -> bool:
        """Whether workers have had enough time."""
        return self._system.monotonic() > self._began + STOP_WORKERS_S

    def is_server_overdue(self, pid: int | None) -> bool:
        """Return whether the server has had enough time; not while it answers or saves the run.

        If it hangs while it saves the run, `ServerWatch` notices.
        """
        now, monitor = self._system.monotonic(), self._monitor
        if now <= self._began + STOP_SERVER_S:
            return False
        is_frozen = pid is None or self._system.is_stopped(pid)
        is_silent = now - monitor.heard_at > STOP_SERVER_S - STOP_WORKERS_S
        return is_frozen or (is_silent and not monitor.is_saving)


class EndGrace:
    """Limits how long workers run after the last update.

    Worker 0 may take any time as long as it, or a process that it has started, uses the processor:
    it may be evaluating the result. That is only so when it has left its last turn.
    """

    def __init__(self, grace_s: float, monitor: RunMonitor, system: System = SYSTEM) -> None:
        self._grace_s = grace_s
        self._monitor = monitor
        self._system = system
        self._busy_at = 0.0  # when worker 0 last used the processor
        self._cpu_s = 0.0  # of worker 0 and its descendants
        self._said_at = -inf
        self._own: set[int | None] = set()  # the workers that were started here

    def limits(self, running: Iterable[Child], over_since: float) -> dict[Child, float]:
        """Return when to kill each of these workers."""
        limits = dict.fromkeys(running, over_since + self._grace_s)
        for child in limits:
            self._own.add(child.who.worker)
            if child.who.worker == 0:
                limits[child] = self._limit_of_first(child, over_since)
        return limits

    def line(self, limits: dict[Child, float], over_since: float) -> str:
        """Return a line about the workers that are still running, if one is due; "": none is."""
        now = self._system.monotonic()
        elsewhere = [f"worker {number}" for number in self._monitor.here if number not in self._own]
        if not (limits or elsewhere) or now < max(over_since, self._said_at) + SAY_S:
            return ""
        self._said_at = now
        if not limits:  # nobody here can kill them
            return f"waiting for {', '.join(elsewhere)} to finish the script"
        left_s = {child.name: kill_at - now for child, kill_at in limits.items()}
        first = min(left_s, key=lambda name: left_s[name])
        kill = f"; {first} will be killed in {left_s[first]:.0f} s (--grace {self._grace_s:g}s)"
        is_counting = left_s[first] < self._grace_s - 1.0  # not so for a busy worker 0
        return f"waiting for {', '.join(left_s)} to finish the script{kill if is_counting else ''}"

    def _limit_of_first(self, child: Child, over_since: float) -> float:
        """Return when to kill worker 0."""
        assert child.pid is not None
        pids = [child.pid, *self._system.descendants(child.pid)]
        found = [status.cpu_s for pid in pids if (status := self._system.status(pid)) is not None]
        before, self._cpu_s = self._cpu_s, sum(found)
        if self._cpu_s > before:
            self._busy_at = self._system.monotonic()
        longest_s = self._monitor.computing.get(0)  # None: it has left its last turn
        if longest_s is not None:
            return over_since + max(self._grace_s, TURNS * longest_s)
        return max(over_since, self._busy_at) + self._grace_s
