# SPDX-License-Identifier: BSD-3-Clause
"""Shared memory: sealed, sized, read-only on request, and freed."""

import fcntl
import mmap
import os
import resource
from contextlib import contextmanager
from itertools import count, islice
from pathlib import Path

import pytest
import torch

from paceline.errors import ProtocolError, SpecError
from paceline.run.tensors.shared_region import Region


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


def test_new_region_is_zero_and_shared(region):
    ours, fd = region
    theirs = Region(fd, 100)
    assert torch.equal(ours.tensor(torch.uint8, 100, 0), torch.zeros(100, dtype=torch.uint8))
    ours.tensor(torch.float32, 2, 8).copy_(torch.tensor([1.0, 2.0]))
    assert theirs.tensor(torch.float32, 2, 8).tolist() == [1.0, 2.0]


def test_region_can_be_neither_resized_nor_unsealed(region):
    _, fd = region
    for size in (0, 99, 101):
        with pytest.raises(PermissionError):
            os.ftruncate(fd, size)
    with pytest.raises(PermissionError):
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)


def test_read_only_mapping_cannot_be_written(region):
    """Writing through torch would kill the process, so write through the mapping."""
    _, fd = region
    assert memoryview(Region(fd, 100, writable=False)._map).readonly
    assert not memoryview(Region(fd, 100)._map).readonly


def test_region_has_the_requested_size_or_its_own(region):
    _, fd = region
    assert [Region(fd, 60).size, Region(fd).size] == [60, 100]


def test_empty_region_has_an_address():
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
def test_only_sealed_memory_of_that_size_is_mapped(make, size, what):
    fd = make()
    with pytest.raises(ProtocolError, match=what):
        Region(fd, size)
    os.close(fd)


def test_closed_descriptor_is_not_mapped():
    with pytest.raises(ProtocolError, match="Bad file descriptor"):
        Region(99_999, 1)


def test_error_for_too_much_memory_says_how_much():
    """The size is so large that a real attempt to allocate it fails harmlessly."""
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
    """Allow this many more open files."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = next(islice(filter(is_free, count()), number, None))
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.parametrize("number", [0, 1])
def test_error_for_too_many_open_files_says_what_to_do(number):
    """A region needs one for the memory, and one for its mapping."""
    before = sorted(os.listdir("/proc/self/fd"))
    with (
        descriptors_left(number),
        pytest.raises(SpecError, match=r"too many open files to share memory for the slot"),
    ):
        Region.create(1000, "slot")
    assert sorted(os.listdir("/proc/self/fd")) == before
    with descriptors_left(2):
        os.close(Region.create(1000, "slot")[1])


def test_error_for_memory_that_cannot_be_mapped_says_how_much():
    before = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * mmap.PAGESIZE + 2_000_000, before[1]))
    try:
        with pytest.raises(SpecError, match=r"^not enough shared memory for the slot: need 8 MB"):
            Region.create(8_000_000, "slot")
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def test_deleted_regions_leave_no_open_files():
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
    assert tensor.tolist() == [0.0] * 10  # keeps the memory, and one descriptor
    del tensor
    assert sorted(os.listdir("/proc/self/fd")) == before


def test_tensor_begins_at_its_offset(region):
    ours, _ = region
    ours.tensor(torch.uint8, 100, 0).copy_(torch.arange(100))
    assert ours.tensor(torch.uint8, 3, 7).tolist() == [7, 8, 9]
    assert ours.tensor(torch.int16, 1, 2).tolist() == [2 + 256 * 3]


def test_mapped_slot_is_resident_from_the_start(region):
    """Faulting the pages in during a step would make that step slow."""
    _, fd = region
    assert os.fstat(fd).st_blocks * 512 >= mmap.PAGESIZE
