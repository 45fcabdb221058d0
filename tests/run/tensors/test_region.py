# SPDX-License-Identifier: BSD-3-Clause
"""Memory that several processes see: sealed, sized, for reading only where it must be, freed."""

import fcntl
import mmap
import os
import resource
from contextlib import contextmanager
from itertools import count, islice
from math import inf
from pathlib import Path

import pytest
import torch

from paceline.errors import ProtocolError, SpecError
from paceline.run.tensors.memory import spare_bytes
from paceline.run.tensors.region import Region


@pytest.fixture
def region():
    region, fd = Region.create(100, "test")
    yield region, fd
    os.close(fd)


def memfd(size=4096, seals=fcntl.F_SEAL_SHRINK, fill=True):
    fd = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    if fill:
        os.write(fd, bytes(size))
    else:
        os.ftruncate(fd, size)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


def test_a_new_region_is_of_zeros_and_what_is_written_others_see(region):
    ours, fd = region
    theirs = Region(fd, 100)
    assert torch.equal(ours.tensor(torch.uint8, 100, 0), torch.zeros(100, dtype=torch.uint8))
    ours.tensor(torch.float32, 2, 8).copy_(torch.tensor([1.0, 2.0]))
    assert theirs.tensor(torch.float32, 2, 8).tolist() == [1.0, 2.0]


def test_nobody_can_change_the_size_of_a_region_or_unseal_it(region):
    _, fd = region
    for size in (0, 99, 101):
        with pytest.raises(PermissionError):
            os.ftruncate(fd, size)
    with pytest.raises(PermissionError):
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)


def test_what_is_mapped_for_reading_cannot_be_written(region):
    """Torch does not ask, and would end the process: so ask the mapping itself."""
    _, fd = region
    assert memoryview(Region(fd, 100, writable=False)._map).readonly
    assert not memoryview(Region(fd, 100)._map).readonly


def test_a_region_is_as_large_as_was_asked_or_as_it_is(region):
    _, fd = region
    assert [Region(fd, 60).size, Region(fd).size] == [60, 100]


def test_an_empty_region_has_an_address_all_the_same():
    region, fd = Region.create(0, "test")
    assert (region.size, os.fstat(fd).st_size) == (0, 1)
    assert region.tensor(torch.float32, 0, 0).numel() == 0
    os.close(fd)


@pytest.mark.parametrize(
    ("make", "size", "what"),
    [
        (lambda: memfd(64), 65, "at least 65 bytes of sealed memory, got 64 bytes"),
        (lambda: memfd(64, seals=0), 64, "got 64 bytes, not sealed"),
        (lambda: memfd(64, seals=fcntl.F_SEAL_GROW), None, "got 64 bytes, not sealed"),
        (lambda: memfd(0), None, "at least 1 bytes of sealed memory, got 0 bytes"),
        (lambda: memfd(2**62, fill=False), 2**62, "got 0 bytes"),
        (lambda: os.open("/dev/zero", os.O_RDWR), 64, "cannot map a peer's memory: Invalid"),
        (lambda: os.open("/proc/self/exe", os.O_RDONLY), 64, "cannot map a peer's memory"),
    ],
    ids=["too small", "unsealed", "sealed otherwise", "empty", "a hole", "a device", "a file"],
)
def test_what_is_not_sealed_memory_of_that_size_is_not_mapped(make, size, what):
    fd = make()
    with pytest.raises(ProtocolError, match=what):
        Region(fd, size)
    os.close(fd)


def test_a_descriptor_that_is_no_more_is_not_mapped():
    with pytest.raises(ProtocolError, match="Bad file descriptor"):
        Region(99_999, 1)


def test_too_much_memory_is_an_error_that_says_how_much():
    """So much that, were it asked for after all, it would not be more than another error."""
    with pytest.raises(
        SpecError, match=r"^not enough shared memory for the slot: need 9223372036855 MB"
    ):
        Region.create(2**63, "slot")


def is_free(fd):
    try:
        os.fstat(fd)
    except OSError:
        return True
    return False


@contextmanager
def descriptors_left(number):
    """Let no more than so many be opened."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = next(islice(filter(is_free, count()), number, None))
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.parametrize("number", [0, 1])
def test_too_many_open_files_are_an_error_that_says_what_to_do(number):
    """One is needed for the memory, and one for its mapping."""
    before = sorted(os.listdir("/proc/self/fd"))
    with (
        descriptors_left(number),
        pytest.raises(SpecError, match=r"too many open files to share memory for the slot"),
    ):
        Region.create(1000, "slot")
    assert sorted(os.listdir("/proc/self/fd")) == before
    with descriptors_left(2):
        os.close(Region.create(1000, "slot")[1])


def test_memory_that_the_system_will_not_map_is_an_error_that_says_how_much():
    before = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * mmap.PAGESIZE + 2_000_000, before[1]))
    try:
        with pytest.raises(SpecError, match=r"^not enough shared memory for the slot: need 8 MB"):
            Region.create(8_000_000, "slot")
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def test_nothing_is_left_open_when_regions_are_gone():
    before = sorted(os.listdir("/proc/self/fd"))
    region, fd = Region.create(1000, "test")
    tensor = region.tensor(torch.float32, 10, 0)
    other = Region(fd, 1000, writable=False)
    bad = memfd(seals=0)
    for wanted in (10, 5000):
        with pytest.raises(ProtocolError):
            Region(bad, wanted)
    with pytest.raises(SpecError):
        Region.create(2**63, "test")
    os.close(fd)
    os.close(bad)
    del region, other
    assert tensor.tolist() == [0.0] * 10  # it holds the memory, and that one descriptor
    del tensor
    assert sorted(os.listdir("/proc/self/fd")) == before


def test_tensors_begin_where_they_are_to_begin(region):
    ours, _ = region
    ours.tensor(torch.uint8, 100, 0).copy_(torch.arange(100))
    assert ours.tensor(torch.uint8, 3, 7).tolist() == [7, 8, 9]
    assert ours.tensor(torch.int16, 1, 2).tolist() == [2 + 256 * 3]


def test_the_memory_of_a_slot_is_there_from_the_first(region):
    """Pages that are touched only in a step would make that step slow."""
    _, fd = region
    assert os.fstat(fd).st_blocks * 512 >= mmap.PAGESIZE


# ---------------------------------------------------------------------------- how much there is

MEMINFO = "MemTotal: 9000 kB\nMemAvailable: 1000 kB\nHugePages_Total: 0\n"
V1 = "12:cpu,memory:/a/b\n11:pids:/\n"
V2 = "0::/a/b\n"


def group(limit, used, kept, shared, v1=False):
    """The files of a control group."""
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
        "nothing is known",
        "machine",
        "nonsense",
        "group",
        "group without a limit",
        "group in a group",
        "container that sees its own group only",
        "older groups",
        "more than all is used",
    ],
)
def test_spare_is_what_the_machine_and_every_group_have_left(tmp_path, files, spare):
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="ascii")
    assert spare_bytes(tmp_path) == spare


def test_this_machine_has_some_memory_left():
    assert 0 < spare_bytes() < inf
