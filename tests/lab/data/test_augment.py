# SPDX-License-Identifier: BSD-3-Clause
"""Augmented images are the same alone and together, and stay within the limits."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from paceline.lab.data.augment import normalize, rotate_and_zoom, shift_and_flip
from paceline.lab.data.images import Images
from paceline.lab.problem import Draw

DRAWS = [Draw(2, 9), Draw(0, 0), Draw(5, 1), Draw(2, 10)]


def noise(count: int, channels: int, side: int) -> Tensor:
    generator = torch.Generator().manual_seed(count)
    shape = (count, channels, side, side)
    return torch.randint(256, shape, dtype=torch.uint8, generator=generator)


@pytest.mark.parametrize("batch", [1, 3, 32])
@pytest.mark.parametrize("change", [shift_and_flip, rotate_and_zoom])
def test_pixels_are_the_same_alone_and_together(
    change: Callable[[Tensor, int, list[Draw]], Tensor], batch: int
) -> None:
    x = noise(4 * batch, 3, 28)
    together = change(x, 1, DRAWS).split(batch)
    for index, draw in enumerate(DRAWS):
        assert torch.equal(change(x.split(batch)[index], 1, [draw]), together[index])


@pytest.mark.parametrize("change", [shift_and_flip, rotate_and_zoom])
def test_pixels_differ_by_seed_and_draw(
    change: Callable[[Tensor, int, list[Draw]], Tensor],
) -> None:
    x = noise(8, 1, 28)
    results = [
        change(x, seed, [draw]) for seed, draw in ((1, DRAWS[0]), (2, DRAWS[0]), (1, DRAWS[1]))
    ]
    assert not torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2])


@pytest.mark.parametrize("change", [shift_and_flip, rotate_and_zoom])
def test_inputs_are_not_modified(
    change: Callable[[Tensor, int, list[Draw]], Tensor],
) -> None:
    x = noise(8, 3, 28)
    before = x.clone()
    normalize(change(x, 1, [DRAWS[0]]), (0.5,) * 3, (0.5,) * 3)
    normalize(x, (0.5,) * 3, (0.5,) * 3)
    assert torch.equal(x, before)


def test_every_shift_and_flip_is_equally_likely() -> None:
    """One bright pixel off the centre appears equally often wherever a shift can put it."""
    x = torch.zeros(20_000, 2, 7, 9, dtype=torch.uint8)
    x[:, :, 3, 3] = 200
    seen = shift_and_flip(x, 0, DRAWS, shift=2)
    assert seen.dtype == torch.uint8
    assert seen.sum((2, 3)).unique().tolist() == [200]
    assert torch.equal(seen[:, 0], seen[:, 1])  # channels move together
    where = seen[:, 0].gt(0).float().mean(0)
    plain = torch.zeros(7, 9)
    plain[1:6, 1:6] += 1 / 50  # not mirrored: two either way of the third column
    plain[1:6, 3:8] += 1 / 50  # mirrored: of the fifth
    assert torch.allclose(where, plain, atol=0.006)
    assert torch.equal(where > 0, plain > 0)


def test_pixels_from_outside_are_black() -> None:
    x = torch.full((64, 1, 8, 8), 255, dtype=torch.uint8)
    shifted = shift_and_flip(x, 0, [DRAWS[0]])
    turned = rotate_and_zoom(x, 0, [DRAWS[0]], degrees=45, zoom=0.0)
    assert shifted.unique().tolist() == [0, 255]
    assert turned[:, :, 0, 0].min() == 0
    assert turned[:, :, 3:5, 3:5].min() > 254


def test_rotation_and_zoom_of_zero_change_nothing() -> None:
    x = noise(8, 3, 28)
    same = rotate_and_zoom(x, 0, DRAWS, degrees=0.0, zoom=0.0)
    assert same.dtype == torch.float32
    assert torch.allclose(same, x.float(), atol=0.01)


def disc(side: int, x: float, y: float, radius: float) -> Tensor:
    axis = (torch.arange(side) * 2 + 1) / side - 1
    return ((axis[None] - x) ** 2 + (axis[:, None] - y) ** 2 < radius**2) * 255.0


def centre(image: Tensor) -> complex:
    """Return the centre of brightness, in coordinates from -1 to 1."""
    axis = (torch.arange(image.shape[-1]) * 2 + 1) / image.shape[-1] - 1
    right, down = image.sum(0) @ axis / image.sum(), image.sum(1) @ axis / image.sum()
    return complex(float(right), float(down))


def test_angles_stay_within_both_bounds() -> None:
    x = disc(64, 0.6, 0.0, 0.2).to(torch.uint8).expand(200, 1, 64, 64)
    turned = rotate_and_zoom(x, 0, DRAWS, degrees=10, zoom=0.0)[:, 0]
    heights = torch.tensor([centre(image).imag for image in turned]) / 0.6
    assert 0.15 < heights.max() < 0.178  # the sine of 10 degrees is 0.174
    assert -0.178 < heights.min() < -0.15
    assert abs(heights.mean()) < 0.03


def test_zooms_stay_within_both_bounds() -> None:
    x = disc(64, 0.0, 0.0, 0.5).to(torch.uint8).expand(200, 1, 64, 64)
    zoomed = rotate_and_zoom(x, 0, DRAWS, degrees=10, zoom=0.1)[:, 0]
    sizes = (zoomed.sum((1, 2)) / x[0, 0].sum()).sqrt()
    assert 1.08 < sizes.max() < 1.11
    assert 0.89 < sizes.min() < 0.92


def test_augmented_digit_stays_similar(mnist: Images) -> None:
    x = mnist.train_x[:100]
    changed = rotate_and_zoom(x, 0, DRAWS)
    plain = torch.nn.functional.cosine_similarity(changed.flatten(1), x.float().flatten(1))
    assert plain.min() > 0.5
    assert plain.mean() > 0.85


def test_normalized_images_have_zero_mean_and_unit_variance(cifar10: Images) -> None:
    x = cifar10.train_x[:5_000]
    mean, std = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
    ready = normalize(x, mean, std)
    assert ready.dtype == torch.float32
    assert ready.mean((0, 2, 3)).abs().max() < 0.03
    assert (ready.std((0, 2, 3)) - 1).abs().max() < 0.03
    assert ready[0, 2, 0, 0] == pytest.approx((63 / 255 - 0.4465) / 0.2616)


def test_normalize_accepts_floats() -> None:
    x = noise(4, 1, 28)
    assert torch.equal(normalize(x, (0.13,), (0.31,)), normalize(x.float(), (0.13,), (0.31,)))
