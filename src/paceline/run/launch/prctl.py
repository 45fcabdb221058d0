# SPDX-License-Identifier: BSD-3-Clause
"""What the OS does for a process and its descendants: names, parents that exit, orphans.

The fork server calls `die_with` before it imports anything large, so this module must import fast.
"""

import ctypes
import os
import signal
from typing import Any

__all__ = ["adopt_orphans", "die_with", "outlive_parent", "set_process_name"]

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36


def set_process_name(name: str) -> None:
    """Set the name that `ps -e` shows, which has at most 15 characters."""
    _prctl(_PR_SET_NAME, f"paceline-{name}".encode())


def die_with(parent: int, number: int = signal.SIGKILL) -> None:
    """Have the OS send this process a signal when its parent exits; exit if it already has."""
    _prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        os._exit(1)


def outlive_parent() -> None:
    """Undo `die_with`."""
    _prctl(_PR_SET_PDEATHSIG, 0)


def adopt_orphans() -> None:
    """Make this process the parent of every descendant whose own parent exits."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: Any) -> None:
    ctypes.CDLL(None).prctl(option, value)
