# SPDX-License-Identifier: BSD-3-Clause
"""The CNN that Chen et al. (2016) train on MNIST under simulated staleness.

It has four 3x3 convolutions with weight norm, ReLU and max-pooling. The paper gives neither the
widths nor the positions of the pools; this network has 16, 32, 48 and 48 channels on grids of
28x28, 14x14, 7x7 and 7x7, and a linear layer on the last 3x3.

The default has 43,930 parameters and needs 2.7 million multiplications per image.
"""

import torch
from torch import Tensor, nn

from paceline.lab.models.normalization import WeightNormConv2d

__all__ = ["MnistCnn"]


class MnistCnn(nn.Module):
    """Scores of the ten digits for images [B, 1, 28, 28]; `width` multiplies the channels."""

    def __init__(self, width: float = 1.0) -> None:
        super().__init__()
        a, b, c, d = (max(1, round(width * channels)) for channels in (16, 32, 48, 48))
        self.layers = nn.Sequential(
            # ReLU after the pool gives the same result as before it, at a quarter of the cost.
            *(WeightNormConv2d(1, a, 3, padding=1), nn.MaxPool2d(2), nn.ReLU(inplace=True)),
            *(WeightNormConv2d(a, b, 3, padding=1), nn.MaxPool2d(2), nn.ReLU(inplace=True)),
            *(WeightNormConv2d(b, c, 3, padding=1), nn.ReLU(inplace=True)),
            *(WeightNormConv2d(c, d, 3, padding=1), nn.MaxPool2d(2), nn.ReLU(inplace=True)),
            *(nn.Flatten(), nn.Linear(9 * d, 10)),
        )

    def forward(self, images: Tensor) -> Tensor:
        # Channels last is a third faster. `contiguous` would do nothing, because with one channel
        # both layouts are the same.
        scores: Tensor = self.layers(images.clone(memory_format=torch.channels_last))
        return scores
