# SPDX-License-Identifier: BSD-3-Clause
"""Damaged files are told of in one sentence; unpacked data that was kept is made again if torn."""

import gzip
import io
import os
import struct
import tarfile
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor

from disk import small_disk
from paceline.errors import SpecError
from paceline.lab.data import a9a, cifar10, mnist, text, tiny_imagenet
from paceline.lab.data.a9a import load_a9a
from paceline.lab.data.cifar10 import load_cifar10
from paceline.lab.data.images import Images
from paceline.lab.data.memory import remembered
from paceline.lab.data.mnist import load_mnist
from paceline.lab.data.text import load_shakespeare
from paceline.lab.data.tiny_imagenet import load_tiny_imagenet

SOURCES = [s for m in (mnist, cifar10, tiny_imagenet, text, a9a) for s in m.SOURCES]
FIRST = "train/n1/images/n1_0.JPEG"
IDX_X = struct.pack(">4I", 0x0803, 60_000, 28, 28)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder in which every file is there, and empty: nothing is fetched."""
    for source in SOURCES:
        (tmp_path / source.path).parent.mkdir(exist_ok=True)
        (tmp_path / source.path).touch()
    return tmp_path


def complaint(load: Callable[[Path], Any], folder: Path, path: str, data: bytes) -> str:
    """What is wrong with the file, with this in it."""
    (folder / path).write_bytes(data)
    with pytest.raises(SpecError) as caught:
        load(folder)
    before, damage, why = str(caught.value).partition(" is damaged: ")
    assert before == str(folder / path)
    assert damage
    assert "\n" not in why
    what, _, way_out = why.partition("; ")
    assert way_out == "delete it, and it will be fetched again"
    return what


def packed_tar(**members: bytes) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w:gz") as archive:
        for name, data in members.items():
            info = tarfile.TarInfo(f"cifar-10-batches-bin/{name}.bin")
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return file.getvalue()


def packed_zip(members: Mapping[str, bytes]) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name, data in members.items():
            archive.writestr(f"tiny-imagenet-200/{name}", data)
    return file.getvalue()


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "it is empty"),
        (b"not gzip", "Not a gzipped file"),
        (gzip.compress(IDX_X)[:-9], "Compressed file ended before"),
        (gzip.compress(IDX_X)[:-8] + bytes(8), "CRC check failed"),
        (gzip.compress(b"\0\0\x08\x01" + IDX_X[4:]), "it begins with 000008010000ea60"),
        (gzip.compress(IDX_X[:12]), "it begins with 000008030000ea600000001c,"),
        (gzip.compress(IDX_X + bytes(99)), "it has 99 bytes of values instead of 47040000"),
    ],
    ids=["empty", "not gzip", "truncated", "checksum", "magic", "header", "length"],
)
def test_a_damaged_idx_file_is_told(folder: Path, data: bytes, why: str) -> None:
    assert why in complaint(load_mnist, folder, "mnist/train-images-idx3-ubyte.gz", data)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "empty file"),
        (b"not a tar" * 999, "invalid header"),
        (packed_tar(data_batch_1=os.urandom(99_999))[:50_000], "unexpected end of data"),
        (packed_tar(other=b""), "it has no data_batch_1.bin, data_batch_2.bin"),
        (packed_tar(data_batch_2=b"short"), "its data_batch_2.bin has the MD5 4f09daa9d95bcb16"),
    ],
    ids=["empty", "not tar", "truncated", "member", "content"],
)
def test_a_damaged_tar_file_is_told(folder: Path, data: bytes, why: str) -> None:
    assert why in complaint(load_cifar10, folder, "cifar10/cifar-10-binary.tar.gz", data)


def test_a_torn_tar_file_at_hand_is_told(folder: Path, data_folder: Path) -> None:
    whole = data_folder / "cifar10/cifar-10-batches-bin.tar.xz"
    if not whole.is_file():
        pytest.skip(f"{whole} is not there")
    (folder / "cifar10/cifar-10-binary.tar.gz").unlink()
    with whole.open("rb") as file:
        begin = file.read(1_000_000)
    complaint(load_cifar10, folder, "cifar10/cifar-10-batches-bin.tar.xz", begin)


def jpeg(side: int) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (side, side)).save(file, "JPEG")
    return file.getvalue()


LISTS = {"wnids.txt": b"n1\n", "val/val_annotations.txt": b""}


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "File is not a zip file"),
        (packed_zip(LISTS)[:-30], "File is not a zip file"),
        (packed_zip({}), "There is no item named 'tiny-imagenet-200/wnids.txt' in the archive"),
        (packed_zip(LISTS), "There is no item named 'tiny-imagenet-200/train/n1/images/n1_0.JPEG'"),
        (packed_zip(LISTS | {FIRST: b"not a picture"}), "cannot identify image file"),
        (packed_zip(LISTS | {FIRST: jpeg(64)[:-20]}), "image file is truncated"),
        (packed_zip(LISTS | {FIRST: jpeg(32)}), "images/n1_0.JPEG has 32 x 32 pixels"),
        (packed_zip(LISTS).replace(b"n1\n", b"n2\n"), "Bad CRC-32 for file"),
    ],
    ids=["empty", "truncated", "lists", "image", "not jpeg", "torn jpeg", "size", "checksum"],
)
def test_a_damaged_zip_file_is_told(folder: Path, data: bytes, why: str) -> None:
    def load(folder: Path) -> Images:
        return load_tiny_imagenet(folder, classes=1)

    assert why in complaint(load, folder, "tiny-imagenet/tiny-imagenet-200.zip", data)


@pytest.mark.parametrize(
    ("data", "why"),
    [(b"", "it is empty"), (b"First Citizen:\nBefore", "its SHA-256 is 11cb5a73")],
    ids=["empty", "truncated"],
)
def test_a_damaged_text_is_told(folder: Path, data: bytes, why: str) -> None:
    assert why in complaint(load_shakespeare, folder, "tiny-shakespeare/input.txt", data)


GOOD = b"+1 3:1 123:1 \n" * 32_560


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "it is empty"),
        (GOOD, "it has 32560 rows instead of 32561"),
        (GOOD + b"-1 3:1 12", "its row 32561 is '-1 3:1 12'"),
        (b"0 3:1 4:1\n" + GOOD, "its row 1 is '0 3:1 4:1'"),
        (b"-1 3:2\n" + GOOD, "its row 1 is '-1 3:2'"),
        (b"-1 0:1\n" + GOOD, "its row 1 is '-1 0:1'"),
        (GOOD + b"-1 3:1 124:1\n", "its row 32561 is '-1 3:1 124:1'"),
        (b"-1 \xff\n" + GOOD, "its row 1 is '-1 \N{REPLACEMENT CHARACTER}'"),
    ],
    ids=["empty", "rows", "truncated", "label", "value", "feature 0", "feature 124", "not text"],
)
def test_a_damaged_table_is_told(folder: Path, data: bytes, why: str) -> None:
    assert why in complaint(load_a9a, folder, "a9a/a9a", data)


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    """A file that takes long to unpack."""
    path = tmp_path / "packed"
    path.write_text("3")
    return path


class Unpacker:
    """Unpacks a file, and counts how often."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.times = 0

    def __call__(self) -> dict[str, Tensor]:
        self.times += 1
        return {"x": torch.arange(int(self._path.read_text()))}


def test_what_was_unpacked_is_kept(tmp_path: Path, packed: Path) -> None:
    unpack = Unpacker(packed)
    for _ in range(3):
        assert remembered(tmp_path / "cache", "set", packed, unpack)["x"].tolist() == [0, 1, 2]
    assert unpack.times == 1
    assert len(list((tmp_path / "cache").iterdir())) == 1


def test_without_a_folder_nothing_is_kept(packed: Path) -> None:
    unpack = Unpacker(packed)
    for _ in range(2):
        assert remembered(None, "set", packed, unpack)["x"].tolist() == [0, 1, 2]
    assert unpack.times == 2


def test_another_file_is_unpacked_anew(tmp_path: Path, packed: Path) -> None:
    unpack = Unpacker(packed)
    remembered(tmp_path / "cache", "set", packed, unpack)
    packed.write_text("12")
    assert len(remembered(tmp_path / "cache", "set", packed, unpack)["x"]) == 12
    assert unpack.times == 2


@pytest.mark.parametrize("keep", [0, 1, 100, -1])
def test_what_was_kept_and_is_torn_is_made_again(tmp_path: Path, packed: Path, keep: int) -> None:
    unpack = Unpacker(packed)
    remembered(tmp_path / "cache", "set", packed, unpack)
    [kept] = (tmp_path / "cache").iterdir()
    kept.write_bytes(kept.read_bytes()[:keep])
    for _ in range(2):
        assert remembered(tmp_path / "cache", "set", packed, unpack)["x"].tolist() == [0, 1, 2]
    assert unpack.times == 2


def test_writing_to_what_was_kept_changes_it_for_nobody_else(tmp_path: Path, packed: Path) -> None:
    for _ in range(3):
        found = remembered(tmp_path / "cache", "set", packed, Unpacker(packed))["x"]
        assert found.tolist() == [0, 1, 2]
        found.add_(1)


def test_a_folder_that_cannot_be_written_to_costs_time_only(tmp_path: Path, packed: Path) -> None:
    assert remembered(packed / "cache", "set", packed, Unpacker(packed))["x"].tolist() == [0, 1, 2]


def test_a_full_disk_costs_time_only(tmp_path: Path, packed: Path) -> None:
    packed.write_text("300000")
    with small_disk(tmp_path / "disk", "1m") as disk:
        found = remembered(disk.path / "cache", "set", packed, Unpacker(packed))
        assert len(found["x"]) == 300_000
        assert list((disk.path / "cache").iterdir()) == []


def test_two_may_unpack_the_same_at_once(tmp_path: Path, packed: Path) -> None:
    """While one unpacks, another begins and ends."""

    def unpack() -> dict[str, Tensor]:
        return remembered(tmp_path / "cache", "set", packed, Unpacker(packed))

    assert remembered(tmp_path / "cache", "set", packed, unpack)["x"].tolist() == [0, 1, 2]
    assert len(list((tmp_path / "cache").iterdir())) == 1
