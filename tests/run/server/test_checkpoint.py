# SPDX-License-Identifier: BSD-3-Clause
"""Checkpoints are restored to the bit, and a damaged file is never taken for an intact one."""

import os
import threading
from contextlib import contextmanager
from math import inf, isnan, nan
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from message_examples import unhurried
from paceline.errors import CheckpointError, SpecError
from paceline.run.server.checkpoint import KEPT, MAGIC, Archive, Saved, Snapshot

HEAD_BYTES = len(MAGIC) + 32  # the lengths of tree, positions and tensors, and two checksums
DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16,
    torch.float8_e4m3fn, torch.float8_e5m2,
    torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.uint16, torch.uint32, torch.uint64,
    torch.bool, torch.complex64, torch.complex128,
]  # fmt: skip


def saved(version=3, shard=None, positions=None, **fields):
    usual = {"samples": 96, "options": [[2, 0, 0, "lr", 0.5]], "memory": [[0.25, True]]}
    shard = {"weights": torch.arange(1.0, 17).reshape(2, 8)} if shard is None else shard
    positions = {0: b"here", 7: b""} if positions is None else positions
    return Saved(version=version, shard=shard, positions=positions, **{**usual, **fields})


def write(archive, one):
    archive.save(Snapshot.of(one), one.positions)
    archive.wait()


@contextmanager
def folder_with(**files):
    """Make a folder of checkpoints with these files."""
    with TemporaryDirectory() as name:
        for version, body in files.items():
            (Path(name) / f"{version[1:]}.ckpt").write_bytes(body)
        yield Path(name)


def bits(tensor):
    return tensor.dtype, tuple(tensor.shape), tensor.contiguous().flatten().view(torch.uint8)


def assert_same(found, given):
    """Assert equality to the bit; a tuple comes back as a list."""
    if isinstance(given, torch.Tensor):
        assert bits(found)[:2] == bits(given)[:2]
        assert torch.equal(bits(found)[2], bits(given)[2])
    elif isinstance(given, dict):
        assert list(found) == list(given)
        for key in given:
            assert_same(found[key], given[key])
    elif isinstance(given, list | tuple):
        assert len(found) == len(given)
        for one, other in zip(found, given, strict=True):
            assert_same(one, other)
    else:
        assert type(found) is type(given)
        assert found == given or (isnan(found) and isnan(given))


@pytest.fixture
def printed():
    return []


@pytest.fixture
def archive(tmp_path, printed):
    return Archive(tmp_path / "checkpoints", printed.append)


@pytest.fixture(scope="module")
def body(tmp_path_factory):
    """Return the bytes of an intact checkpoint, and where its parts begin."""
    archive = Archive(tmp_path_factory.mktemp("intact") / "checkpoints", print)
    one = saved()
    snapshot = Snapshot.of(one)
    tree = len(snapshot.tree)
    archive.save(snapshot, one.positions)
    archive.wait()
    [path] = archive._folder.glob("*.ckpt")
    return path.read_bytes(), HEAD_BYTES, HEAD_BYTES + tree, path.stat().st_size - 64


# -------------------------------------------------------------------------------------- round trips


@pytest.mark.parametrize(
    "shard",
    [
        {str(dtype): torch.tensor([0, 1, 1, 0, 1]).to(dtype) for dtype in DTYPES},
        {"odd": torch.tensor([nan, -nan, inf, -inf, -0.0, 1e-45])},
        {"empty": torch.empty(0), "shape": torch.empty(3, 0, 2), "scalar": torch.tensor(7)},
        {"strided": torch.arange(24.0).reshape(2, 3, 4).permute(2, 0, 1)[:, ::2]},
        {"channels last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)},
        {"nested": [{"state": {0: {"step": torch.tensor(3.0)}, 1: {}}}, [[], [torch.ones(2)]]]},
        {"plain": [None, True, 0, -(2**63), 2**64 - 1, 1.5, nan, inf, "text\n", (1, (2,))]},
        {"parameter": torch.nn.Parameter(torch.ones(2)) * 2},
        {},
    ],
    ids=lambda shard: next(iter(shard), "nothing"),
)
def test_checkpoint_is_restored_to_the_bit(archive, printed, shard):
    one = saved(shard=shard)
    write(archive, one)
    found = archive.load()
    assert_same(found.shard, one.shard)
    assert (found.version, found.samples) == (one.version, one.samples)
    assert (found.options, found.memory, found.positions) == (
        one.options,
        one.memory,
        one.positions,
    )
    assert printed == []


class HeldWork:
    """Background work that is done when it is waited for."""

    def __init__(self, work, name):
        self._work = work

    def is_alive(self):
        return self._work is not None

    def join(self):
        work, self._work = self._work, None
        if work is not None:
            work()


def test_archive_writes_with_the_given_kind_of_background_work(tmp_path, printed):
    folder = tmp_path / "checkpoints"
    archive = Archive(folder, printed.append, start=HeldWork)
    one = saved()
    archive.save(Snapshot.of(one), one.positions)
    assert (archive.is_writing, folder.exists()) == (True, False)
    archive.wait()
    assert (archive.is_writing, archive.load().version, printed) == (False, one.version, [])


def test_checkpoint_is_written_at_once_if_the_system_has_no_more_threads(tmp_path, printed):
    def refuse(work, name):
        raise RuntimeError("can't start new thread")

    archive = Archive(tmp_path / "checkpoints", printed.append, start=refuse)
    one = saved()
    archive.save(Snapshot.of(one), one.positions)
    assert (archive.is_writing, archive.load().version) == (False, one.version)


def test_checkpoint_of_many_chunks_is_restored_to_the_bit(archive):
    large = torch.randint(0, 256, ((20 << 20) + 5,), dtype=torch.uint8)
    write(archive, saved(shard={"large": large, "small": torch.ones(3)}))
    found = archive.load().shard
    assert torch.equal(found["large"], large)
    assert torch.equal(found["small"], torch.ones(3))


@settings(unhurried, max_examples=30)
@given(st.dictionaries(st.integers(0, 2**53), st.binary(max_size=50), max_size=5))
def test_any_positions_are_restored(positions):
    with TemporaryDirectory() as name:
        archive = Archive(Path(name), print)
        write(archive, saved(positions=positions))
        assert archive.load().positions == positions


def test_change_after_the_copy_is_not_saved(archive):
    weights, positions = torch.ones(3), {0: b"then"}
    one = saved(shard={"weights": weights}, positions=positions)
    snapshot = Snapshot.of(one)
    weights.fill_(7)
    archive.save(snapshot, positions)
    positions[0] = b"later"
    archive.wait()
    found = archive.load()
    assert torch.equal(found.shard["weights"], torch.ones(3))
    assert found.positions == {0: b"then"}


def test_load_returns_none_if_there_never_was_a_checkpoint(archive, tmp_path):
    assert archive.load() is None
    (tmp_path / "checkpoints").mkdir()
    assert archive.load() is None


def test_value_that_cannot_be_saved_is_named_when_it_is_copied():
    with pytest.raises(SpecError, match="the checkpoint contains a object, which can't be sent"):
        Snapshot.of(saved(shard={"odd": object()}))


# --------------------------------------------------------------------------------------- the folder


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_only_the_newest_checkpoints_are_kept(archive, tmp_path):
    for version in (2, 9, 10, 100, 12345678901):
        write(archive, saved(version))
    assert KEPT == 2
    assert names(tmp_path / "checkpoints") == ["0000000100.ckpt", "12345678901.ckpt"]
    assert archive.load().version == 12345678901


def test_version_that_is_saved_again_replaces_its_file(archive, tmp_path):
    for weight in (1.0, 2.0):
        write(archive, saved(5, {"weight": torch.tensor(weight)}))
    assert names(tmp_path / "checkpoints") == ["0000000005.ckpt"]
    assert archive.load().shard == {"weight": torch.tensor(2.0)}


def test_partial_file_is_never_read_and_is_removed_by_the_next_write(archive, tmp_path):
    write(archive, saved(3))
    folder = tmp_path / "checkpoints"
    (folder / "0000000009.partial").write_bytes((folder / "0000000003.ckpt").read_bytes())
    assert archive.load().version == 3
    (folder / "0000000003.ckpt").unlink()
    assert archive.load() is None
    write(archive, saved(4))
    assert names(folder) == ["0000000004.ckpt"]


def test_other_files_in_the_folder_are_left_alone(archive, tmp_path):
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    (folder / "best.ckpt").write_text("mine")
    (folder / "notes.txt").write_text("mine")
    for version in (1, 2, 3):
        write(archive, saved(version))
    assert archive.load().version == 3
    assert names(folder) == ["0000000002.ckpt", "0000000003.ckpt", "best.ckpt", "notes.txt"]


def test_write_leaves_no_thread_and_no_descriptor(archive):
    write(archive, saved())  # loads everything that is loaded lazily
    archive.load()
    before = os.listdir("/proc/self/fd")
    snapshot = Snapshot.of(saved(4))
    archive.save(snapshot, {})
    archive.wait()
    assert not archive.is_writing
    assert [t.name for t in threading.enumerate() if t.name == "checkpoint"] == []
    archive.load()
    assert len(os.listdir("/proc/self/fd")) == len(before)
    archive.wait()  # returns at once


@pytest.fixture
def _no_thread_can_start():
    """Ask for a stack that is larger than any memory."""
    before = threading.stack_size(1 << 47)
    yield
    threading.stack_size(before)


@pytest.mark.usefixtures("_no_thread_can_start")
def test_checkpoint_is_written_even_if_no_thread_can_start(archive, printed):
    write(archive, saved(5))
    assert not archive.is_writing
    assert archive.load().version == 5
    assert printed == []


# ----------------------------------------------------------------------------------- damaged files


def cuts(body):
    """Return a length of each kind that a truncated file may have."""
    data, tree, positions, tensors = body
    return {
        "nothing": 0,
        "in the magic": 5,
        "after the magic": len(MAGIC),
        "in the sizes": len(MAGIC) + 11,
        "before the tree": tree,
        "in the tree": tree + 10,
        "before the positions": positions,
        "in the positions": positions + 3,
        "before the tensors": tensors,
        "in the tensors": tensors + 20,
        "at the last byte": len(data) - 1,
    }


KINDS = [*cuts((b"", 0, 0, 0))]


@pytest.mark.parametrize("kind", KINDS)
def test_truncated_file_is_damaged(body, kind):
    end = cuts(body)[kind]
    assert end < len(body[0])
    assert_damaged(body[0][:end])


@pytest.mark.parametrize("kind", KINDS)
def test_file_of_the_right_length_with_zeros_at_its_end_is_damaged(body, kind):
    """A crash leaves this on a disk that had recorded the length before the bytes."""
    end = cuts(body)[kind]
    assert_damaged(body[0][:end] + bytes(len(body[0]) - end))


def test_file_with_something_after_its_end_is_damaged(body):
    assert_damaged(body[0] + b"\0")


@pytest.mark.parametrize("junk", [b"", b"\n", b"junk" * 1000, MAGIC, MAGIC + b"\xff" * 100])
def test_file_of_junk_is_damaged(junk):
    assert_damaged(junk)


@unhurried
@given(st.data())
def test_file_with_one_changed_byte_is_damaged(body, data):
    damaged = bytearray(body[0])
    where = data.draw(st.sampled_from([0, *body[1:]])) + data.draw(st.integers(0, 31))
    where = data.draw(st.just(where) | st.integers(0, len(damaged) - 1))
    damaged[where] ^= data.draw(st.integers(1, 255))
    assert_damaged(bytes(damaged))


def assert_damaged(damaged):
    """Assert that it is an error on its own, twice, and that an earlier checkpoint is used."""
    lines = []
    with folder_with(v9=damaged) as folder:
        for _ in range(2):
            with pytest.raises(CheckpointError, match="is intact; start a new run"):
                Archive(folder, lines.append).load()
        assert names(folder) == ["9.damaged"]
    assert len(lines) == 1
    assert "9.ckpt is damaged" in lines[0]
    assert lines[0].endswith("; setting it aside")
    with folder_with(v9=damaged) as folder:
        archive = Archive(folder, lines.append)
        intact = saved(7)
        write(archive, intact)
        assert_same(archive.load().shard, intact.shard)
        assert names(folder) == ["0000000007.ckpt", "9.damaged"]


def test_all_damaged_files_are_set_aside_until_one_is_intact(body, printed):
    with folder_with(v9=b"damaged", v8=body[0][:-1], v7=body[0]) as folder:
        found = Archive(folder, printed.append).load()
        assert found.version == 3  # as its tree says
        assert names(folder) == ["7.ckpt", "8.damaged", "9.damaged"]
    assert len(printed) == 2


def test_intact_file_of_another_release_is_refused_and_left_alone():
    for tree in ({}, {"version": 3}, [1], {"positions": {}}, {**vars(saved()), "new": 1}):
        with TemporaryDirectory() as name:
            archive, lines = Archive(Path(name), print), []
            snapshot = Snapshot.of(saved())
            other = Snapshot(3, msgpack(tree), snapshot.fd)
            archive.save(other, {})
            archive.wait()
            with pytest.raises(CheckpointError, match="is not a checkpoint of this release"):
                Archive(Path(name), lines.append).load()
            assert lines == []
            assert [file.suffix for file in Path(name).iterdir()] == [".ckpt"]  # for that release


def msgpack(tree):
    if isinstance(tree, dict):
        tree = {key: None if key == "shard" else value for key, value in tree.items()}
    return msgspec.msgpack.encode(tree)
