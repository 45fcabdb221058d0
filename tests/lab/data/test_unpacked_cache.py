# SPDX-License-Identifier: BSD-3-Clause
"""Unpacked data is cached, and unpacked again if the cache is damaged."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from disk import small_disk
from paceline.lab.data.unpacked_cache import cached


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    """A packed file."""
    path = tmp_path / "packed"
    path.write_text("3")
    return path


class Unpacker:
    """Unpacks a file and counts how often."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.times = 0

    def __call__(self) -> dict[str, Tensor]:
        self.times += 1
        return {"x": torch.arange(int(self._path.read_text()))}


def test_data_is_unpacked_once(tmp_path: Path, packed: Path) -> None:
    unpack = Unpacker(packed)
    for _ in range(3):
        assert cached(tmp_path / "cache", "set", packed, unpack)["x"].tolist() == [0, 1, 2]
    assert unpack.times == 1
    assert len(list((tmp_path / "cache").iterdir())) == 1


def test_nothing_is_cached_without_a_folder(packed: Path) -> None:
    unpack = Unpacker(packed)
    for _ in range(2):
        assert cached(None, "set", packed, unpack)["x"].tolist() == [0, 1, 2]
    assert unpack.times == 2


def test_changed_file_is_unpacked_again(tmp_path: Path, packed: Path) -> None:
    unpack = Unpacker(packed)
    cached(tmp_path / "cache", "set", packed, unpack)
    packed.write_text("12")
    assert len(cached(tmp_path / "cache", "set", packed, unpack)["x"]) == 12
    assert unpack.times == 2


@pytest.mark.parametrize("keep", [0, 1, 100, -1])
def test_damaged_cache_entry_is_replaced(tmp_path: Path, packed: Path, keep: int) -> None:
    unpack = Unpacker(packed)
    cached(tmp_path / "cache", "set", packed, unpack)
    [kept] = (tmp_path / "cache").iterdir()
    kept.write_bytes(kept.read_bytes()[:keep])
    for _ in range(2):
        assert cached(tmp_path / "cache", "set", packed, unpack)["x"].tolist() == [0, 1, 2]
    assert unpack.times == 2


def test_writing_to_cached_tensors_does_not_change_the_cache(tmp_path: Path, packed: Path) -> None:
    for _ in range(3):
        found = cached(tmp_path / "cache", "set", packed, Unpacker(packed))["x"]
        assert found.tolist() == [0, 1, 2]
        found.add_(1)


def test_unwritable_cache_folder_is_ignored(tmp_path: Path, packed: Path) -> None:
    assert cached(packed / "cache", "set", packed, Unpacker(packed))["x"].tolist() == [0, 1, 2]


def test_full_disk_is_ignored(tmp_path: Path, packed: Path) -> None:
    packed.write_text("300000")
    with small_disk(tmp_path / "disk", "1m") as disk:
        found = cached(disk.path / "cache", "set", packed, Unpacker(packed))
        assert len(found["x"]) == 300_000
        assert list((disk.path / "cache").iterdir()) == []


def test_two_processes_can_unpack_at_once(tmp_path: Path, packed: Path) -> None:
    """While one unpacks, another starts and finishes."""

    def unpack() -> dict[str, Tensor]:
        return cached(tmp_path / "cache", "set", packed, Unpacker(packed))

    assert cached(tmp_path / "cache", "set", packed, unpack)["x"].tolist() == [0, 1, 2]
    assert len(list((tmp_path / "cache").iterdir())) == 1
