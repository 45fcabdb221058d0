# SPDX-License-Identifier: BSD-3-Clause
"""AlexNet (Krizhevsky, Sutskever and Hinton 2012) for one device, and a small version.

`AlexNet` is the single tower of Krizhevsky's 2014 paper, without response normalization:
61,100,840 parameters with 1000 classes, 58.6 million of them in the three linear layers. It
communicates a lot for what it computes, which is why Daily et al. use it.

`SmallAlexNet` has the same eight layers and pools for images of 64x64 or 32x32: 999,092 parameters
with 20 classes at 64x64, 80 % of them in the linear layers, and 26 million multiplications. All its
layers but the last use He initialization (2015); with torch's default it learns nothing for an
epoch.

Dropout comes before the first two linear layers, as published; 0 turns it off.
"""

import torch
from torch import Tensor, nn

from paceline.lab.models.initialization import init_he

__all__ = ["AlexNet", "SmallAlexNet"]


class AlexNet(nn.Module):
    """Class scores for images [B, 3, 224, 224]."""

    def __init__(self, classes: int = 1000, dropout: float = 0.5) -> None:
        super().__init__()
        self.features = nn.Sequential(
            *(_conv(3, 64, 11, stride=4, padding=2), nn.MaxPool2d(3, 2)),
            *(_conv(64, 192, 5), nn.MaxPool2d(3, 2)),
            _conv(192, 384, 3),
            _conv(384, 256, 3),
            *(_conv(256, 256, 3), nn.MaxPool2d(3, 2)),
        )
        self.classifier = _classifier(256 * 6 * 6, 4096, classes, dropout)
        init_he(self)

    def forward(self, images: Tensor) -> Tensor:
        images = images.contiguous(memory_format=torch.channels_last)  # faster
        scores: Tensor = self.classifier(self.features(images))
        return scores


class SmallAlexNet(AlexNet):
    """Class scores for images [B, 3, size, size]; `width` multiplies the channels."""

    def __init__(
        self, classes: int = 20, size: int = 64, width: float = 1.0, dropout: float = 0.0
    ) -> None:
        nn.Module.__init__(self)
        a, b, c, wide = (max(1, round(width * channels)) for channels in (32, 64, 96, 512))
        self.features = nn.Sequential(
            *(_conv(3, a, 5, stride=2), nn.MaxPool2d(3, 2, 1)),
            *(_conv(a, b, 5), nn.MaxPool2d(3, 2, 1)),
            _conv(b, c, 3),
            _conv(c, b, 3),
            *(_conv(b, b, 3), nn.MaxPool2d(3, 2, 1)),
        )
        self.classifier = _classifier(b * (size // 16) ** 2, wide, classes, dropout)
        init_he(self)


def _conv(
    inputs: int, outputs: int, size: int, *, stride: int = 1, padding: int | None = None
) -> nn.Sequential:
    pad = size // 2 if padding is None else padding
    return nn.Sequential(nn.Conv2d(inputs, outputs, size, stride, pad), nn.ReLU(inplace=True))


def _classifier(inputs: int, wide: int, classes: int, dropout: float) -> nn.Sequential:
    return nn.Sequential(
        nn.Flatten(),
        *(nn.Dropout(dropout), nn.Linear(inputs, wide), nn.ReLU(inplace=True)),
        *(nn.Dropout(dropout), nn.Linear(wide, wide), nn.ReLU(inplace=True)),
        nn.Linear(wide, classes),
    )
