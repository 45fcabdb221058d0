# SPDX-License-Identifier: BSD-3-Clause
"""Tiny-ImageNet has its known content, and damaged files are reported."""

import io
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from PIL import Image

from paceline.errors import SpecError
from paceline.lab.data.images import Images
from paceline.lab.data.tiny_imagenet import TWENTY, load_tiny_imagenet

FIRST = "train/n1/images/n1_0.JPEG"


def packed_zip(members: Mapping[str, bytes]) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name, data in members.items():
            archive.writestr(f"tiny-imagenet-200/{name}", data)
    return file.getvalue()


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
        (
            packed_zip(LISTS | {FIRST: jpeg(32)}),
            "images/n1_0.JPEG to have 64 x 64 pixels, got 32 x 32",
        ),
        (packed_zip(LISTS).replace(b"n1\n", b"n2\n"), "Bad CRC-32 for file"),
    ],
    ids=["empty", "truncated", "lists", "image", "not jpeg", "torn jpeg", "size", "checksum"],
)
def test_damaged_zip_file_is_reported(
    load_damaged: Callable[..., str], data: bytes, why: str
) -> None:
    def load(folder: Path) -> Images:
        return load_tiny_imagenet(folder, classes=1)

    assert why in load_damaged(load, "tiny-imagenet/tiny-imagenet-200.zip", data)


def test_tiny_imagenet_has_its_known_content(tiny_imagenet: Images) -> None:
    assert tiny_imagenet.train_x.shape == (10_000, 3, 64, 64)
    assert tiny_imagenet.test_x.shape == (1_000, 3, 64, 64)
    assert tiny_imagenet.classes == len(TWENTY) == 20
    assert tiny_imagenet.train_y.bincount().tolist() == [500] * 20
    assert tiny_imagenet.test_y.bincount().tolist() == [50] * 20
    assert tiny_imagenet.train_y.tolist() == sorted(tiny_imagenet.train_y.tolist())
    # The first test image is val_8, a school bus.
    assert TWENTY[tiny_imagenet.test_y[0]] == "n04146614"


def test_grey_photographs_have_equal_channels(tiny_imagenet: Images) -> None:
    both = torch.cat((tiny_imagenet.train_x, tiny_imagenet.test_x)).flatten(2)
    is_grey = (both[:, 0] == both[:, 1]).all(1) & (both[:, 1] == both[:, 2]).all(1)
    assert int(is_grey.sum()) == 262  # 241 of them have one channel in their file


def test_labels_mean_the_same_in_training_and_test_set(tiny_imagenet: Images) -> None:
    """Classes differ in their mean colours, in the same way in both sets."""
    halves = (
        (tiny_imagenet.train_x, tiny_imagenet.train_y),
        (tiny_imagenet.test_x, tiny_imagenet.test_y),
    )
    colours = [
        torch.cat([x[y == label].float().mean((0, 2, 3)) for label in range(20)]) for x, y in halves
    ]
    assert torch.corrcoef(torch.stack(colours))[0, 1] > 0.9


def test_number_of_classes_selects_the_first_by_name(
    data_folder: Path, tiny_imagenet: Images
) -> None:
    few = load_tiny_imagenet(data_folder, classes=1)
    assert few.classes == 1
    assert torch.equal(few.train_x, tiny_imagenet.train_x[:500])
    named = load_tiny_imagenet(data_folder, classes=[TWENTY[0]])
    assert torch.equal(named.test_x, tiny_imagenet.test_x[tiny_imagenet.test_y == 0])


@pytest.mark.parametrize(
    ("classes", "message"),
    [
        (0, "classes must be from 1 to"),
        (201, "classes must be from 1 to"),
        (["n00000000"], "class n00000000 is not among the"),
    ],
)
def test_unknown_classes_are_refused(
    data_folder: Path, tiny_imagenet: Images, classes: int | list[str], message: str
) -> None:
    with pytest.raises(SpecError, match=message):
        load_tiny_imagenet(data_folder, classes=classes)
