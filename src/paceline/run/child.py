# SPDX-License-Identifier: BSD-3-Clause
"""A process of a run from its first line to its last: become somebody, then execute the script.

It is forked from a process in which torch is loaded already, and must not load it by itself: the
launcher, which names what is to be done here, is quick because it has no torch.
"""

import atexit
import ctypes
import faulthandler
import gc
import multiprocessing
import os
import random
import runpy
import signal
import sys
import traceback
from dataclasses import dataclass
from io import TextIOWrapper
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from paceline.errors import PacelineError
from paceline.run.environment import Identity, adopt

__all__ = ["STOPS", "Task", "main"]

STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # what asks a run to stop

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15


@dataclass(frozen=True)
class Task:
    """What a process is to be and to do."""

    who: Identity
    script: Path
    arguments: tuple[str, ...]
    seed: int
    threads: int


def main(task: Task, out: Connection, err: Connection) -> None:
    """Execute the script as that process; its output goes to these pipes."""
    _die_with_parent()
    _take_name(task.who)
    os.setsid()  # so that Ctrl-C reaches the launcher alone, which ends the run in good order
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)
    # A loader with processes starts them as in a plain script, not in the way that we were started.
    multiprocessing.set_start_method(None, force=True)
    os.dup2(out.fileno(), 1)
    os.dup2(err.fileno(), 2)
    out.close()
    err.close()
    assert isinstance(sys.stdout, TextIOWrapper)  # as in every process that was just forked
    sys.stdout.reconfigure(line_buffering=True)
    faulthandler.enable()  # tells the line that wrote to the parameters, which are the server's
    adopt(task.who, task.threads)
    _seed(task)
    gc.freeze()  # what torch has made stays, so nobody need look through it again and again
    sys.argv = [str(task.script), *task.arguments]
    sys.path[0:1] = [str(task.script.parent)]
    try:
        runpy.run_path(str(task.script), run_name="__main__")
    except Exception as error:
        _show(error, task.script)
        code = error.exit_code if isinstance(error, PacelineError) else PacelineError.exit_code
        raise SystemExit(code) from None
    finally:
        atexit._run_exitfuncs()  # which multiprocessing does not
        sys.stdout.flush()


def _show(error: Exception, script: Path) -> None:
    """Print the traceback as if the script had been started by hand; an error of ours is enough."""
    shown = traceback.TracebackException.from_exception(error)
    at = [place for place, frame in enumerate(shown.stack) if frame.filename == str(script)]
    frames = shown.stack[at[0] :] if at else []  # none: the script cannot even be read
    if isinstance(error, PacelineError):
        ours = str(Path(__file__).parent.parent)
        frames = [frame for frame in frames if not frame.filename.startswith(ours)]
    shown.stack = traceback.StackSummary.from_list(frames)
    print("".join(shown.format()), end="", file=sys.stderr)


def _take_name(who: Identity) -> None:
    """Be told apart in `ps -e`, which shows fifteen letters."""
    name = "server" if who.worker is None else f"w{who.worker}"
    ctypes.CDLL(None).prctl(_PR_SET_NAME, f"paceline-{name}".encode())


def _die_with_parent() -> None:
    """Nobody is left behind: the fork server dies with the launcher, and we with it."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # The fork server lives for as long as anybody holds this, and we were given it too.
    server: Any = forkserver._forkserver
    os.close(server._forkserver_alive_fd)
    server._forkserver_alive_fd = None


def _seed(task: Task) -> None:
    """Forked processes would all draw the same numbers, and other ones in each run."""
    number = -1 if task.who.worker is None else task.who.worker
    random.seed(f"{task.seed} {number}")
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(random.getrandbits(32))
