# SPDX-License-Identifier: BSD-3-Clause
"""Tiny-ImageNet as a problem: downscaling, and losses that are the same alone and together."""

import pytest
import torch

from paceline.lab.problem import Draw
from paceline.lab.problems.tiny_imagenet import Tiny, halved


def test_downscaled_pixel_is_the_mean_of_four():
    image = torch.tensor([[[[0, 1, 255, 255], [2, 4, 255, 255]]]], dtype=torch.uint8)
    assert halved(image).tolist() == [[[[2, 255]]]]
    assert halved(image).dtype == torch.uint8


@pytest.mark.parametrize("model", ["alexnet", "googlenet"])
def test_losses_are_the_same_alone_and_together(tiny_imagenet, data_folder, data_cache, model):
    problem = Tiny(batch=2, data=data_folder, cache=data_cache, model=model, width=0.25)
    assert problem.samples == len(tiny_imagenet.train_y)
    net = problem.build()
    draws = [Draw(0, 0), Draw(3, 1), Draw(1, 7)]
    alone = torch.cat([problem.losses(net, [draw]) for draw in draws])
    assert torch.allclose(problem.losses(net, draws), alone, atol=1e-4)
    assert len(set(alone.tolist())) == 3
