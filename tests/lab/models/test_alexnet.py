# SPDX-License-Identifier: BSD-3-Clause
"""AlexNet: image sizes, and cost."""

import pytest
import torch

from paceline.lab.models.alexnet import AlexNet, SmallAlexNet


def test_published_network_takes_images_of_224():
    with torch.device("meta"):
        assert AlexNet()(torch.zeros(2, 3, 224, 224)).shape == (2, 1000)


@pytest.mark.parametrize("size", [32, 64])
def test_small_network_takes_both_image_sizes(size):
    assert SmallAlexNet(20, size, 0.25)(torch.zeros(2, 3, size, size)).shape == (2, 20)


def test_multiplications_are_as_documented(multiplications):
    found = multiplications(SmallAlexNet(), torch.zeros(1, 3, 64, 64))
    assert found == pytest.approx(25.8e6, rel=0.02)


def test_width_scales_the_network(parameter_counts):
    half, one, two = parameter_counts(SmallAlexNet, 0.5, 1.0, 2.0)
    assert two > 3 * one
    assert one > 3 * half
