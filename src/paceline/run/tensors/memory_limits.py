# SPDX-License-Identifier: BSD-3-Clause
"""How much memory is available, and how to keep memory that was freed.

Linux doesn't report an error if a process asks for more shared memory than there is: it kills
processes until there is enough, and rarely the one that asked. So Paceline checks first.

When a process has returned memory to the OS and allocates it again, every page costs a page fault.
In a step that allocates a gradient of 100 MB, this took longer than everything else together, so
the processes of a run keep the memory they free.
"""

import ctypes
from collections.abc import Iterator
from contextlib import suppress
from math import inf
from pathlib import Path
from typing import NamedTuple

__all__ = ["keep_freed_memory", "spare_bytes"]

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_KEPT_BYTES = 1 << 30


class _Names(NamedTuple):
    """File names and fields of one version of control groups."""

    top: str  # directory of the groups
    limit: str
    used: str
    files: str  # field of memory.stat: the page cache, which includes shared memory
    shared: str


_V1 = _Names(
    "sys/fs/cgroup/memory",
    "memory.limit_in_bytes",
    "memory.usage_in_bytes",
    "total_cache",
    "total_shmem",
)
_V2 = _Names("sys/fs/cgroup", "memory.max", "memory.current", "file", "shmem")


def spare_bytes(root: Path = Path("/")) -> float:
    """Return how many bytes the machine, and the containers around this process, have left.

    The page cache counts as spare, because the OS frees it on demand.
    """
    found = [inf]
    with suppress(OSError, LookupError, ValueError):
        found.append(_table(root / "proc/meminfo")["MemAvailable:"] * 1024)
    for group, names in _groups(root):
        # A group may be invisible from here, or have no limit.
        with suppress(OSError, LookupError, ValueError):
            table = _table(group / "memory.stat")
            limit, used = (int((group / name).read_text()) for name in (names.limit, names.used))
            found.append(limit - used + table[names.files] - table[names.shared])
    return max(0, min(found))


def keep_freed_memory() -> None:
    """Keep up to a gigabyte of freed memory in this process, if the C library supports it."""
    with suppress(AttributeError):  # only glibc has mallopt
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
        # Older versions accept at most 32 MB.
        mallopt(_M_MMAP_THRESHOLD, _KEPT_BYTES) or mallopt(_M_MMAP_THRESHOLD, 32 << 20)


def _table(path: Path) -> dict[str, int]:
    """Read lines that begin with a name and a number."""
    rows = [line.split() for line in path.read_text().splitlines()]
    return {row[0]: int(row[1]) for row in rows}


def _groups(root: Path) -> Iterator[tuple[Path, _Names]]:
    """Yield the control groups of this process, innermost first."""
    lines = []
    with suppress(OSError):
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    for line in lines:
        _, kinds, path = line.split(":", 2)
        names = _V2 if not kinds else _V1 if "memory" in kinds.split(",") else None
        if names is not None:
            inner = Path(path.strip("/"))
            yield from ((root / names.top / group, names) for group in (inner, *inner.parents))
