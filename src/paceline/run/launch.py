# SPDX-License-Identifier: BSD-3-Clause
"""Starting a run on this machine: the server, the workers, their output, and a clean end.

Processes are forked from one in which torch is loaded already. Each line that they print comes out
here with the name of its process in front.
"""

import multiprocessing
import os
import secrets
import selectors
import signal
import sys
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import count
from multiprocessing import forkserver, resource_tracker
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from time import monotonic
from types import FrameType
from typing import TextIO

from paceline.errors import SpecError
from paceline.run.channel import new_token
from paceline.run.child import STOPS, Task, main
from paceline.run.environment import Identity, large_pages
from paceline.run.settings import Settings

__all__ = ["Launch", "new_run_dir"]

# Making an optimizer loads torch._dynamo, which takes as long as torch itself.
PRELOAD = ["paceline.cli", "paceline.run.script", "torch._dynamo"]
GRACE_S = 10.0  # for a worker to end once the server has; and for all to end when killed


@dataclass(eq=False)
class Child:
    """A process of the run."""

    name: str
    process: ForkServerProcess
    has_ended: bool = False
    is_killed: bool = False  # by us


@dataclass(eq=False)
class Pipe:
    """What a process prints."""

    child: Child
    fd: int
    to: TextIO
    rest: bytes = b""  # a line that has no end yet


class Launch:
    """One run on this machine."""

    def __init__(
        self, settings: Settings, script: Path, arguments: tuple[str, ...], run_dir: Path
    ) -> None:
        if not script.is_file():
            raise SpecError(f"there is no script {script}")
        self._settings = settings
        self._script = script.resolve()
        self._arguments = arguments
        self._run_dir = run_dir.resolve()
        self._selector = selectors.DefaultSelector()
        self._server: Child | None = None
        self._workers: list[Child] = []
        self._interrupts = 0
        self._number = 0  # the signal that came last
        self._kill_at: float | None = None

    def run(self) -> int:
        """Run to the end; return the exit code."""
        before = {number: signal.signal(number, self._on_signal) for number in STOPS}
        try:
            self._start()
            while not all(child.has_ended for child in self._children):
                self._look(0.2)
            self._look(0.0)
        finally:
            self._kill_all()
            for number, handler in before.items():
                signal.signal(number, handler)
        return self._exit_code()

    @property
    def _children(self) -> list[Child]:
        return [*([self._server] if self._server else []), *self._workers]

    # ---------------------------------------------------------------------------------- starting

    def _start(self) -> None:
        self._settings.write(self._run_dir / "spec.json")
        token_file = self._run_dir / "token"
        token_file.touch(mode=0o600)
        token_file.write_text(new_token(), encoding="ascii")
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        with large_pages():
            _start_fork_server()
        address = f"unix:@paceline-{secrets.token_hex(16)}"
        (self._run_dir / "address").write_text(address, encoding="ascii")
        who = Identity(address, token_file, self._run_dir, None)
        cores = len(os.sched_getaffinity(0))
        workers = self._settings.spec.workers
        self._server = self._fork(context, who, "server", cores)
        for worker in range(workers):
            one = replace(who, worker=worker)
            self._workers.append(self._fork(context, one, f"worker {worker}", cores // workers))

    def _fork(self, context: ForkServerContext, who: Identity, name: str, threads: int) -> Child:
        task = Task(who, self._script, self._arguments, self._settings.spec.seed, max(1, threads))
        out_read, out_write = context.Pipe(duplex=False)
        err_read, err_write = context.Pipe(duplex=False)
        process = context.Process(target=main, args=(task, out_write, err_write), name=name)
        process.start()
        out_write.close()
        err_write.close()
        child = Child(name, process)
        for reader, to in ((out_read, sys.stdout), (err_read, sys.stderr)):
            fd = os.dup(reader.fileno())
            reader.close()
            os.set_blocking(fd, False)
            self._selector.register(fd, selectors.EVENT_READ, Pipe(child, fd, to))
        self._selector.register(process.sentinel, selectors.EVENT_READ, child)
        return child

    # ---------------------------------------------------------------------------- looking after it

    def _look(self, seconds: float) -> None:
        """Pass on what was printed, see who has ended, and do what follows from it."""
        for key, _ in self._selector.select(seconds):
            if isinstance(key.data, Pipe):
                self._pass_on(key.data)
            else:
                self._on_end(key.data)
        if self._kill_at is not None and monotonic() > self._kill_at:
            self._kill_all()

    def _pass_on(self, pipe: Pipe) -> None:
        try:
            data = os.read(pipe.fd, 1 << 16)
        except BlockingIOError:
            return
        # A bar of progress ends its lines with a carriage return.
        *lines, pipe.rest = (pipe.rest + data).replace(b"\r\n", b"\n").split(b"\n")
        *begun, pipe.rest = pipe.rest.split(b"\r")
        if not data:
            begun.append(pipe.rest)
            self._selector.unregister(pipe.fd)
            os.close(pipe.fd)
        for line in lines:
            self._print(pipe, line.rstrip(b"\r").rpartition(b"\r")[2])
        for line in filter(None, begun):
            self._print(pipe, line)
        pipe.to.flush()

    def _print(self, pipe: Pipe, line: bytes) -> None:
        text = f"{pipe.child.name:9} | {line.decode(errors='replace')}"
        encoding = pipe.to.encoding or "utf-8"
        print(text.encode(encoding, "replace").decode(encoding), file=pipe.to)

    def _on_end(self, child: Child) -> None:
        self._selector.unregister(child.process.sentinel)
        child.process.join()
        child.has_ended = True
        code = child.process.exitcode or 0
        if code and not child.is_killed:
            self._say(f"{child.name} {_how_it_ended(code)}")
        if child is self._server:
            # Whoever is left was stopped, or has lost the server: nobody waits for it.
            self._kill_at = monotonic() + (GRACE_S if code == 0 else 1.0)
        elif all(worker.has_ended for worker in self._workers) and self._server:
            self._end_server()

    def _end_server(self) -> None:
        """All workers that we started are gone: nobody would bring the run to its end."""
        assert self._server is not None
        if not self._server.has_ended:
            self._signal(self._server, signal.SIGTERM)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        del frame
        self._interrupts += 1
        if self._interrupts == 1 and self._server is not None:
            self._say("stopping; once more to stop at once")
            self._signal(self._server, signal.SIGTERM)
        else:
            self._kill_at = 0.0
        self._number = number

    def _signal(self, child: Child, number: int) -> None:
        if child.process.pid is not None and not child.has_ended:
            with suppress(ProcessLookupError):
                os.kill(child.process.pid, number)

    def _kill_all(self) -> None:
        for child in self._children:
            if child.process.pid is not None and not child.has_ended:
                with suppress(ProcessLookupError, PermissionError):
                    # With what its script has started; it may not be the leader of a group yet.
                    os.killpg(child.process.pid, signal.SIGKILL)
                self._signal(child, signal.SIGKILL)
                if not child.is_killed:
                    self._say(f"{child.name} had not ended, and was killed")
                child.is_killed = True

    def _say(self, text: str) -> None:
        print(f"paceline  | {text}", file=sys.stderr, flush=True)

    def _exit_code(self) -> int:
        if self._interrupts:
            return 128 + self._number
        assert self._server is not None
        codes = [child.process.exitcode or 0 for child in self._workers]
        if SpecError.exit_code in (self._server.process.exitcode, *codes):
            return SpecError.exit_code
        if self._server.process.exitcode or any(code > 0 for code in codes):
            return 1
        if not (self._run_dir / "trace.jsonl").exists():
            self._say("the script has never called run.prepare(), so nothing was trained")
            return 1
        if codes[0]:
            self._say("worker 0 was lost: what the script does once, if run.is_first, is not done")
            return 1
        return 0


def _start_fork_server() -> None:
    """Start it so that what stops all at once (a closed terminal, `timeout`) stops us alone."""
    try:
        # The first of these starts the tracker of multiprocessing, and unblocks signals after that.
        for ensure_running in (resource_tracker.ensure_running, forkserver.ensure_running):
            signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)
            ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)


def _how_it_ended(code: int) -> str:
    if code > 0:
        return f"failed with exit code {code}"
    name = signal.Signals(-code).name
    if -code == signal.SIGSEGV:
        return (
            f"was killed by {name}; its script may have written to the parameters, which are the "
            "server's: see the line above, and change them in an optimizer of your own instead"
        )
    return f"was killed by {name}"


def new_run_dir(wanted: Path | None, script: Path) -> Path:
    """Make the folder of a run: the one that is wanted, or the next free number."""
    try:
        if wanted is not None:
            wanted.mkdir(parents=True, exist_ok=True)
            if any(wanted.iterdir()):
                raise SpecError(f"the folder {wanted} is not empty; give the run one of its own")
            return wanted
        for number in count(1):
            path = Path("runs") / f"{script.stem}-{number}"
            with suppress(FileExistsError):
                path.mkdir(parents=True)
                return path
    except OSError as error:
        raise SpecError(f"cannot make a folder for the run: {error}") from None
    raise AssertionError
