# SPDX-License-Identifier: BSD-3-Clause
"""PixelCNN: which values depend on which, and that probabilities sum to one."""

import pytest
import torch

from paceline.lab.models.pixelcnn import PixelCnn, bits_per_dimension, log_probabilities

SIZE = 5


def setting():
    """Return a model in double precision that sees all of a small image, and an image."""
    torch.manual_seed(0)
    model = PixelCnn(width=8, layers=4, mixtures=2).double()
    return model, torch.randint(256, (1, 3, SIZE, SIZE), dtype=torch.uint8)


def changed_one_by_one(image):
    """Return one copy of the image per value, each with that value changed, in order."""
    order = [(row, column, c) for row in range(SIZE) for column in range(SIZE) for c in range(3)]
    others = image.repeat(len(order), 1, 1, 1)
    for other, (row, column, c) in zip(others, order, strict=True):
        other[c, row, column] ^= 64
    return others


def in_order(numbers):
    """Reorder [B, 3, H, W] to [B, values]: by row, from left to right, then R, G, B."""
    return numbers.permute(0, 2, 3, 1).flatten(1)


@torch.no_grad()
def test_value_depends_on_earlier_values_only():
    model, image = setting()
    others = changed_one_by_one(image)
    before = in_order(log_probabilities(model(image), image))
    after = in_order(log_probabilities(model(others), others))
    depends = (after - before).abs() > 1e-13  # [changed value, predicted value]
    changed = torch.arange(len(others))
    # A change affects the probability of the value itself and of all later ones: no blind spot.
    expected = changed[:, None] <= changed[None, :]
    torch.testing.assert_close(depends, expected)


@torch.no_grad()
def test_outputs_for_a_pixel_depend_on_earlier_pixels_only():
    model, image = setting()
    outputs = model(image)
    differs = (model(changed_one_by_one(image)) != outputs).any(1)
    pixel = torch.arange(SIZE * SIZE)
    expected = pixel.repeat_interleave(3)[:, None] < pixel[None, :]
    torch.testing.assert_close(differs.flatten(1), expected)


@torch.no_grad()
@pytest.mark.parametrize("channel", [0, 1, 2])
def test_probabilities_sum_to_one(channel):
    torch.manual_seed(1)
    outputs = 3 * torch.randn(1, 20, 2, 2, dtype=torch.double)
    images = torch.randint(256, (1, 3, 2, 2), dtype=torch.uint8).repeat(256, 1, 1, 1)
    images[:, channel] = torch.arange(256, dtype=torch.uint8)[:, None, None]
    chances = log_probabilities(outputs.expand(256, -1, -1, -1), images)[:, channel].exp()
    torch.testing.assert_close(chances.sum(0), torch.ones(2, 2, dtype=torch.double))


@torch.no_grad()
def test_bits_per_dimension_are_the_mean_over_values():
    model, image = setting()
    chances = log_probabilities(model(image), image)
    bits = -chances.sum() / torch.tensor(2.0).log() / image.numel()
    torch.testing.assert_close(bits_per_dimension(model, image), bits[None].double())


def test_sharp_and_distant_distributions_have_finite_gradients():
    images = torch.tensor([0, 1, 127, 254, 255], dtype=torch.uint8).expand(1, 3, 1, 5)
    outputs = torch.zeros(1, 10, 1, 5)
    outputs[:, 1:4] = 30.0  # the means are far away
    outputs[:, 4:7] = -50.0  # and very sharp
    outputs.requires_grad_()
    log_probabilities(outputs, images).sum().backward()
    assert outputs.grad.isfinite().all()


@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (16, 16), (32, 32)])
@torch.no_grad()
def test_images_of_any_size_are_accepted(shape):
    images = torch.zeros(2, 3, *shape, dtype=torch.uint8)
    assert bits_per_dimension(PixelCnn(width=4, layers=2), images).shape == (2,)
