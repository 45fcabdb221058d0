# SPDX-License-Identifier: BSD-3-Clause
"""Where a living process is: it writes its Python stack when the launcher sends it a signal.

Python's fault handler writes the stack at once, even if the process is in an endless loop or waits
in C code. It goes into an unnamed file in memory, which the process holds open and the launcher
finds in /proc. The signal is one that no script is likely to use, and nothing is sent to a process
that doesn't handle it: it would die.
"""

import faulthandler
import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

__all__ = ["StackRequest", "accept_requests", "request_stack"]

SIGNAL = signal.SIGRTMAX - 5
_NAME = "paceline-stack"


class StackRequest(NamedTuple):
    """A stack that a process was asked to write."""

    file: Path
    offset: int  # where it begins; earlier ones are before it

    def read(self) -> str:
        """Return what was written so far; "": nothing yet, or the process is gone."""
        try:
            with self.file.open("rb") as file:
                file.seek(self.offset)
                return file.read().decode(errors="replace")
        except OSError:
            return ""


def accept_requests() -> None:
    """Let this process write its stack on request."""
    faulthandler.register(SIGNAL, os.memfd_create(_NAME), all_threads=False)


def request_stack(pid: int) -> StackRequest | None:
    """Ask a process for its stack; None: it doesn't accept requests."""
    try:
        file = _find_file(pid)
        if file is None or not _handles_signal(pid):
            return None
        request = StackRequest(file, file.stat().st_size)
        os.kill(pid, SIGNAL)
    except OSError:  # it is gone
        return None
    return request


def _find_file(pid: int) -> Path | None:
    for file in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):  # closed meanwhile
            if os.readlink(file).startswith(f"/memfd:{_NAME} "):
                return file
    return None


def _handles_signal(pid: int) -> bool:
    """Return whether the process has a handler for the signal."""
    for line in Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines():
        name, _, value = line.partition(":")
        if name == "SigCgt":
            return bool(int(value, 16) >> (SIGNAL - 1) & 1)
    return False
