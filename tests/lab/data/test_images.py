# SPDX-License-Identifier: BSD-3-Clause
"""All image data sets have the same form, and the mean and deviation that they state."""

import pytest
import torch
from torch import Tensor

from paceline.lab.data import cifar10 as cifar10_module
from paceline.lab.data import mnist as mnist_module
from paceline.lab.data import tiny_imagenet as tiny_imagenet_module
from paceline.lab.data.images import Images

MODULES = {
    "mnist": mnist_module,
    "cifar10": cifar10_module,
    "tiny_imagenet": tiny_imagenet_module,
}


def counts(labels: Tensor) -> list[int]:
    """Return how often each label occurs."""
    found: list[int] = labels.bincount().tolist()
    return found


@pytest.mark.parametrize("name", MODULES)
def test_images_are_bytes_and_labels_are_below_the_number_of_classes(
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
def test_mean_and_deviation_are_those_of_the_training_images(
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
