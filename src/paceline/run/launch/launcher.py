# SPDX-License-Identifier: BSD-3-Clause
"""Run a script on this machine: set up its folder, wait for events, end cleanly.

Processes are forked from a fork server that has torch loaded already. The server starts first, so
what a script does before `run.prepare()`, such as downloading a data set, is done by one process
first and found done by the others. The launcher waits for output, reports and signals; the
supervisor decides what to do.
"""

import selectors
import sys
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import PacelineError, PeerLost, SpecError
from paceline.run.launch.awake_clock import with_awake_clock
from paceline.run.launch.environment import Identity
from paceline.run.launch.forkserver import ForkServer
from paceline.run.launch.monitor import RunMonitor
from paceline.run.launch.outer_launcher import announce
from paceline.run.launch.output import Output, OutputStream
from paceline.run.launch.processes import Processes
from paceline.run.launch.run_folder import (
    discard_pending_spec,
    lock,
    new_address,
    tls_files,
    write_run_files,
)
from paceline.run.launch.screen import PlainScreen, SafeScreen, Screen
from paceline.run.launch.stop_signals import StopSignals
from paceline.run.launch.supervisor import GRACE_S, TICK_S, Supervisor
from paceline.run.launch.watch_channel import dialer
from paceline.run.net.address import bind, host_of, is_tcp, of_socket
from paceline.run.net.tls import check_files
from paceline.run.settings import Settings
from paceline.run.system import SYSTEM

__all__ = ["Launcher", "Reachable"]


@dataclass(frozen=True)
class Reachable:
    """How workers on other hosts reach the server of a run."""

    address: str  # such as tcp:10.0.0.5:29400
    token_file: Path  # both sides need the same token


class Launcher:
    """One run on this machine, or the server of one whose workers are elsewhere."""

    def __init__(
        self,
        settings: Settings,
        run_dir: Path,
        forkserver: ForkServer | None = None,
        reachable: Reachable | None = None,
    ) -> None:
        """`reachable`: start only the server, with this address; None: start the workers, too."""
        self._reachable = reachable
        self._settings = settings.with_absolute_paths()
        self._address = reachable.address if reachable else new_address(self._settings)
        tls = tls_files(self._settings)
        if tls is not None and not is_tcp(self._address):
            raise SpecError(
                "TLS needs --transport tcp: shared memory and Unix sockets never leave this machine"
            )
        if tls is not None:
            check_files(tls, host_of(self._address))
        self._run_dir = run_dir.resolve()
        self._forkserver = forkserver or ForkServer()
        self._owns_forkserver = forkserver is None
        self._signals = StopSignals()
        self._system = with_awake_clock(SYSTEM)

    def run(self, screen: Screen | None = None, first_line: str = "") -> int:
        """Run to the end, and show the output below `first_line`; return the exit code."""
        self._screen = SafeScreen(screen or PlainScreen())
        with ExitStack() as stack:
            stack.callback(self._screen.close)
            stack.enter_context(lock(self._run_dir))
            if first_line and self._reachable is None:
                self._screen.line(first_line, sys.stderr)
            stack.callback(discard_pending_spec, self._run_dir)
            stack.enter_context(self._signals)
            self._selector = stack.enter_context(selectors.DefaultSelector())
            self._output = Output(self._selector, self._screen, self._run_dir / "output")
            if self._owns_forkserver:
                stack.callback(self._forkserver.close)
            stack.callback(self._output.close)
            # Hold the address for the whole run: while the server restarts, nobody can take it.
            listening = stack.enter_context(bind(self._address))
            address = of_socket(listening, self._address)
            token_file = self._reachable.token_file if self._reachable else None
            server = write_run_files(self._run_dir, self._settings, address, token_file)
            if self._reachable:
                where = f"listening at {address.removeprefix('tcp:')}"
                self._screen.line(f"{first_line}; {where}" if first_line else where, sys.stderr)
                announce(server)
            processes = self._processes = Processes(
                self._forkserver, self._output, self._settings, listening
            )
            monitor = self._monitor = RunMonitor(dialer(server, self._selector), self._system)
            stack.callback(monitor.close)
            self._supervisor = Supervisor(
                self._settings, processes, monitor, self._signals, self._output.say, self._system
            )
            stack.callback(self._kill_remaining)
            return self._run(server)

    def _run(self, server: Identity) -> int:
        try:
            if self._wait_for_forkserver():
                self._supervisor.start(server, workers_elsewhere=self._reachable is not None)
            while not self._supervisor.is_done:
                self._step()
        except PeerLost as error:  # the system has killed everything forked from the fork server
            self._output.say(f"{error}; the run can't continue")
            self._processes.forget()
            return PacelineError.exit_code
        return self._supervisor.exit_code(self._run_dir)

    def _wait_for_forkserver(self) -> bool:
        """Wait until it has loaded torch; return False if a signal came first."""
        self._forkserver.start()
        while not self._forkserver.wait_ready(TICK_S):
            if self._signals.count:
                return False
            self._screen.tick()
        self._selector.register(self._forkserver, selectors.EVENT_READ)
        return True

    def _step(self) -> None:
        """Wait for the next event, or until something is due, and handle it."""
        wait_s = self._supervisor.wake_at - self._system.monotonic()
        for key, _ in self._selector.select(max(0.0, wait_s)):
            if isinstance(key.data, OutputStream):
                self._output.read(key.data)
            elif key.fileobj is not self._forkserver:
                self._monitor.receive()
        if self._supervisor.step():
            self._output.tick(self._system.monotonic())
            self._screen.tick()

    def _kill_remaining(self) -> None:
        until = self._system.monotonic() + GRACE_S
        with suppress(OSError, PeerLost):  # a closed terminal; a fork server that is gone
            self._supervisor.kill_all()
            while self._processes and self._system.monotonic() < until:
                self._step()
