# SPDX-License-Identifier: BSD-3-Clause
"""An Inception network for 32x32 colour images, of BN-Inception's modules (Ioffe and Szegedy 2015).

A module has four branches: 1x1; 1x1 and 3x3; 1x1, 3x3 and 3x3; a pool and 1x1; each convolution
with batch norm and ReLU. A reduction halves the grid: the two branches with 3x3 end with stride 2,
and a max-pool passes the input on. Where BN-Inception has grids of 28x28, 14x14 and 7x7, here are
16x16, 8x8 and 4x4, with five modules instead of ten and about a tenth of the channels: on one
thread of a present machine a gradient takes about half a millisecond for an image.

The default has 82,922 parameters (10 classes) and makes 2.6 million multiplications an image.
"""

import torch
from torch import Tensor, nn

from paceline.lab.models.norm import BatchNorm

__all__ = ["Inception"]


class Inception(nn.Module):
    """Scores of the classes, for images [B, 3, H, W]; made for H = W = 32."""

    def __init__(self, classes: int = 10, width: float = 1.0) -> None:
        super().__init__()

        def scaled(*channels: int) -> list[int]:
            """Multiples of 8, because the processor works on 8 channels at a time."""
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
        # Convolutions, batch norm and pools keep the layout, and with channels last are quicker.
        images = images.contiguous(memory_format=torch.channels_last)
        scores: Tensor = self.head(self.features(images).mean((2, 3)))
        return scores


class _Branches(nn.Module):
    """The outputs of all branches, one after the other in the channels."""

    def __init__(self, *branches: nn.Module) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([branch(x) for branch in self.branches], dim=1)


class _Mixed(_Branches):
    """Keeps the grid; `narrow` channels before a 3x3 convolution, `wide` ones after it."""

    def __init__(self, inputs: int, single: int, narrow: int, wide: int, pooled: int) -> None:
        super().__init__(
            _conv(inputs, single, 1),
            nn.Sequential(_conv(inputs, narrow, 1), _conv(narrow, wide, 3)),
            nn.Sequential(_conv(inputs, narrow, 1), _conv(narrow, wide, 3), _conv(wide, wide, 3)),
            nn.Sequential(nn.AvgPool2d(3, 1, 1), _conv(inputs, pooled, 1)),
        )
        self.outputs = single + 2 * wide + pooled


class _Reduction(_Branches):
    """Halves the grid; `narrow` channels before a 3x3 convolution, `wide` ones after it."""

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
