# SPDX-License-Identifier: BSD-3-Clause
"""A head elsewhere, and processes on this host, without sockets and without waiting.

Both have the interface of the real things, so that the decisions of a launcher of workers can be
tested one by one, on a clock that the test moves.
"""

import signal

from paceline.errors import PeerLost
from paceline.run.launch.environment import Identity
from paceline.run.launch.forkserver import describe_exit
from paceline.run.launch.head_connection import HeadConnection
from paceline.run.launch.processes import Child
from paceline.run.net.address import NobodyListens
from paceline.run.net.messages import NumberReserved, ReserveNumber, RunProgress
from paceline.run.net.server_wait import ServerWait
from paceline.run.system import System

__all__ = ["FakeHead", "FakeProcesses"]


class FakeHead:
    """What a launcher talks to, and the link to it; the clock moves only when a test moves it."""

    def __init__(self):
        self.now = 0.0
        self.is_there = True
        self.error = None  # what connecting raises instead
        self.connections = 0
        self.sent = []  # by the launcher, over all connections
        self.said = []
        self._arrived = []  # for the launcher: messages, or an error
        self.system = System(monotonic=lambda: self.now)
        wait = ServerWait("the server", self.said.append, self.system.monotonic)
        self.link = HeadConnection(self._dial, wait, self.system)

    def _dial(self):
        if self.error is not None:
            raise self.error
        if not self.is_there:
            raise NobodyListens("no server at tcp:10.0.0.5:29400: Connection refused")
        self.connections += 1
        self._arrived.clear()
        return self

    def send(self, message):
        self.sent.append(message)

    def receive_nowait(self):
        while self._arrived:
            message = self._arrived.pop(0)
            if isinstance(message, Exception):
                raise message
            yield message

    def wait_readable(self, timeout_s):
        return bool(self._arrived)

    def close(self):
        pass

    def tell(self, *messages):
        """Let these messages arrive at the launcher, or the error that ends the connection."""
        self._arrived += messages
        self.link.monitor.receive()

    def reserve(self, *numbers, workers=4, seed=7):
        """Answer the newest requests of as many seats with these numbers."""
        asked = {one.seat: one for one in self.sent if isinstance(one, ReserveNumber)}
        seats = list(asked)[-len(numbers) :]
        answers = zip(seats, numbers, strict=True)
        self.tell(*[NumberReserved(seat, number, workers, seed) for seat, number in answers])

    def report(self, **values):
        """Report how the run goes."""
        usual = {"accepted": {}, "here": (), "left": {}, "is_over": False}
        usual["have_scripts_ended"] = False
        self.tell(RunProgress(1, 0, **{**usual, **values}))

    def die(self):
        """Be gone, until `is_there` is True again."""
        self.is_there = False
        self.tell(PeerLost("the connection was closed"))


class FakeProcesses:
    """Processes that run until the test says how they exit."""

    def __init__(self):
        self.started: list[Identity] = []
        self.running: dict[str, Child] = {}
        self.signals: list[tuple[str, int]] = []
        self.seed = None
        self._exited: list[Child] = []

    def __bool__(self):
        return bool(self.running or self._exited)

    def set_seed(self, seed):
        self.seed = seed

    def start(self, child):
        child.pid, child.start_at = 100 + len(self.started), None
        self.started.append(child.who)
        self.running[child.name] = child

    def exit(self, name, code=0, error_code=0, **fields):
        """Let a process exit."""
        child = self.running.pop(name)
        child.pid, child.code, child.error_code = None, code, error_code
        child.exit_text = describe_exit(code)
        for field, value in fields.items():
            setattr(child, field, value)
        self._exited.append(child)

    def take_exited(self):
        exited, self._exited = self._exited, []
        return exited

    def signal(self, child, number):
        self.signals.append((child.name, number))

    def kill(self):
        self.kill_silently(list(self.running.values()))

    def kill_silently(self, children):
        for child in children:
            child.is_killed = True
            self.exit(child.name, -signal.SIGKILL)
