# SPDX-License-Identifier: BSD-3-Clause
"""The fork server: a process that has torch loaded, from which a run's processes are forked.

Theory of operation
    launcher                              fork server
                                    <-    Ready                  torch is loaded
    Task, with three descriptors    ->
                                    <-    Forked(pid), or NotForked(reason)
                                    <-    ChildExited(pid, code)       at any time

    An unnamed pair of sockets connects the two, without a file, folder or third process. When the
    launcher exits, for whatever reason, the fork server sees the connection close and exits, too,
    and the OS kills every process that was forked from it.
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
from paceline.run.launch.child import ChildPipes, Task, main, set_process_name
from paceline.run.launch.environment import large_pages
from paceline.run.launch.stop_signals import STOP_SIGNALS
from paceline.run.net.channel import MEMBER_LIMIT, Channel

__all__ = [
    "PRELOAD",
    "ChildExited",
    "ForkServer",
    "describe_exit",
    "modules_of",
    "preload",
    "serve",
]

# Creating an optimizer imports torch._dynamo, which takes as long as importing torch.
PRELOAD = ["paceline.run.script", "torch._dynamo"]

EXIT_S = 5.0  # for the process to exit after its connection closed

# Garbage collection during these imports costs a seventh of the time and finds nothing. What they
# load stays, so it is frozen: no process has to traverse it again.
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


class ForkServer:
    """The launcher's side. The process starts when it is first needed, and serves many runs."""

    def __init__(self, script: Path | None = None) -> None:
        """Prepare to fork processes; import the modules of `script` once instead of in each."""
        self._also = [] if script is None else modules_of(script)
        self._process: subprocess.Popen[bytes] | None = None
        self._link: Channel[Any] | None = None
        self._is_ready = False
        self._exited: deque[ChildExited] = deque()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> None:
        """Start the process, unless it is running; it takes a while until it is ready."""
        if self._process is not None:
            return
        ours, theirs = socket.socketpair()
        fd = theirs.fileno()
        # Use the options that this Python was started with.
        flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined] # private, so it has no types
        preload = ", ".join(PRELOAD)
        program = _PROGRAM.format(path=sys.path, preload=preload, also=self._also, fd=fd)
        # A signal to the whole process group (a closed terminal, `timeout`) is for the launcher.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        try:
            with theirs, large_pages():
                self._process = subprocess.Popen(
                    [sys.executable, *flags, "-c", program],
                    pass_fds=[fd],
                    stdin=subprocess.DEVNULL,  # inherited by the forked processes
                    stdout=subprocess.DEVNULL,  # replaced by the forked processes
                )
        except OSError as error:
            ours.close()
            raise PacelineError(f"cannot start a process: {error.strerror}") from None
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        self._link = _channel(ours, _from_forkserver)

    def fileno(self) -> int:
        """Return the descriptor that is readable when the process is ready, or a child exited."""
        assert self._link is not None
        return self._link.fileno()

    def wait_ready(self, seconds: float) -> bool:
        """Wait until it is ready, at most this long; raise PeerLost if it is gone."""
        assert self._link is not None
        if not self._is_ready and self._link.wait_readable(seconds):
            self._is_ready = isinstance(self._receive(), Ready)
        return self._is_ready

    def fork(self, task: Task, pipes: ChildPipes) -> int:
        """Fork a process that does this task and writes to these pipes; return its pid.

        Raises PacelineError if the OS can't create one, PeerLost if the fork server is gone.
        """
        assert self._is_ready
        self._send(task, pipes)
        while True:
            answer = self._receive()
            if isinstance(answer, NotForked):
                raise PacelineError(f"cannot start a process: {answer.reason}")
            if isinstance(answer, Forked):
                # An earlier process may have had the same pid.
                self._exited = deque(old for old in self._exited if old.pid != answer.pid)
                return answer.pid
            self._exited.append(answer)

    def take_exited(self) -> list[ChildExited]:
        """Return the children that exited since the last call; raise PeerLost if it is gone."""
        assert self._link is not None
        while self._link.wait_readable(0.0):
            self._exited.append(self._receive())
        found = list(self._exited)
        self._exited.clear()
        return found

    def close(self) -> None:
        """Kill the process, and with it everything forked from it."""
        if self._process is not None and self._link is not None:
            self._link.close()
            self._process.kill()  # it may still be importing
            self._process.wait()
        self._process = self._link = None
        self._is_ready = False
        self._exited.clear()

    def _send(self, task: Task, pipes: ChildPipes) -> None:
        assert self._link is not None
        try:
            self._link.send(task, pipes.out, pipes.err, pipes.failure)
        except PeerLost:
            raise self._lost() from None

    def _receive(self) -> Any:
        assert self._link is not None
        try:
            return self._link.receive()
        except PeerLost:
            raise self._lost() from None

    def _lost(self) -> PeerLost:
        assert self._process is not None
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(EXIT_S)
        code = self._process.poll()
        self.close()
        how = "closed its connection" if code is None else describe_exit(code)
        return PeerLost(f"the fork server {how}")


def describe_exit(code: int) -> str:
    """Return an exit code in words."""
    if code >= 0:
        return f"failed with exit code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:  # it has no name
        return f"was killed by signal {-code}"


def modules_of(script: Path) -> list[str]:
    """Return the modules that a script imports at its top, except those in its own folder."""
    try:
        tree = ast.parse(script.read_bytes())
        local = {path.name.partition(".")[0] for path in script.parent.iterdir()}
    except (OSError, SyntaxError, ValueError):  # running the script reports it
        return []
    found = []
    for node in tree.body:
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.append(node.module)
    return [name for name in found if name.partition(".")[0] not in local]


# --------------------------------------------------------------------------- the fork server's side


def preload(names: list[str]) -> None:
    """Import these modules; the script itself reports one that can't be imported."""
    for name in names:
        with suppress(Exception, SystemExit):
            import_module(name)


def serve(fd: int) -> NoReturn:
    """Fork a process for each task until the launcher is gone."""
    set_process_name("forks")
    link = _channel(socket.socket(fileno=fd), _from_launcher)
    waker, woken = socket.socketpair()
    waker.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)  # the wakeup is enough
    signal.set_wakeup_fd(waker.fileno(), warn_on_full_buffer=False)
    poll = select.poll()
    poll.register(link, select.POLLIN)
    poll.register(woken, select.POLLIN)
    try:
        link.send(Ready())
        while True:
            ready = [fd for fd, _ in poll.poll()]
            if woken.fileno() in ready:
                woken.recv(4096)
                _report_exited(link)
            if fd in ready:
                for task in link.receive_nowait():
                    _fork(link, task, (waker, woken))
    except PeerLost:
        os._exit(0)  # which kills everything forked here


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
        main(task, ChildPipes(*fds), parent)
    for fd in fds:
        os.close(fd)
    link.send(answer)


def _report_exited(link: Channel[Task]) -> None:
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
    channel.trust(decode)  # an unnamed pair of sockets needs no authentication
    return channel


_from_forkserver = msgspec.msgpack.Decoder(Ready | Forked | NotForked | ChildExited).decode
_from_launcher = msgspec.msgpack.Decoder(Task).decode
