# SPDX-License-Identifier: BSD-3-Clause
"""How many cores the processes of a run may use on this machine."""

import os
from pathlib import Path

__all__ = ["available_cores", "threads_of"]

_OWN_GROUP = Path("/proc/self/cgroup")
_GROUPS = Path("/sys/fs/cgroup")


def available_cores(own_group: Path = _OWN_GROUP, groups: Path = _GROUPS) -> float:
    """Return the number of cores, which a container may limit to a fraction.

    The files are those of control groups, version 2; without them only the affinity counts.
    """
    cores = float(len(os.sched_getaffinity(0)))
    try:
        lines = own_group.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return cores
    [path, *_] = [line.removeprefix("0::") for line in lines if line.startswith("0::")] or ["/"]
    group = groups / path.lstrip("/")
    # A limit of a group also holds for the groups inside it.
    limits = [_limit(each / "cpu.max") for each in (group, *group.parents)]
    return min([cores, *(limit for limit in limits if limit is not None)])


def _limit(file: Path) -> float | None:
    """Return the limit in a file such as "150000 100000", which is 1.5 cores; None: no limit."""
    try:
        quota, period = file.read_text(encoding="ascii").split()
        limit = int(quota) / int(period)
    except (OSError, ValueError, ZeroDivisionError):  # no such file, or "max 100000"
        return None
    return limit if limit > 0 else None


def threads_of(processes: int) -> int:
    """Return how many threads each of these processes computes with.

    That is OMP_NUM_THREADS if the user has set it, and otherwise a share of the cores.
    """
    chosen = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    if chosen.isdecimal() and int(chosen) > 0:
        return int(chosen)
    return max(1, int(available_cores()) // processes)
