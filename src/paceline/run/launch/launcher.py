# SPDX-License-Identifier: BSD-3-Clause
"""Run a script on this machine or on a cluster: set up its folder, wait for events, end cleanly.

On this machine, processes are forked from a fork server that has torch loaded already. The server
starts first, so what a script does before `run.prepare()`, such as downloading a data set, is done
by one process first and found done by the others. The launcher waits for output, reports and
signals; the supervisor decides what to do.
"""

import selectors
import socket
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from paceline.errors import SpecError
from paceline.run.launch.awake_clock import with_awake_clock
from paceline.run.launch.environment import Identity
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
from paceline.run.launch.spawner import RemoteSpawner, Spawner
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
    """One run on this machine or a cluster, or the server of one whose workers are elsewhere."""

    def __init__(
        self,
        settings: Settings,
        run_dir: Path,
        forkserver: ForkServer | None = None,
        reachable: Reachable | None = None,
        cluster: RemoteSpawner | None = None,
    ) -> None:
        """`reachable`: start only the server, with this address; None: start the workers, too.

        `cluster`: start all processes there instead of here.
        """
        self._reachable, self._cluster = reachable, cluster
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
        self._spawner: Spawner = cluster or forkserver or ForkServer()
        self._owns_spawner = cluster is None and forkserver is None
        self._signals = StopSignals()
        self._system = with_awake_clock(SYSTEM if cluster is None else cluster.system(SYSTEM))

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
            if self._owns_spawner:
                stack.callback(self._spawner.close)
            stack.callback(output.close)
            listening = self._bind(stack)
            server = self._prepare_head(listening, output.say)
            if self._reachable is not None:
                where = f"listening at {server.address.removeprefix('tcp:')}"
                shown.line(f"{first_line}; {where}" if first_line else where, sys.stderr)
                announce(server)
            processes = Processes(self._spawner, output, self._settings, listening)
            monitor = RunMonitor(dialer(server, selector), self._system)
            stack.callback(monitor.close)
            supervisor = Supervisor(
                self._settings, processes, monitor, self._signals, output.say, self._system
            )
            loop = EventLoop(selector, output, shown, self._spawner, self._signals, self._system)
            stack.callback(loop.kill_remaining, processes, supervisor, monitor.receive)
            is_elsewhere = self._reachable is not None
            start = partial(supervisor.start, server, workers_elsewhere=is_elsewhere)
            code = loop.run(processes, supervisor, monitor.receive, start)
            return code or supervisor.exit_code(self._run_dir)

    def _bind(self, stack: ExitStack) -> socket.socket | None:
        """Return the socket of the head; None: it opens one itself when it has found a place.

        The launcher holds it for the whole run: while the server restarts, nobody can take it.
        """
        return None if self._cluster is not None else stack.enter_context(bind(self._address))

    def _prepare_head(
        self, listening: socket.socket | None, say: Callable[[str], None]
    ) -> Identity:
        """Write the files of the run; return the identity of its head."""
        address = "" if listening is None else of_socket(listening, self._address)
        token_file = self._reachable.token_file if self._reachable else None
        server = write_run_files(self._run_dir, self._settings, address, token_file)
        return server if self._cluster is None else self._cluster.serve(server, say)
