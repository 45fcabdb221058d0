# SPDX-License-Identifier: BSD-3-Clause
"""The fork server: a process that has torch loaded, from which a run's processes are forked.

Theory of operation
    launcher                              fork server
                                    <-    Ready                  torch is loaded
    Task, with its descriptors      ->
                                    <-    Forked(pid), or NotForked(reason)
                                    <-    ChildExited(pid, code)       at any time

    An unnamed pair of sockets connects the two, without a file, folder or third process. When the
    launcher exits, for whatever reason, the fork server sees the connection close. It kills every
    process that was forked from it, ends what these have left behind, and exits. While it is still
    importing, and there is nothing to end, the OS kills it together with the launcher.
"""

import ast
import os
import signal
import socket
import subprocess
import sys
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import msgspec

from paceline.errors import PacelineError, PeerLost
from paceline.run.launch.child import ChildPipes, Task
from paceline.run.launch.environment import large_pages
from paceline.run.launch.fork_loop import ChildExited, Forked, NotForked, Ready, pair_channel
from paceline.run.launch.stop_signals import STOP_SIGNALS
from paceline.run.net.channel import Channel

__all__ = [
    "PRELOAD",
    "ForkServer",
    "describe_exit",
    "modules_of",
]

# Creating an optimizer imports torch._dynamo, which takes as long as importing torch.
PRELOAD = ["paceline.run.script", "torch._dynamo"]

EXIT_S = 5.0  # for the process to exit after its connection closed

# Garbage collection during these imports costs a seventh of the time and finds nothing. What they
# load stays, so it is frozen: no process has to traverse it again.
_PROGRAM = """
import gc, sys
sys.path[:] = {path!r}
from paceline.run.launch.prctl import die_with
die_with({launcher})
gc.disable()
import {preload}
from paceline.run.launch.fork_loop import preload, serve
preload({also!r})
gc.enable()
gc.freeze()
serve({fd})
"""


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
        program = _PROGRAM.format(
            path=sys.path, launcher=os.getpid(), preload=preload, also=self._also, fd=fd
        )
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
        self._link = pair_channel(ours, _from_forkserver)

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
        self.resume()
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

    def resume(self) -> None:
        """Continue the process if it was stopped (SIGSTOP), or it reports no exit."""
        if self._process is not None:
            self._process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        """End the process, everything forked from it, and what that has started."""
        self.resume()
        if self._process is not None and self._link is not None:
            self._link.close()
            if self._is_ready:  # otherwise it is still importing
                with suppress(subprocess.TimeoutExpired):
                    self._process.wait(EXIT_S)
            self._process.kill()
            self._process.wait()
        self._process = self._link = None
        self._is_ready = False
        self._exited.clear()

    def _send(self, task: Task, pipes: ChildPipes) -> None:
        assert self._link is not None
        try:
            socket_ = () if pipes.listening is None else (pipes.listening,)
            self._link.send(task, pipes.out, pipes.err, pipes.failure, *socket_)
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


_from_forkserver = msgspec.msgpack.Decoder(Ready | Forked | NotForked | ChildExited).decode
