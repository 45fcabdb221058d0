# SPDX-License-Identifier: BSD-3-Clause
"""The end of a script that plain Python executes, because another launcher has started it.

Paceline's own launcher executes scripts in `child`, which sees how they end. Here, a hook for
exceptions and one for the exit of Python see nearly as much: not that a script exits with a code of
its own, as with `sys.exit(3)`, but that reaches the launcher anyway.
"""

import atexit
import os
import sys
from collections.abc import Callable
from types import TracebackType

from paceline.errors import InternalError, PacelineError
from paceline.run.launch.child import clean_end, failure_text, succeed

__all__ = ["ScriptEnd"]


class ScriptEnd:
    """Ends this process as `child` would, and makes a last call."""

    def __init__(self, script: str, finish: Callable[[bool], int]) -> None:
        """`finish` is told whether the script failed; it returns the exit code if that isn't 0."""
        self._script = script
        self._finish = finish
        self._has_failed = False
        self._pid = os.getpid()
        self._excepthook = sys.excepthook

    def watch(self) -> None:
        """Wait for the end of the script."""
        sys.excepthook = self._on_exception
        atexit.register(self._on_exit)

    def _on_exception(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        """Print an exception that ends the script; raise SystemExit for the exit code."""
        if (end := clean_end(error)) is not None:
            print(end, file=sys.stderr, flush=True)
            raise SystemExit(0)
        self._has_failed = True
        if isinstance(error, PacelineError) and not isinstance(error, InternalError):
            print(failure_text(error, self._script), end="", file=sys.stderr, flush=True)
            raise SystemExit(error.exit_code)
        self._excepthook(kind, error, trace)

    def _on_exit(self) -> None:
        if os.getpid() != self._pid:  # a process that the script has forked
            return
        if not self._has_failed:
            succeed()
        code = self._finish(self._has_failed)
        if code and not self._has_failed:  # Python would exit with 0
            atexit.unregister(self._on_exit)
            atexit._run_exitfuncs()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
