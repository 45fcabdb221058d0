# SPDX-License-Identifier: BSD-3-Clause
"""Density modelling of photographs with a gated PixelCNN."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor, nn

from paceline.lab.data import cifar10
from paceline.lab.data.sampling import sample_indices
from paceline.lab.models.pixelcnn import PixelCnn, bits_per_dimension
from paceline.lab.problem import Draw, Problem

__all__ = ["Pixels"]

SCORED_AT_ONCE = 100

load_cifar10 = lru_cache(maxsize=1)(cifar10.load_cifar10)


@dataclass(frozen=True, kw_only=True)
class Pixels(Problem):
    """The middle of each CIFAR-10 image, and a small gated PixelCNN.

    The problem uses the middle instead of a downscaled image, because neighbouring pixels then stay
    as similar as in the whole image, and the bits per value remain comparable.
    """

    name: ClassVar[str] = "pixels"
    data: Path = field(compare=False)
    """Folder of the data sets."""
    cache: Path | None = field(default=None, compare=False)
    """Folder for the unpacked images."""
    side: int = 16
    """Side of the square in the middle, in pixels."""
    width: int = 16
    layers: int = 4
    scored: int = 500
    """How many test images to evaluate on, from the first; at most as many as there are."""

    @property
    def samples(self) -> int:
        return len(load_cifar10(self.data, self.cache).train_x)

    def build(self) -> nn.Module:
        return PixelCnn(self.width, self.layers)

    def losses(self, model: nn.Module, draws: Sequence[Draw]) -> Tensor:
        images = load_cifar10(self.data, self.cache).train_x
        chosen = images.index_select(0, sample_indices(self.seed, draws, self.batch, self.samples))
        return bits_per_dimension(model, self.middle(chosen)).view(len(draws), -1).mean(1)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        images = load_cifar10(self.data, self.cache).test_x[: self.scored]
        parts = self.middle(images).chunk(-(-self.scored // SCORED_AT_ONCE))
        bits = torch.cat([bits_per_dimension(model, part) for part in parts])
        return {"bits": float(bits.mean())}

    def middle(self, images: Tensor) -> Tensor:
        """Return the part of the images that the model sees."""
        begin = (images.shape[-1] - self.side) // 2
        inside = slice(begin, begin + self.side)
        return images[:, :, inside, inside]
