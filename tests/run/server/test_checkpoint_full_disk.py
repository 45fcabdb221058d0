# SPDX-License-Identifier: BSD-3-Clause
"""Full, read-only and missing disks never leave a half-written checkpoint or weights file."""

import pytest
import torch
import torch._dynamo  # an optimizer loads it, and it sets an environment variable
from torch import nn

from disk import small_disk
from paceline.run.net.in_process import InProcessStore
from paceline.run.server.checkpoint import Archive, Saved, Snapshot
from paceline.run.server.export_weights import write_weights
from paceline.run.tensors.layout import gather
from paceline.run.tensors.shard import Shard


@pytest.fixture
def said():
    return []


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def megabyte(version):
    """Return a checkpoint of a little less than a megabyte."""
    shard = {"weights": torch.full((225_000,), float(version))}
    return Saved(version, 1, [], None, shard, {})


def write(archive, one):
    archive.save(Snapshot.of(one), one.positions)
    archive.wait()


def newest(archive):
    found = archive.load()
    weights = found.shard["weights"]
    assert torch.equal(weights, torch.full((225_000,), float(found.version)))
    return found.version


# -------------------------------------------------------------------------------------- checkpoints


def test_full_disk_keeps_the_previous_checkpoint_and_is_reported(tmp_path, said):
    with small_disk(tmp_path / "disk", "2m") as disk:
        archive = Archive(disk.path / "checkpoints", said.append)
        for version in (1, 2, 3):
            write(archive, megabyte(version))
        assert said == [
            "cannot write the checkpoint of version 3: No space left on device; "
            "keeping that of version 2"
        ]
        folder = disk.path / "checkpoints"
        assert names(folder) == ["0000000001.ckpt", "0000000002.ckpt"]
        assert newest(archive) == 2
        disk.remount("size=4m")  # there is space again
        write(archive, megabyte(4))
        assert names(folder) == ["0000000002.ckpt", "0000000004.ckpt"]
        assert newest(archive) == 4
        assert len(said) == 1


def test_disk_that_is_full_from_the_beginning_gets_no_partial_file(tmp_path, said):
    with small_disk(tmp_path / "disk", "512k") as disk:
        archive = Archive(disk.path / "checkpoints", said.append)
        write(archive, megabyte(1))
        assert said[0].endswith("No space left on device; there is no earlier one")
        assert names(disk.path / "checkpoints") == []
        assert archive.load() is None


def test_partial_file_of_a_killed_server_is_removed_before_the_next_write(tmp_path, said):
    with small_disk(tmp_path / "disk", "2m") as disk:
        folder = disk.path / "checkpoints"
        folder.mkdir()
        (folder / "0000000001.partial").write_bytes(bytes(1_900_000))
        archive = Archive(folder, said.append)
        write(archive, megabyte(2))
        assert (names(folder), said) == (["0000000002.ckpt"], [])


def test_read_only_disk_is_reported(tmp_path, said):
    with small_disk(tmp_path / "disk", "4m") as disk:
        archive = Archive(disk.path / "checkpoints", said.append)
        write(archive, megabyte(1))
        disk.remount("ro")
        write(archive, megabyte(2))
        assert said == [
            "cannot write the checkpoint of version 2: Read-only file system; "
            "keeping that of version 1"
        ]
        assert newest(archive) == 1


def test_folder_that_cannot_be_created_is_reported(tmp_path, said):
    (tmp_path / "checkpoints").write_text("a file")
    for folder, why in (
        (tmp_path / "checkpoints", "File exists"),
        (tmp_path / "gone" / "checkpoints", "No such file or directory"),
    ):
        write(Archive(folder, said.append), megabyte(3))
        assert said.pop() == (
            f"cannot write the checkpoint of version 3: {why}; there is no earlier one"
        )


def test_every_failed_write_keeps_the_previous_checkpoint(tmp_path, said):
    with small_disk(tmp_path / "disk", "1m") as disk:
        archive = Archive(disk.path / "checkpoints", said.append)
        for version in (1, 2, 2, 3):
            write(archive, megabyte(version))
        why = "No space left on device; keeping that of version 1"
        assert said == [f"cannot write the checkpoint of version {n}: {why}" for n in (2, 2, 3)]
        assert names(disk.path / "checkpoints") == ["0000000001.ckpt"]
        assert newest(archive) == 1


def test_failed_rewrite_of_a_version_keeps_its_first_file(tmp_path, said):
    """The last version is written again once the workers have reported their positions."""
    with small_disk(tmp_path / "disk", "2m") as disk:
        archive = Archive(disk.path / "checkpoints", said.append)
        for version in (1, 2, 2):
            write(archive, megabyte(version))
        assert said == [
            "cannot write the checkpoint of version 2: No space left on device; "
            "keeping that of version 2"
        ]
        assert newest(archive) == 2


def test_new_checkpoint_is_written_even_if_an_old_file_cannot_be_removed(tmp_path, said):
    folder = tmp_path / "checkpoints"
    archive = Archive(folder, said.append)
    stubborn = [folder / "0000000001.ckpt", folder / "0000000009.partial"]
    for path in stubborn:  # a folder can't be removed like a file
        path.mkdir(parents=True)
    for version in (2, 3):
        write(archive, megabyte(version))
    assert said == [
        f"cannot remove {stubborn[1]}: Is a directory",
        f"cannot remove {stubborn[1]}: Is a directory",
        f"cannot remove {stubborn[0]}: Is a directory",
    ]
    assert names(folder) == [
        "0000000001.ckpt",
        "0000000002.ckpt",
        "0000000003.ckpt",
        "0000000009.partial",
    ]
    assert newest(archive) == 3


# ------------------------------------------------------------------------------------------ weights


def test_full_disk_keeps_the_previous_weights(tmp_path):
    model = nn.Linear(450, 500, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    state = gather([model], [optimizer])
    shard = Shard(state, [], InProcessStore(state.spec))
    with small_disk(tmp_path / "disk", "2m") as disk:
        write_weights(disk.path, [model], shard)
        before = (disk.path / "weights.pt").read_bytes()
        disk.remount("size=1m")
        with pytest.raises(OSError, match="No space left on device"):
            write_weights(disk.path, [model], shard)
        assert names(disk.path) == ["weights.pt"]
        assert (disk.path / "weights.pt").read_bytes() == before
        disk.remount("size=4m")
        write_weights(disk.path, [model], shard)
        assert torch.equal(torch.load(disk.path / "weights.pt")["weight"], model.weight)
