# SPDX-License-Identifier: BSD-3-Clause
"""The real data sets are what their owners say: how many, how large, how bright, how labelled."""

import gzip
import hashlib
from pathlib import Path

import pytest
import torch
from torch import Tensor

from paceline.errors import SpecError
from paceline.lab.data import a9a as a9a_module
from paceline.lab.data import cifar10 as cifar10_module
from paceline.lab.data import mnist as mnist_module
from paceline.lab.data import tiny_imagenet as tiny_imagenet_module
from paceline.lab.data.a9a import Table
from paceline.lab.data.files import locate
from paceline.lab.data.images import Images
from paceline.lab.data.text import Text
from paceline.lab.data.tiny_imagenet import TWENTY, load_tiny_imagenet

MODULES = {
    "mnist": mnist_module,
    "cifar10": cifar10_module,
    "tiny_imagenet": tiny_imagenet_module,
}


def counts(labels: Tensor) -> list[int]:
    """How many there are of each label."""
    found: list[int] = labels.bincount().tolist()
    return found


@pytest.mark.parametrize("name", MODULES)
def test_images_are_bytes_in_torch_s_order_and_labels_are_below_the_classes(
    name: str, request: pytest.FixtureRequest
) -> None:
    images: Images = request.getfixturevalue(name)
    for x, y in ((images.train_x, images.train_y), (images.test_x, images.test_y)):
        assert (x.dtype, y.dtype) == (torch.uint8, torch.int64)
        assert x.dim() == 4
        assert x.is_contiguous()
        assert len(x) == len(y)
        assert len(counts(y)) == images.classes
        assert (int(x.min()), int(x.max())) == (0, 255)


@pytest.mark.parametrize("name", MODULES)
def test_mean_and_deviation_are_those_of_the_images_to_train_on(
    name: str, request: pytest.FixtureRequest
) -> None:
    images: Images = request.getfixturevalue(name)
    for channel, pixels in enumerate(images.train_x.unbind(1)):
        seen = counts(pixels.flatten())
        total, values = pixels.numel(), range(len(seen))
        mean = sum(n * v for n, v in zip(seen, values, strict=True)) / total
        variance = sum(n * v * v for n, v in zip(seen, values, strict=True)) / total - mean**2
        assert mean / 255 == pytest.approx(MODULES[name].MEAN[channel], abs=1e-4)
        assert variance**0.5 / 255 == pytest.approx(MODULES[name].STD[channel], abs=1e-4)


def test_mnist_is_mnist(mnist: Images) -> None:
    assert mnist.train_x.shape == (60_000, 1, 28, 28)
    assert mnist.test_x.shape == (10_000, 1, 28, 28)
    assert mnist.train_y[:10].tolist() == [5, 0, 4, 1, 9, 2, 1, 3, 1, 4]
    assert mnist.test_y[:10].tolist() == [7, 2, 1, 0, 4, 1, 4, 9, 5, 9]
    assert counts(mnist.train_y) == [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
    assert counts(mnist.test_y) == [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]
    assert int(mnist.train_x[0].sum()) == 27_525


def test_a_digit_stands_upright_in_the_middle(mnist: Images) -> None:
    ones = mnist.train_x[mnist.train_y == 1].float().mean(0)[0]
    assert ones[:3].max() < 0.5  # an empty edge
    assert ones.sum(0).argmax() in (13, 14)  # one bright column


def test_cifar10_is_cifar10(cifar10: Images) -> None:
    assert cifar10.train_x.shape == (50_000, 3, 32, 32)
    assert cifar10.test_x.shape == (10_000, 3, 32, 32)
    assert cifar10.train_y[:10].tolist() == [6, 9, 9, 4, 1, 1, 2, 7, 8, 3]  # a frog is the first
    assert cifar10.test_y[:10].tolist() == [3, 8, 8, 0, 6, 6, 1, 6, 3, 1]
    assert counts(cifar10.train_y) == [5_000] * 10
    assert counts(cifar10.test_y) == [1_000] * 10
    assert cifar10.train_x[0, :, 0, 0].tolist() == [59, 62, 63]


def test_ships_are_bluer_than_frogs(cifar10: Images) -> None:
    """So that labels belong to their images, and colours are in their order."""
    frog, ship = (
        cifar10.train_x[cifar10.train_y == label].float().mean((0, 2, 3)) for label in (6, 8)
    )
    assert ship[2] > frog[2] + 25


def test_tiny_imagenet_has_the_twenty_classes(tiny_imagenet: Images) -> None:
    assert tiny_imagenet.train_x.shape == (10_000, 3, 64, 64)
    assert tiny_imagenet.test_x.shape == (1_000, 3, 64, 64)
    assert tiny_imagenet.classes == len(TWENTY) == 20
    assert counts(tiny_imagenet.train_y) == [500] * 20
    assert counts(tiny_imagenet.test_y) == [50] * 20
    assert tiny_imagenet.train_y.tolist() == sorted(tiny_imagenet.train_y.tolist())
    # The first to test on is val_8, a school bus.
    assert TWENTY[tiny_imagenet.test_y[0]] == "n04146614"


def test_grey_photographs_have_all_their_colours_alike(tiny_imagenet: Images) -> None:
    both = torch.cat((tiny_imagenet.train_x, tiny_imagenet.test_x)).flatten(2)
    is_grey = (both[:, 0] == both[:, 1]).all(1) & (both[:, 1] == both[:, 2]).all(1)
    assert int(is_grey.sum()) == 262  # of these 241 have one channel in their file


def test_labels_mean_the_same_in_both_halves_of_tiny_imagenet(tiny_imagenet: Images) -> None:
    """Classes differ in their mean colours, and are then as different among the others."""
    halves = (
        (tiny_imagenet.train_x, tiny_imagenet.train_y),
        (tiny_imagenet.test_x, tiny_imagenet.test_y),
    )
    colours = [
        torch.cat([x[y == label].float().mean((0, 2, 3)) for label in range(20)]) for x, y in halves
    ]
    assert torch.corrcoef(torch.stack(colours))[0, 1] > 0.9


def test_a_few_classes_of_tiny_imagenet_are_the_first_by_name(
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
        (0, "classes must be from 1 to the"),
        (201, "classes must be from 1 to the"),
        (["n00000000"], "there is no class n00000000 in this Tiny-ImageNet"),
    ],
)
def test_classes_that_are_not_there_are_refused(
    data_folder: Path, tiny_imagenet: Images, classes: int | list[str], message: str
) -> None:
    with pytest.raises(SpecError, match=message):
        load_tiny_imagenet(data_folder, classes=classes)


def test_shakespeare_is_read_letter_by_letter(shakespeare: Text) -> None:
    assert (len(shakespeare.train), len(shakespeare.test)) == (1_003_854, 111_540)
    assert len(shakespeare.symbols) == 65
    assert shakespeare.symbols.startswith("\n !$&',-.3:;?ABC")
    first = "".join(shakespeare.symbols[code] for code in shakespeare.train[:45])
    assert first == "First Citizen:\nBefore we proceed any further,"
    last = "".join(shakespeare.symbols[code] for code in shakespeare.test[-17:])
    assert last == "Whiles thou art waking.\n"[-17:]


def test_a9a_is_the_census(a9a: Table) -> None:
    assert a9a.train_x.shape == (32_561, 123)
    assert a9a.test_x.shape == (16_281, 123)
    assert a9a.train_x.dtype == a9a.train_y.dtype == torch.float32
    assert a9a.train_x.unique().tolist() == [0.0, 1.0]
    assert a9a.train_y.unique().tolist() == [-1.0, 1.0]
    assert (int((a9a.train_y > 0).sum()), int((a9a.test_y > 0).sum())) == (7_841, 3_846)
    first = (a9a.train_x[0].nonzero().flatten() + 1).tolist()
    assert first == [3, 11, 14, 19, 39, 42, 55, 64, 67, 73, 75, 76, 80, 83]


@pytest.mark.parametrize("source", a9a_module.SOURCES, ids=lambda source: str(source.path))
def test_a9a_at_hand_is_the_official_text_but_for_spaces_at_line_ends(
    data_folder: Path, a9a: Table, source: a9a_module.Source
) -> None:
    path = locate(data_folder, source)
    text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    official = b"".join(line.rstrip() + b" \n" for line in text.splitlines())
    assert hashlib.sha256(official).hexdigest() == source.sha256
