# SPDX-License-Identifier: BSD-3-Clause
"""What the runtime needs from the operating system besides connections.

Every part of the runtime gets its time, disk and threads from a `System` that it was given, and
asks it about other processes. So a simulation can run the same code on a virtual clock and a disk
that fails: it passes a system of its own.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from threading import Thread
from typing import Protocol

from paceline.files import DISK, Disk
from paceline.run.process_status import (
    ProcessStatus,
    descendants,
    is_stopped,
    process_status,
)

__all__ = ["SYSTEM", "BackgroundWork", "System", "start_thread"]


class BackgroundWork(Protocol):
    """Work that was started, as threads are; `join` waits until it is done."""

    def is_alive(self) -> bool:
        """Return whether it isn't done yet."""
        ...

    def join(self) -> None:
        """Wait until it is done."""
        ...


def start_thread(work: Callable[[], None], name: str) -> BackgroundWork:
    """Do the work in a thread; raises RuntimeError if the system has no more threads."""
    thread = Thread(target=work, name=name)
    thread.start()
    return thread


@dataclass(frozen=True, kw_only=True)
class System:
    """The operating system, as one process of a run sees it."""

    monotonic: Callable[[], float] = time.monotonic
    """Return seconds on a clock that never jumps, the same one in all processes of a host."""

    cpu_time: Callable[[], float] = time.process_time
    """Return the processor time that this process has used."""

    wall_time: Callable[[], float] = time.time
    """Return the seconds since 1970; this clock may jump."""

    sleep: Callable[[float], None] = time.sleep
    """Wait for this many seconds."""

    is_stopped: Callable[[int], bool] = is_stopped
    """Return whether a process of this host was stopped (SIGSTOP, Ctrl-Z)."""

    status: Callable[[int], ProcessStatus | None] = process_status
    """Return the state of a process of this host; None if there is none."""

    descendants: Callable[[int], list[int]] = descendants
    """Return the processes that a process of this host has started."""

    disk: Disk = DISK
    """Where everything is written."""

    start_thread: Callable[[Callable[[], None], str], BackgroundWork] = start_thread
    """Do this work in a thread of this name."""


SYSTEM = System()
"""The real one."""
