# SPDX-License-Identifier: BSD-3-Clause
"""A process in which torch is loaded already, and from which the processes of runs are forked.

Theory of operation
    launcher                              forkserver
                                    <-    Ready                  torch is loaded
    Task, with three descriptors    ->
                                    <-    Forked(pid), or NotForked(reason)
                                    <-    ChildExited(pid, code)       at any moment

    The two are connected by a pair of sockets that has no name, and there is nothing else: no file,
    no folder, no third process. When the launcher is gone, for whatever reason, the fork server
    sees the connection close and exits, and the system ends whatever was forked from it.
"""

import ast
import os
import select
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn, Self

import msgspec

from paceline.errors import PacelineError, PeerLost
from paceline.run.launch.child import STOPS, Ends, Task, main, take_name
from paceline.run.launch.environment import large_pages
from paceline.run.net.channel import MEMBER_LIMIT, Channel

__all__ = ["PRELOAD", "ChildExited", "ForkServer", "how_it_ended", "modules_of", "preload", "serve"]

# Making an optimizer loads torch._dynamo, which takes as long as torch itself.
PRELOAD = ["paceline.run.script", "torch._dynamo"]

LOSS_S = 5.0  # for the process to end once its connection has

# Looking for garbage while so much is made costs a seventh of the time, and finds none. What is
# loaded then stays, so no process need look through it again and again.
_PROGRAM = """
import gc, sys
gc.disable()
sys.path[:] = {path!r}
import {preload}
from paceline.run.launch.forkserver import preload, serve
preload({also!r})
gc.enable()
gc.freeze()
serve({fd})
"""


class Ready(msgspec.Struct, frozen=True, tag=2):
    """Everything is loaded."""


class Forked(msgspec.Struct, frozen=True, tag=3):
    """The process that was asked for last."""

    pid: int


class NotForked(msgspec.Struct, frozen=True, tag=4):
    """The process that was asked for last could not be made."""

    reason: str


class ChildExited(msgspec.Struct, frozen=True, tag=5):
    """A process has ended."""

    pid: int
    code: int  # negative: of the signal that has killed it


class ForkServer:
    """The launcher's side. The process is started when it is first needed, and serves many runs."""

    def __init__(self, script: Path | None = None) -> None:
        """`script`: what will be run, so that what it needs is loaded once and not by everybody."""
        self._also = [] if script is None else modules_of(script)
        self._process: subprocess.Popen[bytes] | None = None
        self._link: Channel[Any] | None = None
        self._is_ready = False
        self._ended: deque[ChildExited] = deque()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> None:
        """Start it, if it was not; it takes a while until it is ready."""
        if self._process is not None:
            return
        ours, theirs = socket.socketpair()
        fd = theirs.fileno()
        # With the options that Python was started with; typeshed does not know this one.
        flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
        preload = ", ".join(PRELOAD)
        program = _PROGRAM.format(path=sys.path, preload=preload, also=self._also, fd=fd)
        # What stops a whole group of processes (a closed terminal, `timeout`) is for us alone.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)
        try:
            with theirs, large_pages():
                self._process = subprocess.Popen(
                    [sys.executable, *flags, "-c", program],
                    pass_fds=[fd],
                    stdin=subprocess.DEVNULL,  # as in all that are forked from it
                    stdout=subprocess.DEVNULL,  # so that there is one, which they replace
                )
        except OSError as error:
            ours.close()
            raise PacelineError(f"cannot start a process: {error.strerror}") from None
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        self._link = _channel(ours, _from_forkserver)

    def fileno(self) -> int:
        """What a selector waits for: something has ended, or it is ready."""
        assert self._link is not None
        return self._link.fileno()

    def wait_ready(self, seconds: float) -> bool:
        """Whether it is ready before so many seconds have passed; raises PeerLost if it is gone."""
        assert self._link is not None
        if not self._is_ready and self._link.wait_readable(seconds):
            self._is_ready = isinstance(self._receive(), Ready)
        return self._is_ready

    def fork(self, task: Task, ends: Ends) -> int:
        """Let a process do this, which has these ends of its pipes; return its number.

        Raises PacelineError if the system will not have one more, PeerLost if the server is gone.
        """
        assert self._is_ready
        self._send(task, ends)
        while True:
            answer = self._receive()
            if isinstance(answer, NotForked):
                raise PacelineError(f"cannot start a process: {answer.reason}")
            if isinstance(answer, Forked):
                # Nobody has asked for the end of one that had the same number before.
                self._ended = deque(old for old in self._ended if old.pid != answer.pid)
                return answer.pid
            self._ended.append(answer)

    def ended(self) -> list[ChildExited]:
        """Who has ended since this was asked for last; raises PeerLost if the forkserver has."""
        assert self._link is not None
        while self._link.wait_readable(0.0):
            self._ended.append(self._receive())
        found = list(self._ended)
        self._ended.clear()
        return found

    def close(self) -> None:
        """End it, and whatever is left of what was forked from it."""
        if self._process is not None and self._link is not None:
            self._link.close()
            self._process.kill()  # it may still be loading
            self._process.wait()
        self._process = self._link = None
        self._is_ready = False
        self._ended.clear()

    def _send(self, task: Task, ends: Ends) -> None:
        assert self._link is not None
        try:
            self._link.send(task, ends.out, ends.err, ends.told)
        except PeerLost:
            raise self._loss() from None

    def _receive(self) -> Any:
        assert self._link is not None
        try:
            return self._link.receive()
        except PeerLost:
            raise self._loss() from None

    def _loss(self) -> PeerLost:
        assert self._process is not None
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(LOSS_S)
        code = self._process.poll()
        self.close()
        how = "has closed its connection" if code is None else how_it_ended(code)
        return PeerLost(f"the process that all others are forked from {how}")


def how_it_ended(code: int) -> str:
    """Say what a process has ended with."""
    if code >= 0:
        return f"failed with exit code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:  # one without a name
        return f"was killed by signal {-code}"


def modules_of(script: Path) -> list[str]:
    """The modules that a script imports at its top, without those that are beside it."""
    try:
        tree = ast.parse(script.read_bytes())
        beside = {path.name.partition(".")[0] for path in script.parent.iterdir()}
    except (OSError, SyntaxError, ValueError):  # which is told when it is run, if it matters
        return []
    found = []
    for node in tree.body:
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.append(node.module)
    return [name for name in found if name.partition(".")[0] not in beside]


# --------------------------------------------------------------------------- the fork server's side


def preload(names: list[str]) -> None:
    """Load what scripts will need; one that cannot be loaded is told of by the script itself."""
    for name in names:
        with suppress(Exception, SystemExit):
            import_module(name)


def serve(fd: int) -> NoReturn:
    """Fork a process for each task that comes, until the launcher is gone."""
    take_name("nurse")
    link = _channel(socket.socket(fileno=fd), _from_launcher)
    waker, woken = socket.socketpair()
    waker.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)  # its wakeup is enough
    signal.set_wakeup_fd(waker.fileno(), warn_on_full_buffer=False)
    poll = select.poll()
    poll.register(link, select.POLLIN)
    poll.register(woken, select.POLLIN)
    try:
        link.send(Ready())
        while True:
            heard = [ready for ready, _ in poll.poll()]
            if woken.fileno() in heard:
                woken.recv(4096)
                _tell_ends(link)
            if fd in heard:
                for task in link.receive_nowait():
                    _fork(link, task, (waker, woken))
    except PeerLost:
        os._exit(0)  # and all that were forked here end with us


def _fork(link: Channel[Task], task: Task, others: tuple[socket.socket, ...]) -> None:
    fds = [link.take_fd() for _ in range(3)]
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
        link.close()
        for other in others:
            other.close()
        main(task, Ends(*fds), parent)
    for fd in fds:
        os.close(fd)
    link.send(answer)


def _tell_ends(link: Channel[Task]) -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        link.send(ChildExited(pid, os.waitstatus_to_exitcode(status)))


def _channel(sock: socket.socket, decode: Callable[[bytes], Any]) -> Channel[Any]:
    channel: Channel[Any] = Channel(sock, decode, MEMBER_LIMIT)
    channel.trust(decode)  # it is no stranger
    return channel


_from_forkserver = msgspec.msgpack.Decoder(Ready | Forked | NotForked | ChildExited).decode
_from_launcher = msgspec.msgpack.Decoder(Task).decode
