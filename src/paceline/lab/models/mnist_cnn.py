# SPDX-License-Identifier: BSD-3-Clause
"""The CNN that Chen et al. (2016) train on MNIST under simulated staleness.

Four convolutions 3x3 with weight norm and ReLU, and max-pooling. The paper gives neither widths nor
where the pools stand; here are 16, 32, 48 and 48 channels on grids of 28x28, 14x14, 7x7 and 7x7,
and a linear layer on the last 3x3.

The default has 43,930 parameters and makes 2.7 million multiplications an image.
"""

import torch
from torch import Tensor, nn

from paceline.lab.models.norm import WeightNormConv2d

__all__ = ["MnistCnn"]


class MnistCnn(nn.Module):
    """Scores of the ten digits, for images [B, 1, 28, 28]; `width` multiplies the channels."""

    def __init__(self, width: float = 1.0) -> None:
        super().__init__()
        a, b, c, d = (max(1, round(width * channels)) for channels in (16, 32, 48, 48))
        self.layers = nn.Sequential(
            # ReLU after the pool is the same as before it, on a quarter of the numbers.
            *(WeightNormConv2d(1, a, 3, padding=1), nn.MaxPool2d(2), nn.ReLU(inplace=True)),
            *(WeightNormConv2d(a, b, 3, padding=1), nn.MaxPool2d(2), nn.ReLU(inplace=True)),
            *(WeightNormConv2d(b, c, 3, padding=1), nn.ReLU(inplace=True)),
            *(WeightNormConv2d(c, d, 3, padding=1), nn.MaxPool2d(2), nn.ReLU(inplace=True)),
            *(nn.Flatten(), nn.Linear(9 * d, 10)),
        )

    def forward(self, images: Tensor) -> Tensor:
        # A third quicker. With one channel `contiguous` would see no difference in the layouts.
        scores: Tensor = self.layers(images.clone(memory_format=torch.channels_last))
        return scores
