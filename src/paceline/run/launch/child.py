# SPDX-License-Identifier: BSD-3-Clause
"""The life of a forked process of a run: adopt its identity, execute the script, exit.

The fork server has already loaded torch. This module must not import torch, because the launcher
imports this module and must start fast.
"""

import atexit
import faulthandler
import os
import random
import runpy
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from io import TextIOWrapper
from pathlib import Path
from typing import NoReturn

import msgspec

from paceline.errors import InternalError, PacelineError
from paceline.run.launch.environment import Identity, adopt, identity
from paceline.run.launch.prctl import adopt_orphans, die_with, set_process_name
from paceline.run.launch.stack_dump import accept_requests
from paceline.run.launch.stop_signals import STOP_SIGNALS

__all__ = [
    "END_OF_FAILURE",
    "JOINING",
    "LEAVING",
    "ChildPipes",
    "Task",
    "call_at_success",
    "clean_end",
    "decode_failure",
    "encode_failure",
    "end_cleanly_at",
    "failure_text",
    "main",
    "succeed",
    "tell_joining",
    "tell_leaving",
]

END_OF_FAILURE = b"\0"  # ends a failure; no traceback contains it
_CODE_FOLLOWS = b"\x1e"

JOINING = b"\x02"  # what a worker that joins writes to its pipe for failures, before all else
LEAVING = b"\x03"  # likewise for a worker that leaves because its host is about to go

_at_success: list[Callable[[], None]] = []
_tell: list[Callable[[bytes], object]] = []  # writes to the launcher
_clean_ends: list[type[BaseException]] = []


class Task(msgspec.Struct, frozen=True, tag=1):
    """What a forked process should do."""

    variables: dict[str, str]  # environment variables with its identity
    script: str
    arguments: tuple[str, ...]
    folder: str  # its working directory
    seed: int
    threads: int
    gets_socket: bool = False  # whether it is a server that the launcher gives its socket


class ChildPipes(msgspec.Struct, frozen=True):
    """The process's ends of its pipes."""

    out: int
    err: int
    failure: int  # for `JOINING`, then the exception that ended its script, or a fault report
    listening: int | None = None  # the socket at the run's address; not None iff it is the server


def main(task: Task, pipes: ChildPipes, parent: int) -> NoReturn:
    """Execute the script in this process, which `parent` has just forked, and exit."""
    code = PacelineError.exit_code
    try:
        who = _set_up(task, pipes, parent)
        _seed(who, task.seed)
        code = _execute(task, pipes.failure)
    except BaseException:  # nothing may propagate into the fork server's code
        traceback.print_exc()
    finally:
        _exit(code)


def _short_name(who: Identity) -> str:
    if who.worker is not None:
        return f"w{who.worker}"
    if who.is_agent:
        return "agent"
    return f"server{who.server or ''}"


def _set_up(task: Task, pipes: ChildPipes, parent: int) -> Identity:
    die_with(parent)
    adopt_orphans()  # so that the fork server finds what the script leaves behind
    os.setsid()  # so that Ctrl-C reaches only the launcher, which stops the run cleanly
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    os.dup2(pipes.out, 1)
    os.dup2(pipes.err, 2)
    os.close(pipes.out)
    os.close(pipes.err)
    os.set_inheritable(pipes.failure, False)
    assert isinstance(sys.stdout, TextIOWrapper)  # nothing has replaced it yet
    sys.stdout.reconfigure(line_buffering=True)
    faulthandler.enable(pipes.failure)  # names the line that wrote to the read-only parameters
    _tell.append(partial(os.write, pipes.failure))
    os.register_at_fork(after_in_child=_tell.clear)
    os.register_at_fork(after_in_child=faulthandler.enable)  # not for processes of the script
    accept_requests()
    os.chdir(task.folder)
    who = identity(task.variables)
    assert who is not None
    if pipes.listening is not None:
        os.set_inheritable(pipes.listening, False)
        who = replace(who, listening_fd=pipes.listening)
    set_process_name(_short_name(who))
    adopt(who, task.threads)
    sys.argv = [task.script, *task.arguments]
    sys.path[0:1] = [str(Path(task.script).parent)]
    return who


def _execute(task: Task, failure: int) -> int:
    """Execute the script; return the exit code."""
    try:
        runpy.run_path(task.script, run_name="__main__")
    except SystemExit as exit_:
        return _code_of(exit_)
    except BaseException as error:
        if (end := clean_end(error)) is not None:
            print(end, file=sys.stderr, flush=True)
            return 0
        sys.stdout.flush()
        code = error.exit_code if isinstance(error, PacelineError) else PacelineError.exit_code
        with open(failure, "wb", closefd=False) as pipe:  # the fault handler still needs it
            pipe.write(encode_failure(failure_text(error, task.script), code))
        return code
    return 0


def encode_failure(text: str, code: int) -> bytes:
    """Return what is written to the pipe for failures: the text, and the exit code of its error.

    A script can exit with any code, so that of the process doesn't tell which error it was.
    """
    return text.encode(errors="replace") + _CODE_FOLLOWS + b"%d" % code + END_OF_FAILURE


def decode_failure(data: bytes) -> tuple[str, int]:
    """Return the text and the exit code that were encoded."""
    text, _, code = data.removesuffix(END_OF_FAILURE).rpartition(_CODE_FOLLOWS)
    return text.decode(errors="replace"), int(code)


def clean_end(error: BaseException) -> BaseException | None:
    """Return the exception behind this one that ends a script as if it had reached its end."""
    # Python replaces a StopIteration that leaves a generator.
    cause = error.__cause__ if isinstance(error, RuntimeError) else error
    return cause if isinstance(cause, tuple(_clean_ends)) else None


def _code_of(exit_: SystemExit) -> int:
    """Return the exit code that Python would use for `sys.exit(...)`."""
    if exit_.code is None:
        return 0
    if isinstance(exit_.code, int):
        return exit_.code & 0xFF
    print(exit_.code, file=sys.stderr)
    return PacelineError.exit_code


def _exit(code: int) -> NoReturn:
    """Exit as Python does, but without tearing down torch, which takes long."""
    try:
        # multiprocessing exits its processes in the same way.
        threading._shutdown()  # type: ignore[attr-defined] # private, so it has no types
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):  # the pipe is closed, or the script closed it
                stream.flush()
        if code == 0:
            succeed()
    finally:
        os._exit(code)


def tell_joining() -> None:
    """Tell the launcher that this worker gets its parameters now, which are read-only."""
    _tell_launcher(JOINING)


def tell_leaving() -> None:
    """Tell the launcher that this worker leaves because its host is about to go."""
    _tell_launcher(LEAVING)


def _tell_launcher(what: bytes) -> None:
    for write in _tell:
        with suppress(OSError):  # the script has closed the pipe
            write(what)


def end_cleanly_at(kind: type[BaseException]) -> None:
    """Exit with code 0 and one line if an exception of this kind ends the script."""
    _clean_ends.append(kind)


def call_at_success(call: Callable[[], None]) -> None:
    """Call this at the very end of this process, if its script ends with exit code 0."""
    _at_success.append(call)


def succeed() -> None:
    """Make the calls that are due when the script has ended with exit code 0."""
    for call in _at_success:
        call()


def failure_text(error: BaseException, script: str) -> str:
    """Return the traceback without our own frames; for a PacelineError, only its message."""
    shown = traceback.TracebackException.from_exception(error)
    if isinstance(error, PacelineError) and not isinstance(error, InternalError):
        return f"{_caller_in(shown.stack, Path(script).parent)}{error}\n"
    first = [i for i, frame in enumerate(shown.stack) if frame.filename == script]
    frames = shown.stack[first[0] :] if first else []  # none: the script can't be read
    shown.stack = traceback.StackSummary.from_list(frames)
    return "".join(shown.format())


def _caller_in(stack: traceback.StackSummary, folder: Path) -> str:
    """Return the line of the script, or of a module next to it, that called Paceline."""
    ours = Path(__file__).parent.parent
    for frame in reversed(stack):
        path = Path(frame.filename)
        is_installed = path.is_relative_to(ours) or "site-packages" in path.parts
        if path.is_relative_to(folder) and not is_installed:
            return f"{path.name}:{frame.lineno}: "
    return ""


def _seed(who: Identity, seed: int) -> None:
    """Seed the random generators; forked processes would otherwise all draw the same numbers."""
    number = -1 if who.worker is None else who.worker
    random.seed(f"{seed} {number}")
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(random.getrandbits(32))
