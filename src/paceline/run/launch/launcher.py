# SPDX-License-Identifier: BSD-3-Clause
"""Run a script on this machine: start its server and workers, restart them, end cleanly.

Processes are forked from a fork server that has torch loaded already. The workers start when the
server has reached `run.prepare()`, so what a script does before that, such as downloading a data
set, is done by one process first and found done by the others. A worker that dies is
restarted, and so is a server that was killed, until several restarts in a row make no progress. If
all workers fail in the same way, restarting won't help, and the run ends.
"""

import os
import selectors
import signal
import sys
from contextlib import ExitStack, suppress
from dataclasses import replace
from math import inf
from pathlib import Path
from time import monotonic

from paceline.errors import PacelineError, PeerLost
from paceline.run.launch.environment import Identity
from paceline.run.launch.forkserver import ForkServer
from paceline.run.launch.monitor import RunMonitor
from paceline.run.launch.outcome import of_updates, outcome
from paceline.run.launch.output import Output, OutputStream, PipeSafeScreen, PlainScreen, Screen
from paceline.run.launch.processes import Child, Processes
from paceline.run.launch.restarts import ATTEMPTS_MAX
from paceline.run.launch.run_folder import (
    discard_pending_spec,
    lock,
    mark_finished,
    write_run_files,
)
from paceline.run.launch.stop_signals import StopSignals
from paceline.run.settings import Settings

__all__ = ["Launcher"]

GRACE_S = 10.0  # for workers to exit after a signal or the server, for all to exit after a kill
SLOW_START_S = 10.0  # say after this long why no worker is running yet
READY_S = 1.0  # for a server to start serving when all workers have already failed
TICK_S = 0.2  # between checks of what sends no event


class Launcher:
    """One run on this machine."""

    def __init__(
        self, settings: Settings, run_dir: Path, forkserver: ForkServer | None = None
    ) -> None:
        self._settings = settings.with_absolute_paths()
        self._run_dir = run_dir.resolve()
        self._forkserver = forkserver or ForkServer()
        self._owns_forkserver = forkserver is None
        self._signals = StopSignals()
        self._signals_handled = 0
        self._server: Child | None = None
        self._workers: list[Child] = []
        self._unavailable: dict[int, str] = {}  # workers that won't be restarted, and why
        self._unreported: set[int] = set()  # those of them that the server doesn't know about
        self._completed: set[int] = (
            set()
        )  # workers whose scripts ended; a line may be printed for them
        self._have_workers_started = False
        self._say_slow_start_at = inf
        self._is_ending = False  # nothing is restarted from now on
        self._has_given_up = False  # all workers are gone before the end
        self._is_broken = False  # because the script crashes
        self._stop_server_at: float | None = None  # not None iff no worker is left to serve
        self._is_server_stopped = False  # it was sent SIGTERM
        self._is_server_lost_late = False  # it died after the last update, which workers know of
        self._kill_at = inf
        self._kill_workers_at = inf  # so that the server can end the run without them
        self._next_tick = 0.0

    def run(self, screen: Screen | None = None, first_line: str = "") -> int:
        """Run to the end, and show the output below `first_line`; return the exit code."""
        self._screen = PipeSafeScreen(screen or PlainScreen())
        with ExitStack() as stack:
            stack.callback(self._screen.close)
            stack.enter_context(lock(self._run_dir))
            if first_line:
                self._screen.line(first_line, sys.stderr)
            stack.callback(discard_pending_spec, self._run_dir)
            stack.enter_context(self._signals)
            self._selector = stack.enter_context(selectors.DefaultSelector())
            self._output = Output(self._selector, self._screen, self._run_dir / "output")
            self._processes = Processes(self._forkserver, self._output, self._settings)
            if self._owns_forkserver:
                stack.callback(self._forkserver.close)
            stack.callback(self._output.close)
            server = write_run_files(self._run_dir, self._settings)
            self._monitor = RunMonitor(server, self._selector)
            stack.callback(self._monitor.close)
            stack.callback(self._kill_remaining)
            return self._run(server)

    def _run(self, server: Identity) -> int:
        try:
            self._start(server)
            while self._processes or any(child.start_at is not None for child in self._children):
                self._step()
        except PeerLost as error:  # the system has killed everything forked from the fork server
            self._output.say(f"{error}; the run can't continue")
            self._processes.forget()
            return PacelineError.exit_code
        return self._exit_code()

    @property
    def _children(self) -> list[Child]:
        return [*([self._server] if self._server else []), *self._workers]

    @property
    def _is_any_worker_running(self) -> bool:
        return any(worker.pid is not None for worker in self._workers)

    @property
    def _have_all_scripts_ended(self) -> bool:
        have_ended = all(worker.pid is None and worker.code == 0 for worker in self._workers)
        return self._have_workers_started and have_ended

    def _start(self, server: Identity) -> None:
        spec = self._settings.spec
        self._forkserver.start()
        while not self._forkserver.wait_ready(TICK_S):
            if self._signals.count:
                return
            self._screen.tick()
        self._selector.register(self._forkserver, selectors.EVENT_READ)
        cores = len(os.sched_getaffinity(0))
        threads = max(1, cores // spec.workers)
        self._server = Child("server", server, cores)
        self._workers = [
            Child(f"worker {worker}", replace(server, worker=worker), threads)
            for worker in range(spec.workers)
        ]
        self._start_child(self._server)
        self._say_slow_start_at = monotonic() + SLOW_START_S

    def _start_workers(self) -> None:
        """Start all workers, once the server has reached `run.prepare()`."""
        if self._have_workers_started or self._is_ending or not self._monitor.is_serving:
            return
        self._have_workers_started = True
        self._say_slow_start_at = inf
        for worker in self._workers:
            self._start_child(worker)

    # ----------------------------------------------------------------------------- the main loop

    def _step(self) -> None:
        """Wait for the next event or tick, and handle whatever happened."""
        due = [self._monitor.retry_at, *(child.start_at for child in self._children)]
        until = min([self._next_tick, *(at for at in due if at is not None)])
        for key, _ in self._selector.select(max(0.0, until - monotonic())):
            if isinstance(key.data, OutputStream):
                self._output.read(key.data)
            elif key.data is self._monitor:
                self._monitor.receive()
                self._start_workers()
        for child in self._processes.take_exited():
            if child is self._server:
                self._monitor.on_server_exit()
                self._on_server_exited(child)
            else:
                self._on_worker_exited(child)
        if self._monitor.retry_at is not None and monotonic() >= self._monitor.retry_at:
            self._monitor.connect()
        if self._signals.count > self._signals_handled:
            self._on_stop_signal()
        if monotonic() >= self._next_tick:
            self._next_tick = monotonic() + TICK_S
            self._on_tick()
        for child in self._children:
            if child.start_at is not None and monotonic() >= child.start_at:
                self._restart(child)
        self._kill_overdue()

    def _on_tick(self) -> None:
        self._output.tick(monotonic())
        self._screen.tick()
        self._report_unavailable()
        self._say_early_ends()
        self._stop_idle_server()
        if monotonic() >= self._say_slow_start_at:
            self._say_slow_start_at = inf
            self._output.say("the workers start when the server has reached run.prepare()")

    def _on_worker_exited(self, worker: Child) -> None:
        assert worker.who.worker is not None
        if worker.code == 0:
            self._mark_unavailable(worker, "its script ended")
            self._completed.add(worker.who.worker)
            self._report_unavailable()  # if it is worker 0, the run ends
        elif not worker.is_killed and not self._is_broken:
            self._monitor.refresh()  # its last gradients may not be reported yet
            if worker.is_broken and not self._monitor.is_over:
                self._end_broken(worker)
            elif not self._may_start(worker) or self._all_failed_alike():
                self._output.say(f"{worker.name} {worker.exit_text}")
                self._mark_unavailable(worker, worker.exit_text)
            else:
                progress = self._monitor.accepted[worker.who.worker]
                self._schedule_restart(worker, worker.exit_text, progress)
        self._end_if_no_worker_is_left()

    def _on_server_exited(self, server: Child) -> None:
        self._is_server_lost_late |= server.code < 0 and self._monitor.is_over
        if server.code < 0 and not server.is_killed and self._may_start(server):
            self._schedule_restart(server, server.exit_text, self._monitor.version)
            if server.start_at is not None:
                return  # the workers reconnect when it is back
        elif server.code and not server.is_killed and not self._has_given_up:
            self._output.say(f"server {server.exit_text}")
        self._stop_restarting()
        if self._is_server_lost_late and not self._signals.count:
            return  # the workers know of the end, and exit by themselves
        # The remaining workers were stopped or have lost the server: don't wait long for them.
        self._kill_at = monotonic() + (GRACE_S if server.code == 0 else 1.0)

    def _on_stop_signal(self) -> None:
        """Stop cleanly at the first signal, immediately at the next."""
        if self._signals_handled == 0:
            self._output.say("stopping; interrupt again to stop immediately")
        self._signals_handled = self._signals.count
        self._stop_restarting()
        if self._signals.count == 1 and self._server is not None and self._server.pid is not None:
            self._server.signal(signal.SIGTERM)
            self._kill_workers_at = monotonic() + GRACE_S
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
            return child is self._server
        return not self._is_ending

    def _schedule_restart(self, child: Child, why: str, progress: int) -> None:
        pause_s = child.backoff.next_pause_s(progress)
        if pause_s is None:
            self._output.say(f"{child.name} {why}; gave up after {ATTEMPTS_MAX} failed restarts")
            self._mark_unavailable(child, why)
        else:
            child.start_at = monotonic() + pause_s
            self._output.say(
                f"{child.name} {why}; restarting in {pause_s:g} s "
                f"(attempt {child.backoff.attempts} of {ATTEMPTS_MAX})"
            )

    def _restart(self, child: Child) -> None:
        child.start_at = None
        if self._may_start(child):
            try:
                self._start_child(child)
            except PeerLost:
                raise
            except PacelineError as error:
                self._schedule_restart(child, f"could not be started: {error}", 0)
        self._end_if_no_worker_is_left()

    def _start_child(self, child: Child) -> None:
        if child is self._server:  # what was reported to the last server is lost
            self._unreported = set(self._unavailable)
            self._stop_server_at, self._is_server_stopped = None, False
            self._monitor.on_server_start()
        self._processes.start(child)

    def _stop_restarting(self) -> None:
        self._is_ending = True
        for child in self._children:
            if not self._may_start(child):
                child.start_at = None

    def _mark_unavailable(self, child: Child, reason: str) -> None:
        """Remember that a worker won't be restarted, so that the run doesn't wait for it."""
        if child.who.worker is not None:
            self._unavailable[child.who.worker] = reason
            self._unreported.add(child.who.worker)

    def _report_unavailable(self) -> None:
        if self._unreported and not self._is_ending:
            reasons = {worker: self._unavailable[worker] for worker in sorted(self._unreported)}
            ended = {worker for worker in reasons if self._workers[worker].code == 0}
            if self._monitor.report_unavailable(reasons, ended):
                self._unreported.clear()

    def _say_early_ends(self) -> None:
        """Print which workers' scripts ended although the run went on."""
        if self._is_any_worker_running or self._monitor.is_finished:
            left, version = self._monitor.left, self._monitor.version
            early = {worker for worker in self._completed if left.get(worker, version) < version}
            self._completed -= early
            for worker in sorted(early):
                at = f"{self._monitor.left[worker]}{of_updates(self._settings)}"
                self._output.say(f"the script of worker {worker} ended at update {at}")

    # ----------------------------------------------------------------------------------- the end

    def _all_failed_alike(self) -> bool:
        """Return whether no worker runs, and all failed for the same reason."""
        if self._is_any_worker_running:
            return False
        failures = {worker.failure for worker in self._workers}
        return len(failures) == 1 and failures != {""}

    def _end_broken(self, worker: Child) -> None:
        """End the run, because its script would crash in every worker, again and again."""
        self._output.say(f"{worker.name} {worker.exit_text}; ending the run")
        self._has_given_up = self._is_broken = True
        self._stop_restarting()
        self._processes.kill_silently(self._workers)
        self._stop_server_at = monotonic() + READY_S
        self._stop_idle_server()

    def _end_if_no_worker_is_left(self) -> None:
        if self._is_any_worker_running or not self._have_workers_started:
            return
        alike = self._all_failed_alike()
        if not alike and any(worker.start_at is not None for worker in self._workers):
            return
        has_failed = any(worker.code and not worker.is_killed for worker in self._workers)
        if has_failed and not self._is_ending and not self._monitor.is_over:
            self._has_given_up = True
            self._output.say(f"{self._why_no_worker_is_left(alike)}; ending the run")
        self._stop_restarting()
        if self._stop_server_at is None:
            self._stop_server_at = monotonic() + (READY_S if has_failed else GRACE_S)
            self._stop_idle_server()

    def _why_no_worker_is_left(self, alike: bool) -> str:
        if len(self._workers) == 1:
            return "the only worker is gone"
        if alike:
            return "all workers failed in the same way"
        return "all workers are gone and none will be restarted"

    def _stop_idle_server(self) -> None:
        """Stop a server that has no workers left; one that is starting gets time to serve first."""
        if self._stop_server_at is None or self._is_server_stopped or self._server is None:
            return
        if self._monitor.is_serving or monotonic() >= self._stop_server_at:
            self._is_server_stopped = True
            self._monitor.refresh()
            if self._is_broken and not self._monitor.version:  # there is nothing to save
                self._processes.kill_silently([self._server])
            else:
                self._server.signal(signal.SIGTERM)

    def _kill_overdue(self) -> None:
        if monotonic() > self._kill_at:
            self._processes.kill()
        elif monotonic() > self._kill_workers_at:
            self._processes.kill(spared=self._server)

    def _kill_remaining(self) -> None:
        until = monotonic() + GRACE_S
        self._is_ending = True
        for child in self._children:
            child.start_at = None
        with suppress(OSError, PeerLost):  # a closed terminal; a fork server that is gone
            self._processes.kill()
            while self._processes and monotonic() < until:
                self._step()

    def _exit_code(self) -> int:
        self._say_early_ends()
        end = self._monitor.end
        if end is not None and self._monitor.is_finished and not self._workers[0].code:
            mark_finished(self._run_dir, end.version)
        if self._signals.count:
            return 128 + self._signals.last
        assert self._server is not None
        code, why = outcome(self._settings, self._server, self._workers, self._monitor)
        if why:
            self._output.say(why)
        return code
