# SPDX-License-Identifier: BSD-3-Clause
"""How much memory is spare, and freed memory that a process keeps."""

import platform
import subprocess
import sys
from math import inf
from pathlib import Path

import pytest

from paceline.run.tensors.memory_limits import spare_bytes

AGAIN = """
import resource
from paceline.run.tensors.memory_limits import keep_freed_memory
KEEP
faults = []
for _ in range(6):
    block = bytearray(64 << 20)
    del block
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
print(faults[-1] - faults[1])
"""

PAGES = (64 << 20) // 4096


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has mallopt")
@pytest.mark.skipif(
    "[always]" in Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text(),
    reason="huge pages cause too few page faults to count",
)
@pytest.mark.parametrize(("keep", "times"), [("", 4), ("keep_freed_memory()", 0)])
def test_kept_memory_causes_no_new_page_faults(keep, times):
    source = AGAIN.replace("KEEP", keep)
    done = subprocess.run(
        [sys.executable, "-c", source], capture_output=True, text=True, check=True
    )
    assert round(int(done.stdout) / PAGES) == times


MEMINFO = "MemTotal: 9000 kB\nMemAvailable: 1000 kB\nHugePages_Total: 0\n"
V1 = "12:cpu,memory:/a/b\n11:pids:/\n"
V2 = "0::/a/b\n"


def group(limit, used, kept, shared, v1=False):
    """Return the files of a control group."""
    names = (
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_cache", "total_shmem")
        if v1
        else ("memory.max", "memory.current", "file", "shmem")
    )
    table = f"anon 5\n{names[2]} {kept}\n{names[3]} {shared}\n"
    return {names[0]: f"{limit}\n", names[1]: f"{used}\n", "memory.stat": table}


def inside(folder, files):
    return {f"{folder}/{name}": text for name, text in files.items()}


@pytest.mark.parametrize(
    ("files", "spare"),
    [
        ({}, inf),
        ({"proc/meminfo": MEMINFO}, 1_024_000),
        ({"proc/meminfo": "nonsense\n", "proc/self/cgroup": "nonsense:::"}, inf),
        (
            {"proc/self/cgroup": V2, **inside("sys/fs/cgroup/a/b", group(1000, 900, 300, 50))},
            350,
        ),
        (
            {"proc/self/cgroup": V2, **inside("sys/fs/cgroup/a/b", group("max", 900, 300, 50))},
            inf,
        ),
        (
            {
                "proc/self/cgroup": V2,
                **inside("sys/fs/cgroup/a/b", group(1000, 500, 0, 0)),
                **inside("sys/fs/cgroup/a", group(700, 600, 0, 0)),
            },
            100,
        ),
        (
            {"proc/self/cgroup": V2, **inside("sys/fs/cgroup", group(1000, 999, 0, 0))},
            1,
        ),
        (
            {
                "proc/self/cgroup": V1,
                "proc/meminfo": MEMINFO,
                **inside("sys/fs/cgroup/memory/a/b", group(1000, 900, 300, 50, v1=True)),
            },
            350,
        ),
        (
            {"proc/self/cgroup": V2, **inside("sys/fs/cgroup/a", group(1000, 1100, 0, 0))},
            0,
        ),
    ],
    ids=[
        "nothing known",
        "machine",
        "nonsense",
        "group",
        "group without a limit",
        "group in a group",
        "container that sees only its own group",
        "older groups",
        "more used than allowed",
    ],
)
def test_spare_bytes_is_the_least_that_the_machine_and_every_group_have_left(
    tmp_path, files, spare
):
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="ascii")
    assert spare_bytes(tmp_path) == spare


def test_this_machine_has_spare_memory():
    assert 0 < spare_bytes() < inf
