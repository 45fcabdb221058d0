# SPDX-License-Identifier: BSD-3-Clause
"""The event loop of a launcher: wait for output, reports, exits and signals, and let others act.

What happens is decided by a supervisor, which never waits. The loop calls it when something has
happened, and when it wants to be called.
"""

from collections.abc import Callable
from contextlib import suppress
from selectors import EVENT_READ, BaseSelector
from typing import Protocol

from paceline.errors import PacelineError, PeerLost
from paceline.run.launch.forkserver import ForkServer
from paceline.run.launch.output import Output, OutputStream
from paceline.run.launch.processes import Processes
from paceline.run.launch.screen import Screen
from paceline.run.launch.stop_signals import StopSignals
from paceline.run.system import System

__all__ = ["EventLoop"]

TICK_S = 0.2  # between two looks at what sends no event
KILLED_S = 10.0  # for all processes to exit after a kill


class Decides(Protocol):
    """Decides what happens to processes."""

    @property
    def is_done(self) -> bool:
        """Whether no process is running or will be started."""

    @property
    def wake_at(self) -> float:
        """When to call `step`, even if nothing has happened."""

    def step(self) -> bool:
        """Act on whatever has happened, and on what is due; return whether a tick was due."""

    def kill_all(self) -> None:
        """Kill every process, and start none from now on."""


class EventLoop:
    """Waits for whatever happens to the processes of a launcher."""

    def __init__(
        self,
        selector: BaseSelector,
        output: Output,
        screen: Screen,
        forkserver: ForkServer,
        signals: StopSignals,
        system: System,
    ) -> None:
        self._selector = selector
        self._output = output
        self._screen = screen
        self._forkserver = forkserver
        self._signals = signals
        self._now = system.monotonic

    def run(
        self,
        processes: Processes,
        supervisor: Decides,
        receive: Callable[[], None],
        start: Callable[[], None],
    ) -> int:
        """Call `start` when processes can be started, and wait until all is done.

        `receive`: handles what has arrived from the server. Returns 0, or the exit code if the OS
        has killed everything.
        """
        try:
            if self._wait_for_forkserver():
                start()
            while not supervisor.is_done:
                self._step(supervisor, receive)
        except PeerLost as error:  # the system has killed everything forked from the fork server
            self._output.say(f"{error}; the run can't continue")
            processes.forget()
            return PacelineError.exit_code
        return 0

    def kill_remaining(
        self, processes: Processes, supervisor: Decides, receive: Callable[[], None]
    ) -> None:
        """Kill what still runs, and wait until it is gone."""
        until = self._now() + KILLED_S
        with suppress(OSError, PeerLost):  # a closed terminal; a fork server that is gone
            supervisor.kill_all()
            while processes and self._now() < until:
                self._step(supervisor, receive)

    def _wait_for_forkserver(self) -> bool:
        """Wait until it has loaded torch; return False if a signal came first."""
        self._forkserver.start()
        while not self._forkserver.wait_ready(TICK_S):
            if self._signals.count:
                return False
            self._screen.tick()
        self._selector.register(self._forkserver, EVENT_READ)
        return True

    def _step(self, supervisor: Decides, receive: Callable[[], None]) -> None:
        """Wait for the next event, or until something is due, and handle it."""
        wait_s = supervisor.wake_at - self._now()
        for key, _ in self._selector.select(max(0.0, wait_s)):
            if isinstance(key.data, OutputStream):
                self._output.read(key.data)
            elif key.fileobj is not self._forkserver:
                receive()
        if supervisor.step():
            self._output.tick(self._now())
            self._screen.tick()
