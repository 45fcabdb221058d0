# SPDX-License-Identifier: BSD-3-Clause
"""The processes of a run on this machine: start them, notice when they exit, kill them.

The supervisor decides which process is started, and when.
"""

import os
import signal
import socket
from collections.abc import Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec

from paceline.errors import PacelineError, PeerLost
from paceline.run.launch.child import Task
from paceline.run.launch.environment import Identity, variables
from paceline.run.launch.forkserver import ForkServer, describe_exit
from paceline.run.launch.output import Failure, Output
from paceline.run.launch.restarts import RestartBackoff
from paceline.run.launch.script_line import ScriptLine, innermost_line
from paceline.run.launch.stack_dump import StackRequest, request_stack
from paceline.run.settings import Settings

__all__ = ["Child", "Processes"]

_CRASHES = (
    signal.SIGSEGV,
    signal.SIGABRT,
    signal.SIGBUS,
    signal.SIGFPE,
    signal.SIGILL,
    signal.SIGSYS,
    signal.SIGTRAP,
)
"""Signals that a process gets for what it has done itself."""


@dataclass(eq=False)
class Child:
    """A server or a worker of a run, across all its restarts."""

    name: str
    who: Identity
    threads: int
    is_quiet: bool = False  # only its errors are shown, unless the user wants all output
    backoff: RestartBackoff = field(default_factory=RestartBackoff)
    pid: int | None = None  # not None iff it is running
    code: int = 0  # exit code of the last exit
    error_code: int = 0  # exit code of the error that ended its script the last time; 0: none did
    exit_text: str = ""  # the last exit in words
    failure: str = ""  # why the script failed the last time; "": it didn't
    start_at: float | None = None  # when it will be restarted; None: it won't
    is_killed: bool = False  # by the launcher
    is_broken: bool = False  # a segmentation fault ended it while it had read-only parameters

    has_left: bool = False  # because its host was about to go; its script hasn't ended
    script: str = ""  # what it executes; empty: the script of the run

    @property
    def has_completed(self) -> bool:
        """Whether its script ended with exit code 0 the last time; also before it has started."""
        return self.code == 0 and not self.has_left

    @property
    def has_failed(self) -> bool:
        """Whether its script failed or crashed the last time.

        Being killed isn't a failure, and neither is losing the server, which may have died, or
        ended the run while this worker was stopped (SIGSTOP).
        """
        has_lost_server = self.error_code == PeerLost.exit_code
        return (self.code > 0 and not has_lost_server) or -self.code in _CRASHES


class Processes:
    """The running processes of a run."""

    def __init__(
        self,
        forkserver: ForkServer,
        output: Output,
        settings: Settings,
        listening: socket.socket | None = None,
    ) -> None:
        """`listening`: the socket for the server; None: it opens its own."""
        self._forkserver = forkserver
        self._listening = listening
        self._output = output
        self._settings = settings
        self._running: dict[int, Child] = {}  # by pid

    def __bool__(self) -> bool:
        """Return whether any process is running."""
        return bool(self._running)

    def start(self, child: Child) -> None:
        """Start a process; raise PacelineError if the OS can't create one."""
        settings = self._settings
        listening = self._listening if child.who.is_head else None
        task = Task(
            variables=variables(child.who),
            script=child.script or settings.script,
            arguments=settings.arguments,
            folder=settings.folder,
            seed=settings.spec.seed,
            threads=child.threads,
            gets_socket=listening is not None,
        )
        try:
            is_quiet = settings.output == "first" and child.is_quiet
            pipes = self._output.open_pipes(child.name, is_quiet)
            if listening is not None:
                pipes = msgspec.structs.replace(pipes, listening=listening.fileno())
        except OSError as error:
            raise PacelineError(f"cannot start a process: {error.strerror}") from None
        try:
            child.pid = self._forkserver.fork(task, pipes)
        finally:
            for fd in (pipes.out, pipes.err, pipes.failure):
                os.close(fd)
        self._running[child.pid] = child
        child.start_at = None

    def take_exited(self) -> list[Child]:
        """Return the processes that exited since the last call; their output is passed on."""
        found = []
        for exited in self._forkserver.take_exited():
            child = self._running.pop(exited.pid, None)
            if child is None:  # of an earlier run
                continue
            failure = self._output.drain(child.name)
            child.pid, child.code = None, exited.code
            child.error_code = failure.code if failure and exited.code > 0 else 0
            child.has_left = exited.code == 0 and self._output.is_leaving(child.name)
            has_parameters = self._output.has_joined(child.name)
            child.is_broken = -exited.code == signal.SIGSEGV and has_parameters
            # A worker that was killed while it crashed wrote only a part of its report.
            shows = not (child.is_broken or child.is_killed)
            report = self._output.take_fault(child.name, shows)
            child.exit_text = "left with notice" if child.has_left else _exit_text(child, failure)
            if child.is_broken:
                child.exit_text += self._explain_fault(report)
            # Losing the server is not a failure of the script: the server may be back soon.
            is_own = exited.code > 0 and child.error_code != PeerLost.exit_code
            child.failure = (failure.text if failure else child.exit_text) if is_own else ""
            found.append(child)
        return found

    def _explain_fault(self, report: str) -> str:
        """Return what follows "was killed by SIGSEGV" for a worker that had joined."""
        line = innermost_line(report, Path(self._settings.script).parent)
        return (
            f"{f' at {line}' if line else ''}; a worker's parameters are read-only, so a script "
            "can't change them in place: train with an optimizer and optimizer.step(), and pass a "
            "function that makes other changes, such as clipping, to "
            "optimizer.register_step_post_hook() before run.prepare(); it runs on the server after "
            "each step"
        )

    def set_seed(self, seed: int) -> None:
        """Seed the random generators of the processes that are started from now on with this."""
        spec = replace(self._settings.spec, seed=seed)
        self._settings = msgspec.structs.replace(self._settings, spec=spec)

    def ask_stack(self, child: Child) -> StackRequest | None:
        """Ask a process where it is; None: it can't tell."""
        return None if child.pid is None else request_stack(child.pid)

    def stack_line(self, request: StackRequest) -> ScriptLine | None:
        """Return the innermost line of the script in a stack; None: it isn't written yet."""
        return innermost_line(request.read(), Path(self._settings.script).parent)

    def signal(self, child: Child, number: int) -> None:
        """Send a signal to a process, if it is running."""
        if child.pid is not None:
            with suppress(ProcessLookupError):
                os.kill(child.pid, number)
        if number == signal.SIGKILL:
            self._forkserver.resume()

    def kill(self, spared: Collection[Child | None] = ()) -> None:
        """Kill all running processes except `spared`, and say so."""
        killed = [child for child in self._running.values() if child not in spared]
        self._kill(killed)
        for child in killed:
            if not child.is_killed:
                child.is_killed = True
                self._output.say(f"{child.name} was still running and was killed")

    def kill_silently(self, children: Iterable[Child]) -> None:
        """Kill those of these processes that are running."""
        running = [child for child in children if child.pid is not None]
        self._kill(running)
        for child in running:
            child.is_killed = True

    def _kill(self, children: Iterable[Child]) -> None:
        for child in children:
            self.signal(child, signal.SIGKILL)  # the fork server ends what its script started

    def forget(self) -> None:
        """Forget all processes, because the OS killed them."""
        self._running.clear()


def _exit_text(child: Child, failure: Failure | None) -> str:
    if failure is not None and failure.same_as and child.code > 0:
        before = "before" if failure.same_as == child.name else failure.same_as
        return f"failed in the same way as {before}"
    return describe_exit(child.code)
