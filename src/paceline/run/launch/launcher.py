# SPDX-License-Identifier: BSD-3-Clause
"""Run a script on this machine: set up its folder, wait for events, end cleanly.

Processes are forked from a fork server that has torch loaded already. The server starts first, so
what a script does before `run.prepare()`, such as downloading a data set, is done by one process
first and found done by the others. The launcher waits for output, reports and signals; the
supervisor decides what to do.
"""

import selectors
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from paceline.errors import SpecError
from paceline.run.launch.awake_clock import with_awake_clock
from paceline.run.launch.event_loop import EventLoop
from paceline.run.launch.forkserver import ForkServer
from paceline.run.launch.monitor import RunMonitor
from paceline.run.launch.outer_launcher import announce
from paceline.run.launch.output import Output
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
from paceline.run.launch.supervisor import Supervisor
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
        shown = SafeScreen(screen or PlainScreen())
        with ExitStack() as stack:
            stack.callback(shown.close)
            stack.enter_context(lock(self._run_dir))
            if first_line and self._reachable is None:
                shown.line(first_line, sys.stderr)
            stack.callback(discard_pending_spec, self._run_dir)
            stack.enter_context(self._signals)
            selector = stack.enter_context(selectors.DefaultSelector())
            output = Output(selector, shown, self._run_dir / "output")
            if self._owns_forkserver:
                stack.callback(self._forkserver.close)
            stack.callback(output.close)
            # Hold the address for the whole run: while the server restarts, nobody can take it.
            listening = stack.enter_context(bind(self._address))
            address = of_socket(listening, self._address)
            token_file = self._reachable.token_file if self._reachable else None
            server = write_run_files(self._run_dir, self._settings, address, token_file)
            if self._reachable:
                where = f"listening at {address.removeprefix('tcp:')}"
                shown.line(f"{first_line}; {where}" if first_line else where, sys.stderr)
                announce(server)
            processes = Processes(self._forkserver, output, self._settings, listening)
            monitor = RunMonitor(dialer(server, selector), self._system)
            stack.callback(monitor.close)
            supervisor = Supervisor(
                self._settings, processes, monitor, self._signals, output.say, self._system
            )
            loop = EventLoop(selector, output, shown, self._forkserver, self._signals, self._system)
            stack.callback(loop.kill_remaining, processes, supervisor, monitor.receive)
            is_elsewhere = self._reachable is not None
            start = partial(supervisor.start, server, workers_elsewhere=is_elsewhere)
            code = loop.run(processes, supervisor, monitor.receive, start)
            return code or supervisor.exit_code(self._run_dir)
