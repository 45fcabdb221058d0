# SPDX-License-Identifier: BSD-3-Clause
"""Images changed a little each time that they are drawn, and bytes made into numbers to compute on.

A whole batch at once, of several draws in their order, at a few microseconds for each image. The
random numbers are each draw's own, and nothing here mixes images: a draw has the same pixels
whatever it is computed together with.
"""

from collections.abc import Sequence
from math import radians

import numpy as np
import torch
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from paceline.lab.data.draws import rng
from paceline.lab.problem import Draw

__all__ = ["normalize", "rotate_and_zoom", "shift_and_flip"]


def normalize(x: Tensor, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """Bytes as float32 with about zero mean and unit variance; `mean`, `std`: white being 1."""
    shape = (len(mean), 1, 1)
    shift, scale = torch.tensor(mean).view(shape) * 255, torch.tensor(std).view(shape) * 255
    return x.to(torch.float32, copy=True).sub_(shift).div_(scale)


def shift_and_flip(x: Tensor, seed: int, draws: Sequence[Draw], shift: int = 4) -> Tensor:
    """Move images by up to `shift` pixels either way, over black, and mirror half of them."""
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
    """Turn square images by up to `degrees` either way, and enlarge or shrink by up to `zoom`.

    What comes from outside is black. The values are float32, of the scale of the bytes.
    """
    turn, size = (2 * _uniform(seed, draws, len(x), 2) - 1).T
    angle, scale = radians(degrees) * turn, 1 / (1 + zoom * size)
    # Where each pixel comes from is the sum of two fixed maps. affine_grid, which multiplies
    # matrices, takes five times as long as all of this.
    side = x.shape[-1]
    axis = (torch.arange(side) * 2 + 1) / side - 1
    down, right = torch.meshgrid(axis, axis, indexing="ij")
    straight, across = torch.stack((right, down), -1), torch.stack((-down, right), -1)
    grid = (_column(np.cos(angle) * scale) * straight).add_(_column(np.sin(angle) * scale) * across)
    return functional.grid_sample(x.float(), grid, align_corners=False)


def _uniform(seed: int, draws: Sequence[Draw], images: int, columns: int) -> NDArray[np.float64]:
    """Random numbers from 0 to 1 for each image, of the draw that it belongs to."""
    assert images % len(draws) == 0, "draws are of one size"
    shape = (images // len(draws), columns)
    return np.concatenate([rng(seed, draw).random(shape) for draw in draws])


def _column(values: NDArray[np.float64]) -> Tensor:
    """A factor for each image."""
    return torch.from_numpy(values.astype(np.float32)).view(-1, 1, 1, 1)
