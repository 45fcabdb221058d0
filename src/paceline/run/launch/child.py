# SPDX-License-Identifier: BSD-3-Clause
"""A process of a run from its first line to its last: become somebody, then execute the script.

It is forked from a process in which torch is loaded already, and must not load it by itself: the
launcher, which names what is to be done here, is quick because it has no torch.
"""

import atexit
import ctypes
import faulthandler
import os
import random
import runpy
import signal
import sys
import threading
import traceback
from contextlib import suppress
from io import TextIOWrapper
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from paceline.errors import InternalError, PacelineError
from paceline.run.launch.environment import Identity, adopt, identity

__all__ = ["END_OF_FAILURE", "STOPS", "Ends", "Task", "main", "take_name"]

STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # what asks a run to stop

END_OF_FAILURE = b"\0"  # after the text of a failure, for no traceback has it

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15


class Task(msgspec.Struct, frozen=True, tag=1):
    """What a process is to be and to do."""

    variables: dict[str, str]  # the environment that tells it who it is
    script: str
    arguments: tuple[str, ...]
    folder: str  # that it works in
    seed: int
    threads: int


class Ends(msgspec.Struct, frozen=True):
    """The ends of its pipes that are a process's own."""

    out: int
    err: int
    told: int  # for the text of the failure that has ended its script


def main(task: Task, ends: Ends, parent: int) -> NoReturn:
    """Execute the script in this process, which was just forked by that parent; then end."""
    code = PacelineError.exit_code
    try:
        who = _become(task, ends, parent)
        _seed(who, task.seed)
        code = _execute(task, ends.told)
    except BaseException:  # nothing goes back to whoever forked us
        traceback.print_exc()
    finally:
        _end(code)


def _become(task: Task, ends: Ends, parent: int) -> Identity:
    _die_with(parent)
    os.setsid()  # so that Ctrl-C reaches the launcher alone, which ends the run in good order
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)
    os.dup2(ends.out, 1)
    os.dup2(ends.err, 2)
    os.close(ends.out)
    os.close(ends.err)
    os.set_inheritable(ends.told, False)
    assert isinstance(sys.stdout, TextIOWrapper)  # as in every process that was just forked
    sys.stdout.reconfigure(line_buffering=True)
    faulthandler.enable()  # tells the line that wrote to the parameters, which are the server's
    os.chdir(task.folder)
    who = identity(task.variables)
    assert who is not None
    take_name("server" if who.worker is None else f"w{who.worker}")
    adopt(who, task.threads)
    sys.argv = [task.script, *task.arguments]
    sys.path[0:1] = [str(Path(task.script).parent)]
    return who


def _execute(task: Task, told: int) -> int:
    """Execute the script; return the exit code."""
    try:
        runpy.run_path(task.script, run_name="__main__")
    except SystemExit as wish:
        return _code_of(wish)
    except BaseException as error:
        sys.stdout.flush()
        with open(told, "wb") as pipe:
            pipe.write(_text_of(error, task.script).encode(errors="replace") + END_OF_FAILURE)
        return error.exit_code if isinstance(error, PacelineError) else PacelineError.exit_code
    return 0


def _code_of(wish: SystemExit) -> int:
    """What Python makes of `sys.exit(...)`."""
    if wish.code is None:
        return 0
    if isinstance(wish.code, int):
        return wish.code & 0xFF
    print(wish.code, file=sys.stderr)
    return PacelineError.exit_code


def _end(code: int) -> NoReturn:
    """Do what Python does at its end, but do not take torch apart: that takes long."""
    try:
        # mypy does not know it; multiprocessing ends its processes in the same way.
        threading._shutdown()  # type: ignore[attr-defined] # typeshed does not know it
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):  # nobody reads it; the script has closed it
                stream.flush()
    finally:
        os._exit(code)


def _text_of(error: BaseException, script: str) -> str:
    """The traceback as if the script had been started by hand; an error of ours is a sentence."""
    shown = traceback.TracebackException.from_exception(error)
    if isinstance(error, PacelineError) and not isinstance(error, InternalError):
        return f"{_place_in(shown.stack, Path(script).parent)}{error}\n"
    at = [place for place, frame in enumerate(shown.stack) if frame.filename == script]
    frames = shown.stack[at[0] :] if at else []  # none: the script cannot even be read
    shown.stack = traceback.StackSummary.from_list(frames)
    return "".join(shown.format())


def _place_in(stack: traceback.StackSummary, folder: Path) -> str:
    """The line of the script that has called us, or of what lies beside it."""
    ours = Path(__file__).parent.parent
    for frame in reversed(stack):
        path = Path(frame.filename)
        is_installed = path.is_relative_to(ours) or "site-packages" in path.parts
        if path.is_relative_to(folder) and not is_installed:
            return f"{path.name}:{frame.lineno}: "
    return ""


def take_name(name: str) -> None:
    """Be told apart in `ps -e`, which shows fifteen letters."""
    _prctl(_PR_SET_NAME, f"paceline-{name}".encode())


def _die_with(parent: int) -> None:
    """Nobody is left behind: the forkserver ends when the launcher does, and we with it."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it is gone already
        os._exit(PacelineError.exit_code)


def _prctl(option: int, value: Any) -> None:
    ctypes.CDLL(None).prctl(option, value)


def _seed(who: Identity, seed: int) -> None:
    """Forked processes would all draw the same numbers, and other ones in each run."""
    number = -1 if who.worker is None else who.worker
    random.seed(f"{seed} {number}")
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(random.getrandbits(32))
