# SPDX-License-Identifier: BSD-3-Clause
"""GoogLeNet: image sizes, and cost."""

import pytest
import torch

from paceline.lab.models.googlenet import GoogLeNet, SmallGoogLeNet


def test_published_network_takes_images_of_224():
    with torch.device("meta"):
        assert GoogLeNet()(torch.zeros(2, 3, 224, 224)).shape == (2, 1000)


@pytest.mark.parametrize("size", [32, 64])
def test_small_network_takes_both_image_sizes(size):
    assert SmallGoogLeNet(20, 0.125)(torch.zeros(2, 3, size, size)).shape == (2, 20)


def test_multiplications_are_as_documented(multiplications):
    found = multiplications(SmallGoogLeNet(), torch.zeros(1, 3, 64, 64))
    assert found == pytest.approx(25.3e6, rel=0.02)
