# SPDX-License-Identifier: BSD-3-Clause
"""CIFAR-10 has its known content, and damaged files are reported."""

import io
import os
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.lab.data.cifar10 import load_cifar10
from paceline.lab.data.images import Images


def packed_tar(**members: bytes) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w:gz") as archive:
        for name, data in members.items():
            info = tarfile.TarInfo(f"cifar-10-batches-bin/{name}.bin")
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return file.getvalue()


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "empty file"),
        (b"not a tar" * 999, "invalid header"),
        (packed_tar(data_batch_1=os.urandom(99_999))[:50_000], "unexpected end of data"),
        (packed_tar(other=b""), "it lacks data_batch_1.bin, data_batch_2.bin"),
        (
            packed_tar(data_batch_2=b"short"),
            "to have MD5 5ea93a67294ea407fff1d09f752e9692, got 4f09daa9d95bcb16",
        ),
    ],
    ids=["empty", "not tar", "truncated", "member", "content"],
)
def test_damaged_tar_file_is_reported(
    load_damaged: Callable[..., str], data: bytes, why: str
) -> None:
    assert why in load_damaged(load_cifar10, "cifar10/cifar-10-binary.tar.gz", data)


def test_truncated_xz_file_is_reported(
    load_damaged: Callable[..., str], folder: Path, data_folder: Path
) -> None:
    whole = data_folder / "cifar10/cifar-10-batches-bin.tar.xz"
    if not whole.is_file():
        pytest.skip(f"{whole} does not exist")
    (folder / "cifar10/cifar-10-binary.tar.gz").unlink()
    with whole.open("rb") as file:
        begin = file.read(1_000_000)
    load_damaged(load_cifar10, "cifar10/cifar-10-batches-bin.tar.xz", begin)


def test_cifar10_has_its_known_content(cifar10: Images) -> None:
    assert cifar10.train_x.shape == (50_000, 3, 32, 32)
    assert cifar10.test_x.shape == (10_000, 3, 32, 32)
    assert cifar10.train_y[:10].tolist() == [6, 9, 9, 4, 1, 1, 2, 7, 8, 3]  # the first is a frog
    assert cifar10.test_y[:10].tolist() == [3, 8, 8, 0, 6, 6, 1, 6, 3, 1]
    assert cifar10.train_y.bincount().tolist() == [5_000] * 10
    assert cifar10.test_y.bincount().tolist() == [1_000] * 10
    assert cifar10.train_x[0, :, 0, 0].tolist() == [59, 62, 63]


def test_ships_are_bluer_than_frogs(cifar10: Images) -> None:
    """So labels belong to their images, and channels are in order."""
    frog, ship = (
        cifar10.train_x[cifar10.train_y == label].float().mean((0, 2, 3)) for label in (6, 8)
    )
    assert ship[2] > frog[2] + 25
