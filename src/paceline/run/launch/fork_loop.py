# SPDX-License-Identifier: BSD-3-Clause
"""The process of the fork server: it forks on request, and cleans up after what it forked.

`forkserver` has the launcher's side, and explains how the two talk.
"""

import os
import select
import signal
import socket
import traceback
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from math import inf
from time import monotonic
from typing import Any, NoReturn

import msgspec

from paceline.errors import PeerLost
from paceline.run.launch.child import ChildPipes, Task, main
from paceline.run.launch.orphans import Orphans
from paceline.run.launch.prctl import outlive_parent, set_process_name
from paceline.run.net.channel import MEMBER_LIMIT, Channel

__all__ = [
    "ChildExited",
    "ForkLoop",
    "Forked",
    "NotForked",
    "Ready",
    "pair_channel",
    "preload",
    "serve",
]

END_S = 3.0  # for everything to exit when the launcher is gone


class Ready(msgspec.Struct, frozen=True, tag=2):
    """Everything is imported."""


class Forked(msgspec.Struct, frozen=True, tag=3):
    """The requested process was forked."""

    pid: int


class NotForked(msgspec.Struct, frozen=True, tag=4):
    """The requested process could not be forked."""

    reason: str


class ChildExited(msgspec.Struct, frozen=True, tag=5):
    """A forked process exited."""

    pid: int
    code: int  # negative: the signal that killed it


def preload(names: list[str]) -> None:
    """Import these modules; the script itself reports one that can't be imported."""
    for name in names:
        with suppress(Exception, SystemExit):
            import_module(name)


def serve(fd: int) -> NoReturn:
    """Fork a process for each task until the launcher is gone; then end all of them."""
    set_process_name("forks")
    loop = ForkLoop(pair_channel(socket.socket(fileno=fd), _from_launcher))
    outlive_parent()  # to end what was forked
    code = 1
    try:
        loop.serve()
    except PeerLost:
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        loop.end()
        os._exit(code)  # without tearing down torch


class ForkLoop:
    """Forks processes, and reports and cleans up after those that exit."""

    def __init__(self, link: Channel[Task]) -> None:
        self._link = link
        self._forked: set[int] = set()  # the processes that haven't exited yet
        self._orphans = Orphans()
        self._exited_at = 0.0  # when the last process exited
        self._due_at = inf  # when to look for orphans again, even if no process exits
        self._waker, self._woken = socket.socketpair()
        self._waker.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # the wakeup is enough
        signal.set_wakeup_fd(self._waker.fileno(), warn_on_full_buffer=False)

    def serve(self) -> NoReturn:
        """Fork a process for each task; raise PeerLost when the launcher is gone."""
        self._link.send(Ready())
        while True:
            ready = self._wait(self._due_at, self._link.fileno())
            for exited in self._take_exited():
                self._link.send(exited)
            if self._link.fileno() in ready:
                for task in self._link.receive_nowait():
                    self._fork(task)

    def end(self) -> None:
        """Kill what was forked, and end the orphans."""
        for pid in self._forked:
            os.kill(pid, signal.SIGKILL)
        until = monotonic() + END_S
        self._take_exited()
        while (self._forked or self._orphans) and monotonic() < until:
            self._wait(min(self._due_at, until))
            self._take_exited()

    def _wait(self, until: float, *fds: int) -> list[int]:
        """Wait until a child exits, or one of these is readable; return which are."""
        poll = select.poll()
        for fd in (self._woken.fileno(), *fds):
            poll.register(fd, select.POLLIN)
        timeout_s = max(0.0, until - monotonic())
        ready = [fd for fd, _ in poll.poll(None if until == inf else 1000 * timeout_s)]
        if self._woken.fileno() in ready:
            self._woken.recv(4096)
        return ready

    def _take_exited(self) -> list[ChildExited]:
        """Return which processes exited, and end what they left behind."""
        found = []
        while (exited := _next_exited()) is not None:
            if exited.pid in self._forked:
                self._forked.remove(exited.pid)
                self._exited_at = monotonic()
                found.append(exited)
        self._due_at = self._orphans.end(self._forked, self._exited_at, monotonic())
        return found

    def _fork(self, task: Task) -> None:
        fds = [self._link.take_fd() for _ in range(4 if task.gets_socket else 3)]
        parent = os.getpid()
        try:
            pid = os.fork()
        except OSError as error:
            pid = -1
            answer: Forked | NotForked = NotForked(error.strerror or str(error))
        else:
            answer = Forked(pid)
        if pid == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for socket_ in (self._link, self._waker, self._woken):
                socket_.close()
            main(task, ChildPipes(*fds), parent)
        if pid > 0:
            self._forked.add(pid)
        for fd in fds:
            os.close(fd)
        self._link.send(answer)


def _next_exited() -> ChildExited | None:
    """Return a child that exited, forked or adopted; None if there is no more."""
    try:
        pid, status = os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        return None
    return ChildExited(pid, os.waitstatus_to_exitcode(status)) if pid else None


def pair_channel(sock: socket.socket, decode: Callable[[bytes], Any]) -> Channel[Any]:
    """Return a channel over an unnamed pair of sockets, which needs no authentication."""
    channel: Channel[Any] = Channel(sock, decode, MEMBER_LIMIT)
    channel.trust(decode)
    return channel


_from_launcher = msgspec.msgpack.Decoder(Task).decode
