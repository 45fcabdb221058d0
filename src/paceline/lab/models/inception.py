# SPDX-License-Identifier: BSD-3-Clause
"""A small Inception network for 32x32 colour images, after BN-Inception (Ioffe and Szegedy 2015).

A module has four branches: 1x1; 1x1 and 3x3; 1x1, 3x3 and 3x3; a pool and 1x1. Batch norm and ReLU
follow each convolution. A reduction halves the grid: its two branches with 3x3 end with stride 2,
and a max-pool passes the input on. BN-Inception has grids of 28x28, 14x14 and 7x7; this network has
16x16, 8x8 and 4x4, five modules instead of ten, and about a tenth of the channels. One thread of a
current CPU computes a gradient in about half a millisecond per image.

The default has 82,922 parameters (10 classes) and needs 2.6 million multiplications per image.
"""

import torch
from torch import Tensor, nn

from paceline.lab.models.normalization import BatchNorm

__all__ = ["Inception"]


class Inception(nn.Module):
    """Class scores for images [B, 3, H, W], designed for H = W = 32."""

    def __init__(self, classes: int = 10, width: float = 1.0) -> None:
        super().__init__()

        def scaled(*channels: int) -> list[int]:
            """Round to multiples of 8, because a CPU computes 8 channels at a time."""
            return [max(8, 8 * round(width * c / 8)) for c in channels]

        [base] = scaled(16)
        stem = _conv(3, base, 3, 2)
        first = _Reduction(base, *scaled(8, 16))
        a = _Mixed(first.outputs, *scaled(16, 16, 16, 8))
        second = _Reduction(a.outputs, *scaled(16, 24))
        b = _Mixed(second.outputs, *scaled(24, 16, 32, 16))
        c = _Mixed(b.outputs, *scaled(24, 16, 32, 16))
        self.features = nn.Sequential(stem, first, a, second, b, c)
        self.head = nn.Linear(c.outputs, classes)

    def forward(self, images: Tensor) -> Tensor:
        # Convolutions, batch norm and pools keep the layout, and are faster with channels last.
        images = images.contiguous(memory_format=torch.channels_last)
        scores: Tensor = self.head(self.features(images).mean((2, 3)))
        return scores


class _Branches(nn.Module):
    """Concatenates the outputs of its branches along the channels."""

    def __init__(self, *branches: nn.Module) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([branch(x) for branch in self.branches], dim=1)


class _Mixed(_Branches):
    """Keeps the grid; has `narrow` channels before a 3x3 convolution, and `wide` ones after it."""

    def __init__(self, inputs: int, single: int, narrow: int, wide: int, pooled: int) -> None:
        super().__init__(
            _conv(inputs, single, 1),
            nn.Sequential(_conv(inputs, narrow, 1), _conv(narrow, wide, 3)),
            nn.Sequential(_conv(inputs, narrow, 1), _conv(narrow, wide, 3), _conv(wide, wide, 3)),
            nn.Sequential(nn.AvgPool2d(3, 1, 1), _conv(inputs, pooled, 1)),
        )
        self.outputs = single + 2 * wide + pooled


class _Reduction(_Branches):
    """Halves the grid; has `narrow` channels before a 3x3 convolution, and `wide` ones after it."""

    def __init__(self, inputs: int, narrow: int, wide: int) -> None:
        super().__init__(
            nn.Sequential(_conv(inputs, narrow, 1), _conv(narrow, wide, 3, 2)),
            nn.Sequential(
                _conv(inputs, narrow, 1), _conv(narrow, wide, 3), _conv(wide, wide, 3, 2)
            ),
            nn.MaxPool2d(3, 2, 1),
        )
        self.outputs = inputs + 2 * wide


def _conv(inputs: int, outputs: int, size: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, size, stride, padding=size // 2, bias=False),
        BatchNorm(outputs),
        nn.ReLU(inplace=True),
    )
