# SPDX-License-Identifier: BSD-3-Clause
"""Let the faults of a scenario happen to a host, and check that it reacts to them in time.

A fault that finds nobody to happen to, such as killing a worker that has already exited, is missed.
It doesn't count, and the story says so.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Iterable

from paceline.run.launch.hangs import HUNG_SERVER_S
from paceline.run.settings import Settings
from storm.departures import say_goodbye
from storm.host import Host
from storm.laws import Violation
from storm.liar import tell_lies
from storm.scenario import Fault
from storm.world import Process

__all__ = ["Faults"]

HANG_S = 90.0  # after this, the user stops a run in which a worker hangs
STOP_S = 17.0  # a run ends 15 s after a signal, and this leaves it some time to write
KILL_S = 2.0  # and after a second signal it ends at once
LEAP_S = 1.0  # after a leap of the clock, for processes to notice what time it is
SYNC_S = (20.0, 100.0)  # how long a very slow disk takes to sync


class Faults:
    """What happens to a host."""

    def __init__(self, host: Host, settings: Settings) -> None:
        self._host = host
        self._world = host.world
        self._settings = settings
        self._happened = 0
        self._was_terminated = False  # in this launch: a second signal kills the run at once
        self._was_supervising = False  # when the last signal arrived, so it decides the exit code
        self._disturbed_until = 0.0  # no time limit holds before

    def plan(self, faults: Iterable[Fault]) -> None:
        """Let these faults happen when it is time."""
        for fault in faults:
            self._world.after(fault.at_s, lambda fault=fault: self._happen(fault))

    def begin_launch(self) -> None:
        """Note that a run is launched or resumed."""
        self._was_terminated = self._was_supervising = False

    @property
    def happened(self) -> int:
        """How many faults had an effect."""
        return self._happened + self._world.points_hit

    def check_exit_code(self) -> None:
        """Check that a launcher which was asked to stop says so with its exit code.

        A second signal may come when the launcher has already chosen its exit code.
        """
        code, signals = self._host.code, (signal.SIGTERM, signal.SIGINT)
        if self._was_supervising and code not in (None, *[128 + number for number in signals]):
            raise Violation(f"exit code {code} after a signal")

    def _happen(self, fault: Fault) -> None:
        line = len(self._world.story)
        self._world.note(f"FAULT {fault}")
        found = getattr(self, "_" + fault.kind.replace(" ", "_"))(fault)
        if found:
            self._happened += 1
        elif found is not None:
            self._world.story[line] = self._world.story[line].replace("FAULT", "missed:")

    # ----------------------------------------------------------------------------------- processes

    def _signal(self, name: str, number: int, then: Callable[[Process], None] | None = None) -> int:
        """Send a signal to the processes of this name; return how many there are."""
        processes = self._host.processes(name)
        for process in processes:
            self._host.signal(process, number)
            if then is not None:
                then(process)
        return len(processes)

    def _continue_after(self, seconds: float) -> Callable[[Process], None]:
        def plan(process: Process) -> None:
            self._world.after(seconds, lambda: self._host.signal(process, signal.SIGCONT))

        return plan

    def _kill_worker(self, fault: Fault) -> int:
        return self._signal(f"worker {fault.worker}", signal.SIGKILL)

    def _crash_worker(self, fault: Fault) -> int:
        """Let a worker crash, as a script does that writes to its read-only parameters."""
        return self._signal(f"worker {fault.worker}", signal.SIGSEGV)

    def _freeze_worker(self, fault: Fault) -> int:
        plan = self._continue_after(fault.lasts_s)
        return self._signal(f"worker {fault.worker}", signal.SIGSTOP, plan)

    def _notice_worker(self, fault: Fault) -> int:
        """Let a worker leave because its machine is about to go."""
        processes = self._host.processes(f"worker {fault.worker}")
        for process in processes:
            say_goodbye(self._host, process)
        return len(processes)

    def _liar(self, fault: Fault) -> bool:
        tell_lies(self._host, fault)
        return self._host.launcher is not None and self._host.launcher.is_alive

    def _kill_server(self, fault: Fault) -> int:
        del fault
        return self._signal("server#", signal.SIGKILL)

    def _other_server(self, fault: Fault) -> str:
        return f"server {1 + fault.point % max(1, self._settings.servers - 1)}#"

    def _kill_other_server(self, fault: Fault) -> int:
        return self._signal(self._other_server(fault), signal.SIGKILL)

    def _freeze_other_server(self, fault: Fault) -> int:
        """Stop another server for a while, or for ever: then the launcher must replace it."""
        plan = self._continue_after(fault.lasts_s) if fault.point % 2 else None
        return self._signal(self._other_server(fault), signal.SIGSTOP, plan)

    def _kill_server_at_a_point(self, fault: Fault) -> None:
        """Kill the server at a later point of its life; if there is none, the next one."""
        for process in self._host.processes("server#"):
            process.dies_at = process.points + fault.point
            return
        self._kill_next_server_at_a_point(fault)

    def _kill_next_server_at_a_point(self, fault: Fault) -> None:
        """Kill a server that is yet to start; it may be restoring a checkpoint then."""
        self._host.server_deaths.append(fault.point)

    def _freeze_server(self, fault: Fault) -> int:
        """Stop the server for a while, or for ever: then the launcher must replace it."""
        plan = self._continue_after(fault.lasts_s) if fault.point % 2 else None
        return self._signal("server#", signal.SIGSTOP, plan)

    def _lock_server(self, fault: Fault) -> bool:
        """Let a server that serves wait for ever; the launcher must replace it.

        It can't tell a server that hangs before it serves from one that loads a large data set, and
        waits longer for one that saves the run.
        """
        del fault
        monitor, listening = self._host.monitor, self._host.kernel.listening
        if monitor is None or listening is None or not monitor.is_serving:
            return False
        listening.process.is_locked = listening.process.is_alive
        if monitor.is_saving:
            self._disturb(HUNG_SERVER_S)
        return True

    def _kill_launcher(self, fault: Fault) -> bool:
        del fault
        launcher = self._host.launcher
        if launcher is None or not launcher.is_alive:
            return False
        launcher.exit(-9)
        return True

    # --------------------------------------------------------------- connections, disk and clocks

    def _cut_worker(self, fault: Fault) -> int:
        return sum(map(self._cut, self._host.processes(f"worker {fault.worker}")))

    def _cut_launcher(self, fault: Fault) -> int:
        del fault
        return 0 if self._host.launcher is None else self._cut(self._host.launcher)

    def _cut(self, process: Process) -> int:
        listening = self._host.kernel.listening
        return 0 if listening is None else listening.cut(process)

    def _full_disk(self, fault: Fault) -> bool:
        self._set_disk("is_full", True, fault.lasts_s)
        return True

    def _slow_disk(self, fault: Fault) -> bool:
        self._set_disk("slow_s", 0.5, fault.lasts_s)
        self._disturb(fault.lasts_s)
        return True

    def _very_slow_disk(self, fault: Fault) -> bool:
        self._set_disk("sync_s", self._world.random.uniform(*SYNC_S), fault.lasts_s)
        return True

    def _set_disk(self, name: str, value: float, lasts_s: float) -> None:
        disk, normal = self._host.disk, type(value)()
        setattr(disk, name, value)
        self._world.after(lasts_s, lambda: setattr(disk, name, normal))

    def _lose_power(self, fault: Fault) -> bool:
        has_killed = self._kill_launcher(fault)
        self._host.disk.lose_power()
        return has_killed

    def _clock_leaps(self, fault: Fault) -> bool:
        """Let time pass in which nothing runs, as when a virtual machine is suspended."""
        self._world.now += 1000 * fault.lasts_s
        self._disturb(LEAP_S)
        return True

    def _wall_clock_jumps(self, fault: Fault) -> bool:
        """Set the clock that users see forwards or backwards."""
        self._world.wall_offset_s += 1000 * fault.lasts_s * (1 if fault.point % 2 else -1)
        return True

    # --------------------------------------------------------------------------- stops and limits

    def _terminate(self, fault: Fault) -> bool:
        del fault
        launcher = self._host.launcher
        if launcher is None or not launcher.is_alive or self._was_terminated:
            return False
        self._was_terminated = True
        self._stop(launcher, signal.SIGTERM)
        self._limit(STOP_S, lambda: self._check_stopped(launcher, "SIGTERM"))
        return True

    def _terminate_twice(self, fault: Fault) -> bool:
        """Ask the launcher to stop, and a little later to stop at once."""
        launcher, has_begun = self._host.launcher, self._terminate(fault)

        def stop_at_once() -> None:
            if launcher is not None and launcher.is_alive and self._host.launcher is launcher:
                self._world.note("the user interrupts again")
                self._stop(launcher, signal.SIGINT)
                self._limit(KILL_S, lambda: self._check_stopped(launcher, "the second signal"))

        # Most runs stop within milliseconds.
        self._world.after(fault.lasts_s / (100 if fault.point % 2 else 1), stop_at_once)
        return has_begun

    def _stop(self, launcher: Process, number: int) -> None:
        self._was_supervising |= self._host.is_supervising
        self._host.signal(launcher, number)

    def _check_stopped(self, launcher: Process, after: str) -> None:
        if launcher.is_alive:
            raise Violation(f"still running too long after {after}")

    def wait_and_stop(self, worker: int) -> None:
        """Do what a user does when a worker hangs: see that it is named, and stop the run."""
        launcher, begin, process = self._host.launcher, len(self._world.story), self._world.process
        self._world.note(f"HANG of worker {worker}")

        def stop() -> None:
            if self._host.launcher is launcher and launcher is not None and launcher.is_alive:
                lines = self._world.story[begin:]
                named = re.compile(rf"waiting for workers? .*\b{worker}\b")
                is_named = any(named.search(line) for line in lines)
                # A peer that isn't a worker of the run may stand in for it.
                has_more = any("a liar is worker" in line for line in self._world.story)
                # One that was stopped, or whose connection was cut, has left the run, which says so
                # and doesn't wait for it.
                coming = [line for line in lines if re.search(rf"worker {worker} (left|is)", line)]
                has_left = bool(coming) and " left: " in coming[-1]
                can_do_without = self._settings.policy != "sync" or has_more or has_left
                is_needed = process.is_alive and not can_do_without
                if is_needed and not self._was_terminated and not is_named:
                    raise Violation(f"worker {worker} hangs, but nobody says so")
                self._terminate(Fault(0.0, "terminate"))

        self._limit(HANG_S, stop)

    def _disturb(self, seconds: float) -> None:
        """Note that nothing has to be in time for so long."""
        self._disturbed_until = max(self._disturbed_until, self._world.now + seconds)

    def _limit(self, seconds: float, check: Callable[[], None], begin: float | None = None) -> None:
        """Check something after so many seconds in which no fault delays everything."""
        since = self._world.now if begin is None else begin

        def look() -> None:
            disturbed_until = max(self._disturbed_until, self._host.disk.busy_until)
            if disturbed_until > since:
                self._limit(seconds, check, disturbed_until)
            else:
                check()

        self._world.at(since + seconds, look)
