# SPDX-License-Identifier: BSD-3-Clause
"""What the OS says about the processes of a run, and about those that their scripts start."""

import os
from pathlib import Path
from typing import NamedTuple

__all__ = ["ProcessStatus", "children_of", "descendants", "is_stopped", "process_status"]

_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


class ProcessStatus(NamedTuple):
    """One process."""

    state: str
    """As in `ps`: R running, S sleeping, D a thread waits for a disk, T stopped, Z exited."""
    cpu_s: float  # processor time that it has used

    @property
    def is_stopped(self) -> bool:
        """Whether it was stopped (SIGSTOP, Ctrl-Z)."""
        # "t" doesn't count: it is a process under a debugger or profiler, stopped on purpose.
        return self.state == "T"


def process_status(pid: int) -> ProcessStatus | None:
    """Return what the OS says about a process; None if there is none."""
    fields = _stat(Path(f"/proc/{pid}"))
    if len(fields) <= 12:
        return None
    state, user, system = fields[0].decode(), fields[11], fields[12]
    threads = Path(f"/proc/{pid}/task").glob("[0-9]*") if state == "S" else ()
    if any(_stat(thread)[:1] == [b"D"] for thread in threads):
        state = "D"
    return ProcessStatus(state, (int(user) + int(system)) * _TICK_S)


def _stat(folder: Path) -> list[bytes]:
    """Return what follows the name of a process or thread: state, parent and so on; [] if none."""
    try:
        stat = (folder / "stat").read_bytes()
    except OSError:
        return []
    # The name is in parentheses, and may contain anything.
    return stat.rpartition(b") ")[2].split()


def is_stopped(pid: int) -> bool:
    """Return whether the process was stopped (SIGSTOP, Ctrl-Z)."""
    status = process_status(pid)
    return status is not None and status.is_stopped


def children_of(pid: int) -> set[int]:
    """Return the processes whose parent is this one."""
    return {child for child, parent in _parents().items() if parent == pid}


def descendants(pid: int) -> list[int]:
    """Return the children of a process, their children, and so on."""
    parents, found = _parents(), [pid]
    for one in found:  # which grows meanwhile
        found += [child for child, parent in parents.items() if parent == one]
    return found[1:]


def _parents() -> dict[int, int]:
    """Return the parent of every process."""
    stats = {int(process.name): _stat(process) for process in Path("/proc").glob("[0-9]*")}
    return {pid: int(fields[1]) for pid, fields in stats.items() if len(fields) > 1}
