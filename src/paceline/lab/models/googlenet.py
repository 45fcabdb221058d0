# SPDX-License-Identifier: BSD-3-Clause
"""GoogLeNet (Szegedy et al. 2014), and a small version.

As published there is no batch norm. The auxiliary heads are left out, and so is local response
normalization, which has no parameters, costs time and was soon found not to help. That leaves
6,998,552 parameters with 1000 classes.

`SmallGoogLeNet` has the same nine modules with a quarter of the channels, behind a stem for images
of 64x64 or 32x32: 388,708 parameters with 20 classes, and 25 million multiplications at 64x64.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from paceline.lab.models.initialization import init_he

__all__ = ["GoogLeNet", "SmallGoogLeNet"]

MODULES = (  # channels: 1x1; 1x1 before 3x3, 3x3; 1x1 before 5x5, 5x5; after the pool
    (64, 96, 128, 16, 32, 32),
    (128, 128, 192, 32, 96, 64),
    None,  # halves the grid
    (192, 96, 208, 16, 48, 64),
    (160, 112, 224, 24, 64, 64),
    (128, 128, 256, 24, 64, 64),
    (112, 144, 288, 32, 64, 64),
    (256, 160, 320, 32, 128, 128),
    None,
    (256, 160, 320, 32, 128, 128),
    (384, 192, 384, 48, 128, 128),
)
"""Table 1 of the paper, inception 3a to 5b."""


class GoogLeNet(nn.Module):
    """Class scores for images [B, 3, 224, 224]; `width` multiplies the channels."""

    def __init__(self, classes: int = 1000, width: float = 1.0, dropout: float = 0.4) -> None:
        super().__init__()

        def scaled(channels: int) -> int:
            return max(8, 8 * round(width * channels / 8))  # a CPU computes 8 at a time

        stem = self.stem(scaled(64), scaled(192))
        modules, inputs = _modules(scaled(192), scaled)
        self.features = nn.Sequential(stem, modules)
        self.head = nn.Sequential(nn.Dropout(dropout), nn.Linear(inputs, classes))
        init_he(self)

    def stem(self, narrow: int, wide: int) -> nn.Sequential:
        """Return the layers from the image to a 28x28 grid."""
        return nn.Sequential(
            *(_conv(3, narrow, 7, 2), _pool(2)),
            *(_conv(narrow, narrow, 1), _conv(narrow, wide, 3), _pool(2)),
        )

    def forward(self, images: Tensor) -> Tensor:
        images = images.contiguous(memory_format=torch.channels_last)  # faster
        scores: Tensor = self.head(self.features(images).mean((2, 3)))
        return scores


class SmallGoogLeNet(GoogLeNet):
    """Class scores for images [B, 3, 64, 64] or [B, 3, 32, 32]."""

    def __init__(self, classes: int = 20, width: float = 0.25, dropout: float = 0.0) -> None:
        super().__init__(classes, width, dropout)

    def stem(self, narrow: int, wide: int) -> nn.Sequential:
        """Return the layers from the image to a 16x16 or 8x8 grid."""
        return nn.Sequential(_conv(3, narrow, 3, 2), _pool(2), _conv(narrow, wide, 3))


def _modules(inputs: int, scaled: Callable[[int], int]) -> tuple[nn.Sequential, int]:
    """Return the nine modules, and the number of channels of the last one."""
    layers: list[nn.Module] = []
    for row in MODULES:
        if row is None:
            layers.append(_pool(2))
        else:
            module = _Inception(inputs, *map(scaled, row))
            layers.append(module)
            inputs = module.outputs
    return nn.Sequential(*layers), inputs


class _Inception(nn.Module):
    """Four branches, concatenated along the channels."""

    def __init__(self, inputs: int, *channels: int) -> None:
        super().__init__()
        one, before_three, three, before_five, five, pooled = channels
        self.one = _conv(inputs, one, 1)
        self.three = nn.Sequential(_conv(inputs, before_three, 1), _conv(before_three, three, 3))
        self.five = nn.Sequential(_conv(inputs, before_five, 1), _conv(before_five, five, 5))
        self.pooled = nn.Sequential(_pool(1), _conv(inputs, pooled, 1))
        self.outputs = one + three + five + pooled

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.one(x), self.three(x), self.five(x), self.pooled(x)], dim=1)


def _conv(inputs: int, outputs: int, size: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(inputs, outputs, size, stride, size // 2), nn.ReLU(inplace=True))


def _pool(stride: int) -> nn.MaxPool2d:
    return nn.MaxPool2d(3, stride, padding=1)
