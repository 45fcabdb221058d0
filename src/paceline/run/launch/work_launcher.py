# SPDX-License-Identifier: BSD-3-Clause
"""Run workers on this host for a run whose server is elsewhere: set up, wait for events, end.

It is to workers what `launcher` is to a whole run: processes are forked from a fork server that has
torch loaded, restarted if they die, and ended with the launcher. Nothing is written to disk.
"""

import selectors
from contextlib import ExitStack
from dataclasses import replace

from paceline.run.launch.awake_clock import with_awake_clock
from paceline.run.launch.environment import Identity
from paceline.run.launch.event_loop import EventLoop
from paceline.run.launch.forkserver import ForkServer
from paceline.run.launch.head_connection import HeadConnection
from paceline.run.launch.output import Output
from paceline.run.launch.processes import Processes
from paceline.run.launch.screen import PlainScreen, SafeScreen
from paceline.run.launch.stop_signals import StopSignals
from paceline.run.launch.watch_channel import dialer
from paceline.run.launch.work_supervisor import WorkSupervisor
from paceline.run.net.server_wait import ServerWait
from paceline.run.settings import Settings
from paceline.run.system import SYSTEM

__all__ = ["WorkLauncher"]


class WorkLauncher:
    """The workers of one host."""

    def __init__(self, who: Identity, settings: Settings, forkserver: ForkServer) -> None:
        """`who`: the identity of all workers, with a number only if that is fixed.

        `settings`: the script, and what is done with its processes; its workers are those of this
        host.
        """
        self._who = replace(who, token_file=who.token_file.resolve())
        self._settings = settings.with_absolute_paths()
        self._forkserver = forkserver
        self._signals = StopSignals()
        self._system = with_awake_clock(SYSTEM)

    def run(self) -> int:
        """Run the workers until all of them have ended; return the exit code."""
        screen = SafeScreen(PlainScreen())
        with ExitStack() as stack:
            stack.callback(screen.close)
            stack.enter_context(self._signals)
            selector = stack.enter_context(selectors.DefaultSelector())
            output = Output(selector, screen, None)
            stack.callback(output.close)
            wait = ServerWait("the server", output.say, self._system.monotonic)
            link = HeadConnection(dialer(self._who, selector), wait, self._system)
            stack.callback(link.monitor.close)
            processes = Processes(self._forkserver, output, self._settings)
            supervisor = WorkSupervisor(
                self._who,
                self._settings,
                processes,
                link,
                self._signals,
                self._system,
            )
            loop = EventLoop(
                selector, output, screen, self._forkserver, self._signals, self._system
            )
            stack.callback(loop.kill_remaining, processes, supervisor, link.monitor.receive)
            code = loop.run(processes, supervisor, link.monitor.receive, supervisor.start)
            return code or supervisor.exit_code()
