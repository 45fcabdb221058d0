# SPDX-License-Identifier: BSD-3-Clause
"""Decide what happens to the processes of a run: when to start, restart, stop and kill them.

The workers start when the server has reached `run.prepare()`. A worker that dies is restarted, and
so is a server that was killed, until several restarts in a row make no progress. If all workers
fail in the same way, restarting won't help, and the run ends.

The supervisor never waits. Its owner calls `step` when something has happened, and at `wake_at`.
"""

import signal
from collections.abc import Callable
from dataclasses import replace
from math import inf
from pathlib import Path

from paceline.errors import PacelineError, PeerLost
from paceline.run.cores import threads_of
from paceline.run.launch.environment import SERVER_LOST, Identity
from paceline.run.launch.hang_report import HangReport
from paceline.run.launch.hangs import EndGrace, ServerWatch, StopLimits
from paceline.run.launch.monitor import RunMonitor
from paceline.run.launch.outcome import of_updates, outcome, why_no_worker_is_left
from paceline.run.launch.part_servers import PartServers
from paceline.run.launch.processes import Child, Processes
from paceline.run.launch.run_folder import mark_finished
from paceline.run.launch.stop_signals import StopSignals
from paceline.run.launch.unavailable_workers import UnavailableWorkers
from paceline.run.settings import Settings
from paceline.run.system import SYSTEM, System
from paceline.trace.reader import read_end
from paceline.trace.schema import NAME as TRACE

__all__ = ["Supervisor"]

GRACE_S = 10.0  # for workers to exit after the server, for all to exit after a kill
READY_S = 1.0  # for a server to start serving when all workers have already failed
TICK_S = 0.2  # between checks of what sends no event


class Supervisor:
    """The decisions of a launcher."""

    def __init__(
        self,
        settings: Settings,
        processes: Processes,
        monitor: RunMonitor,
        signals: StopSignals,
        say: Callable[[str], None],
        system: System = SYSTEM,
    ) -> None:
        """`say` shows a line to the user."""
        self._settings = settings
        self._processes = processes
        self._monitor = monitor
        self._signals = signals
        self._say = say
        self._now = system.monotonic
        self._disk = system.disk
        self._server_watch = ServerWatch(monitor, system)
        self._hang_report = HangReport(monitor, processes, say, system)
        self._stop_limits = StopLimits(monitor, system)
        self._end_grace = EndGrace(settings.grace_s, monitor, system)
        self._signals_handled = 0
        self._server: Child | None = None
        self._others = PartServers(processes, say, system)
        self._workers: list[Child] = []
        self._unavailable = UnavailableWorkers(monitor, say)
        self._have_workers_started = False
        self._is_ending = False  # nothing is restarted from now on
        self._has_given_up = False  # all workers are gone before the end
        self._is_broken = False  # because the script crashes
        self._stop_server_at: float | None = None  # not None iff no worker is left to serve
        self._is_server_stopped = False  # it was sent SIGTERM
        self._is_ended_by_scripts = False  # it was, because all scripts had ended
        self._is_server_lost_late = False  # it died after workers had been told of the end
        self._kill_at = inf
        self._next_tick = 0.0

    def start(self, server: Identity, *, workers_elsewhere: bool = False) -> None:
        """Start the server of the run; its workers follow when it serves.

        `workers_elsewhere`: all workers join from elsewhere, so start none.
        """
        workers = 0 if workers_elsewhere else self._settings.spec.workers
        self._server = Child("server", server, threads_of(1))
        others = 1 if workers_elsewhere else self._settings.servers
        self._others.create(server, others, threads_of(1))
        self._workers = [
            Child(f"worker {w}", replace(server, worker=w), threads_of(workers), is_quiet=w > 0)
            for w in range(workers)
        ]
        for child in (self._server, *self._others.children):
            self._start_child(child)

    @property
    def is_done(self) -> bool:
        """Whether no process is running or will be started."""
        return not self._processes and all(child.start_at is None for child in self._children)

    @property
    def wake_at(self) -> float:
        """When to call `step`, even if nothing has happened."""
        due = [self._monitor.retry_at, *(child.start_at for child in self._children)]
        return min([self._next_tick, *(at for at in due if at is not None)])

    def step(self) -> bool:
        """Act on whatever has happened, and on what is due; return whether a tick was due."""
        self._start_workers()
        for child in self._processes.take_exited():
            if child is self._server:
                self._on_server_exited(child)
            elif child in self._others:
                self._on_other_server_exited(child)
            else:
                self._on_worker_exited(child)
        if self._monitor.retry_at is not None and self._now() >= self._monitor.retry_at:
            self._monitor.connect()
        if self._signals.count > self._signals_handled:
            self._on_stop_signal()
        is_tick = self._now() >= self._next_tick
        if is_tick:
            self._next_tick = self._now() + TICK_S
            self._on_tick()
        for child in self._children:
            if child.start_at is not None and self._now() >= child.start_at:
                self._restart(child)
        self._others.end_without(self._server)
        self._kill_overdue()
        return is_tick

    def kill_all(self) -> None:
        """Kill every process, and start none from now on."""
        self._is_ending = True
        for child in self._children:
            child.start_at = None
        self._processes.kill()

    @property
    def _children(self) -> list[Child]:
        return [*([self._server] if self._server else []), *self._others.children, *self._workers]

    @property
    def _is_any_worker_running(self) -> bool:
        return any(worker.pid is not None for worker in self._workers)

    @property
    def _have_all_scripts_ended(self) -> bool:
        have_ended = all(worker.pid is None and worker.has_completed for worker in self._workers)
        return self._have_workers_started and have_ended and bool(self._workers)

    def _start_workers(self) -> None:
        """Start all workers, once the server has reached `run.prepare()`."""
        if self._have_workers_started or self._is_ending or not self._monitor.is_serving:
            return
        self._have_workers_started = True
        for worker in self._workers:
            self._start_child(worker)

    # ------------------------------------------------------------------------ what has happened

    def _on_tick(self) -> None:
        self._report_unavailable()
        self._say_early_ends()
        self._stop_idle_server()
        self._hang_report.tick(self._server, self._workers, self._others.children)
        if self._signals.count:
            self._monitor.ask()  # is it alive?
        self._end_hung_server()
        if self._monitor.over_since is not None:
            self._end_late_workers(self._monitor.over_since)

    def _on_worker_exited(self, worker: Child) -> None:
        assert worker.who.worker is not None
        if worker.has_left:
            self._mark_unavailable(worker, worker.exit_text)
        elif worker.code == 0:
            self._unavailable.add_completed(worker.who.worker)
            self._report_unavailable()  # if it is worker 0, the run ends
        elif worker.is_killed:
            self._mark_unavailable(worker, "it was killed")
        elif not self._is_broken:
            self._monitor.refresh()  # its last gradients may not be reported yet
            if worker.is_broken and not self._monitor.is_over:
                self._end_broken(worker)
            elif not self._may_start(worker) or self._all_failed_alike():
                self._say(f"{worker.name} {worker.exit_text}")
                self._mark_unavailable(worker, worker.exit_text)
            else:
                progress = self._monitor.accepted[worker.who.worker]
                self._schedule_restart(worker, worker.exit_text, progress)
        self._end_if_no_worker_is_left()

    def _on_server_exited(self, server: Child) -> None:
        # A server exits with 0 only if it has written the end, or if the script never served a run:
        # then the end in the trace is that of an earlier launch.
        has_written = server.code == 0 and self._monitor.was_served
        written = read_end(server.who.run_dir / TRACE) if has_written else None
        self._monitor.on_server_exit(written)
        is_lost = server.code < 0 or server.code == SERVER_LOST
        self._is_server_lost_late |= is_lost and self._monitor.is_told
        if is_lost and not server.is_killed and self._may_start(server):
            self._schedule_restart(server, server.exit_text, self._monitor.version)
            if server.start_at is not None:
                return  # the workers reconnect when it is back
        elif server.code and not server.is_killed and not self._has_given_up:
            self._say(f"server {server.exit_text}")
        self._stop_restarting()
        if self._is_server_lost_late and not self._signals.count:
            return  # the workers know of the end, and exit by themselves
        # The remaining workers were stopped or have lost the server: don't wait long for them.
        has_ended = server.code == 0 and self._monitor.end is not None
        self._kill_at = self._now() + (GRACE_S if has_ended else 1.0)

    def _on_other_server_exited(self, server: Child) -> None:
        """Restart another server; the head notices its loss, and is restarted as well."""
        if server.is_killed or self._is_ending or (server.code == 0 and self._monitor.is_over):
            return  # the run is over
        if server.code <= 0 and self._may_start(server):
            self._schedule_restart(server, server.exit_text, self._monitor.version)
        if server.start_at is None and self._server is not None:
            self._say(f"{server.name} {server.exit_text}; ending the run")
            self._has_given_up = True
            self._stop_restarting()
            self._processes.signal(self._server, signal.SIGTERM)

    def _on_stop_signal(self) -> None:
        """Stop cleanly at the first signal, immediately at the next."""
        if self._signals_handled == 0:
            self._say("stopping; interrupt again to stop immediately")
        self._signals_handled = self._signals.count
        self._stop_restarting()
        if self._signals.count == 1 and self._server is not None and self._server.pid is not None:
            self._processes.signal(self._server, signal.SIGTERM)
            self._stop_limits.begin()
        else:
            self._kill_at = 0.0

    # ---------------------------------------------------------------------------------- restarts

    def _may_start(self, child: Child) -> bool:
        """Return whether starting it makes sense.

        After the last update, or when all scripts have ended, only a server does: it has to write
        what the run has learned.
        """
        monitor = self._monitor
        if self._signals.count or monitor.end is not None or not self._settings.restart:
            return False
        if monitor.is_over or self._have_all_scripts_ended:
            return child.who.worker is None
        return not self._is_ending

    def _schedule_restart(self, child: Child, why: str, progress: int) -> None:
        pause_s = child.backoff.next_pause_s(progress)
        self._say(child.backoff.line(f"{child.name} {why}", pause_s))
        if pause_s is None:
            self._mark_unavailable(child, why)
        else:
            child.start_at = self._now() + pause_s

    def _restart(self, child: Child) -> None:
        child.start_at = None
        if self._may_start(child):
            try:
                self._start_child(child)
            except PeerLost:
                raise
            except PacelineError as error:
                self._schedule_restart(child, f"could not be started: {error}", 0)
        else:  # the run is over; a server that has lost its end must not wait for this worker
            self._mark_unavailable(child, child.exit_text)
        self._end_if_no_worker_is_left()

    def _start_child(self, child: Child) -> None:
        if child is self._server:  # what was reported to the last server is lost
            self._unavailable.on_server_start()
            self._stop_server_at, self._is_server_stopped = None, False
            self._monitor.on_server_start()
            self._server_watch.begin()
        self._processes.start(child)

    def _stop_restarting(self) -> None:
        self._is_ending = True
        for child in self._children:
            if not self._may_start(child):
                child.start_at = None

    def _mark_unavailable(self, child: Child, reason: str) -> None:
        """Remember that a worker won't be restarted, so that the run doesn't wait for it."""
        if child.who.worker is not None:
            self._unavailable.add(child.who.worker, reason)

    def _report_unavailable(self) -> None:
        if not self._is_ending:
            self._unavailable.report()

    def _say_early_ends(self) -> None:
        if self._is_any_worker_running or self._monitor.is_finished:
            self._unavailable.say_early_ends(of_updates(self._settings))

    # ----------------------------------------------------------------------------------- the end

    def _all_failed_alike(self) -> bool:
        """Return whether no worker runs, and all failed for the same reason."""
        if self._is_any_worker_running:
            return False
        failures = {worker.failure for worker in self._workers}
        return len(failures) == 1 and failures != {""}

    def _end_broken(self, worker: Child) -> None:
        """End the run, because its script would crash in every worker, again and again."""
        self._say(f"{worker.name} {worker.exit_text}; ending the run")
        self._has_given_up = self._is_broken = True
        self._stop_restarting()
        self._processes.kill_silently(self._workers)
        self._stop_server_at = self._now() + READY_S
        self._stop_idle_server()

    def _end_if_no_worker_is_left(self) -> None:
        if self._is_any_worker_running or not (self._workers and self._have_workers_started):
            return  # without workers, all of them are elsewhere
        alike = self._all_failed_alike()
        if not alike and any(worker.start_at is not None for worker in self._workers):
            return
        has_failed = any(worker.code and not worker.is_killed for worker in self._workers)
        if has_failed and not self._is_ending and not self._monitor.is_over:
            self._has_given_up = True
            self._say(f"{why_no_worker_is_left(len(self._workers), alike)}; ending the run")
        self._stop_restarting()
        if self._stop_server_at is None:
            self._stop_server_at = self._now() + (READY_S if has_failed else GRACE_S)
            self._stop_idle_server()

    def _stop_idle_server(self) -> None:
        """Stop a server that has no workers left; one that is starting gets time to serve first."""
        if self._stop_server_at is None or self._is_server_stopped or self._server is None:
            return
        if self._monitor.is_serving or self._now() >= self._stop_server_at:
            self._is_server_stopped = True
            self._monitor.refresh()
            self._is_ended_by_scripts |= self._have_all_scripts_ended and not self._monitor.is_over
            if self._is_broken and not self._monitor.version:  # there is nothing to save
                self._processes.kill_silently([self._server])
            else:
                self._processes.signal(self._server, signal.SIGTERM)

    def _kill_overdue(self) -> None:
        pid = None if self._server is None else self._server.pid
        if self._now() > self._kill_at or self._stop_limits.is_server_overdue(pid):
            self._processes.kill()
        elif self._stop_limits.are_workers_overdue:
            self._processes.kill(spared=[self._server, *self._others.children])

    def _end_hung_server(self) -> None:
        """Kill a server that has hung; unless the run is stopped, the next one continues."""
        self._others.end_frozen()
        if self._server is None or self._server.pid is None:
            return
        if why := self._server_watch.why_hung(self._server.pid):
            self._say(f"server {why}; killing it")
            self._others.end_with_hung(self._server)
            self._server_watch.begin()  # until the OS reports its exit
            self._processes.signal(self._server, signal.SIGKILL)

    def _end_late_workers(self, over_since: float) -> None:
        """Kill workers that don't end after the last update; the result is safe by then."""
        running = [worker for worker in self._workers if worker.pid and not worker.is_killed]
        limits = self._end_grace.limits(running, over_since)
        for worker in [worker for worker in running if self._now() >= limits[worker]]:
            limit = f"{self._settings.grace_s:g} s after the last update"
            self._say(f"{worker.name} was still running {limit} and was killed")
            self._processes.kill_silently([worker])
            del limits[worker]
        line = self._end_grace.line(limits, over_since)
        if line and not self._signals.count:
            self._say(line)

    def exit_code(self, run_dir: Path) -> int:
        """Return the exit code of the run, and mark its folder if the run is finished."""
        self._say_early_ends()
        signals = self._signals.count  # one that comes later finds the run ended
        end, server = self._monitor.end, self._server
        is_complete = self._monitor.is_finished and server is not None and server.code <= 0
        is_first_lost = bool(self._workers and not self._workers[0].has_completed)
        if end is not None and is_complete and not is_first_lost:
            mark_finished(run_dir, end.version, self._disk)
        if signals:
            return 128 + self._signals.last
        assert self._server is not None
        # The server can't know it if there are workers that were started by hand.
        self._monitor.have_scripts_ended |= self._is_ended_by_scripts
        code, why = outcome(self._settings, self._server, self._workers, self._monitor)
        if why and not self._has_given_up:  # otherwise the reason was already said
            self._say(why)
        return code
