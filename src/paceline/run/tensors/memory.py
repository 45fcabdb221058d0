# SPDX-License-Identifier: BSD-3-Clause
"""How much memory there is to be had, and keeping what we have.

Whoever asks for more shared memory than there is gets no error from Linux: the system ends
processes until there is enough, and seldom the one that asked. So we look before we ask.

And whoever gives memory back gets it again one page at a time. In a step that makes a gradient of
100 MB anew this took longer than everything else together, so a process of a run keeps what it
frees.
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
    """How a version of control groups calls things."""

    top: str  # where the groups are
    limit: str
    used: str
    files: str  # in the table of what it is used for: kept of files, shared memory among it
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
    """What may still be taken of the machine, and of the containers that we are in.

    What the system keeps of files counts as spare, for it can be had back.
    """
    found = [inf]
    with suppress(OSError, LookupError, ValueError):
        found.append(_table(root / "proc/meminfo")["MemAvailable:"] * 1024)
    for group, names in _groups(root):
        with suppress(
            OSError, LookupError, ValueError
        ):  # it is not visible from here, or unlimited
            table = _table(group / "memory.stat")
            limit, used = (int((group / name).read_text()) for name in (names.limit, names.used))
            found.append(limit - used + table[names.files] - table[names.shared])
    return max(0, min(found))


def keep_freed_memory() -> None:
    """Let this process use again what it frees, up to a gigabyte, where the C library can do so."""
    with suppress(AttributeError):  # a library without it keeps, or not, as it likes
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
        # Older ones take no more than that.
        mallopt(_M_MMAP_THRESHOLD, _KEPT_BYTES) or mallopt(_M_MMAP_THRESHOLD, 32 << 20)


def _table(path: Path) -> dict[str, int]:
    """Lines of a name and a number."""
    rows = [line.split() for line in path.read_text().splitlines()]
    return {row[0]: int(row[1]) for row in rows}


def _groups(root: Path) -> Iterator[tuple[Path, _Names]]:
    """The control groups that this process is in, from the innermost out."""
    lines = []
    with suppress(OSError):
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    for line in lines:
        _, kinds, path = line.split(":", 2)
        names = _V2 if not kinds else _V1 if "memory" in kinds.split(",") else None
        if names is not None:
            inner = Path(path.strip("/"))
            yield from ((root / names.top / group, names) for group in (inner, *inner.parents))
