# SPDX-License-Identifier: BSD-3-Clause
"""Random augmentation of images, and normalization of bytes to floats.

Each function handles a whole batch, made of several draws in order, in a few microseconds per
image. Every draw has its own random numbers, and nothing mixes images: a draw gets the same pixels
no matter which others it is computed with.
"""

from collections.abc import Sequence
from math import radians

import numpy as np
import torch
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from paceline.lab.data.sampling import augmentation_rng
from paceline.lab.problem import Draw

__all__ = ["normalize", "rotate_and_zoom", "shift_and_flip"]


def normalize(x: Tensor, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """Return bytes as float32 with zero mean and unit variance; in `mean` and `std`, white is 1."""
    shape = (len(mean), 1, 1)
    shift, scale = torch.tensor(mean).view(shape) * 255, torch.tensor(std).view(shape) * 255
    return x.to(torch.float32, copy=True).sub_(shift).div_(scale)


def shift_and_flip(x: Tensor, seed: int, draws: Sequence[Draw], shift: int = 4) -> Tensor:
    """Shift images by up to `shift` pixels in each direction, and mirror half of them.

    Pixels from outside the image are black.
    """
    numbers = _uniform(seed, draws, len(x), 3)
    count, channels, height, width = x.shape
    padded = np.zeros((count, channels, height + 2 * shift, width + 2 * shift), np.uint8)
    padded[:, :, shift : shift + height, shift : shift + width] = x.numpy()
    windows = sliding_window_view(padded, (height, width), axis=(2, 3))
    top, left = (numbers[:, :2] * (2 * shift + 1)).astype(np.intp).T
    out = windows[np.arange(count), :, top, left]
    is_flipped = numbers[:, 2] < 0.5
    out[is_flipped] = out[is_flipped][..., ::-1]
    return torch.from_numpy(out)


def rotate_and_zoom(
    x: Tensor, seed: int, draws: Sequence[Draw], degrees: float = 10.0, zoom: float = 0.1
) -> Tensor:
    """Rotate square images by up to `degrees` either way, and zoom in or out by up to `zoom`.

    Pixels from outside the image are black. Returns float32 on the scale of the bytes.
    """
    turn, size = (2 * _uniform(seed, draws, len(x), 2) - 1).T
    angle, scale = radians(degrees) * turn, 1 / (1 + zoom * size)
    # The source of each pixel is the sum of two fixed maps. affine_grid, which multiplies
    # matrices, takes five times as long as this whole function.
    side = x.shape[-1]
    axis = (torch.arange(side) * 2 + 1) / side - 1
    down, right = torch.meshgrid(axis, axis, indexing="ij")
    straight, across = torch.stack((right, down), -1), torch.stack((-down, right), -1)
    grid = (_column(np.cos(angle) * scale) * straight).add_(_column(np.sin(angle) * scale) * across)
    return functional.grid_sample(x.float(), grid, align_corners=False)


def _uniform(seed: int, draws: Sequence[Draw], images: int, columns: int) -> NDArray[np.float64]:
    """Return random numbers from 0 to 1 for each image, from the generator of its draw."""
    assert images % len(draws) == 0, "draws must have the same size"
    shape = (images // len(draws), columns)
    return np.concatenate([augmentation_rng(seed, draw).random(shape) for draw in draws])


def _column(values: NDArray[np.float64]) -> Tensor:
    """Return one factor per image, in a shape that broadcasts over pixels."""
    return torch.from_numpy(values.astype(np.float32)).view(-1, 1, 1, 1)
