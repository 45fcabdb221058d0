# SPDX-License-Identifier: BSD-3-Clause
"""Density modelling with PixelCNN: what the model sees, and its scores."""

import pytest
import torch

from paceline.lab.problem import Draw
from paceline.lab.problems.pixelcnn import Pixels


@pytest.fixture
def small(cifar10, data_folder, data_cache):
    del cifar10
    return Pixels(batch=2, data=data_folder, cache=data_cache, side=4, width=4, layers=2, scored=7)


def test_model_sees_the_middle_of_an_image(small):
    images = torch.arange(32 * 32).view(1, 1, 32, 32)
    assert small.middle(images)[0, 0, 0].tolist() == [14 * 32 + column for column in range(14, 18)]
    assert small.middle(images).shape == (1, 1, 4, 4)


def test_losses_are_the_same_alone_and_together(small):
    model = small.build()
    draws = [Draw(0, 0), Draw(3, 1), Draw(1, 7)]
    alone = torch.cat([small.losses(model, [draw]) for draw in draws])
    assert torch.allclose(small.losses(model, draws), alone, atol=1e-4)
    assert len(set(alone.tolist())) == 3


def test_bits_are_the_mean_over_the_scored_images(small, monkeypatch):
    model = small.build()
    with torch.no_grad():
        at_once = small.evaluate(model)["bits"]
        monkeypatch.setattr("paceline.lab.problems.pixelcnn.SCORED_AT_ONCE", 3)
        assert small.evaluate(model)["bits"] == pytest.approx(at_once)
