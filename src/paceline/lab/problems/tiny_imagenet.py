# SPDX-License-Identifier: BSD-3-Clause
"""Classify twenty classes of Tiny-ImageNet with small versions of Daily et al.'s networks."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import ClassVar, Literal

from torch import Tensor, nn

from paceline.lab.data.augment import normalize, shift_and_flip
from paceline.lab.data.images import Images
from paceline.lab.data.tiny_imagenet import MEAN, STD, load_tiny_imagenet
from paceline.lab.models.alexnet import SmallAlexNet
from paceline.lab.models.googlenet import SmallGoogLeNet
from paceline.lab.problem import Draw
from paceline.lab.problems.images import Classify

__all__ = ["Tiny", "halved"]

SIDE = 32


def halved(pixels: Tensor) -> Tensor:
    """Return images of half the height and width; each pixel is the rounded mean of four."""
    rows = pixels[:, :, ::2].short() + pixels[:, :, 1::2]
    mean: Tensor = (rows[..., ::2] + rows[..., 1::2] + 2).div(4, rounding_mode="floor").byte()
    return mean


@lru_cache(maxsize=1)
def _load(data: Path, cache: Path | None) -> Images:
    whole = load_tiny_imagenet(data, cache=cache)
    return replace(whole, train_x=halved(whole.train_x), test_x=halved(whole.test_x))


@dataclass(frozen=True, kw_only=True)
class Tiny(Classify):
    """Twenty classes of Tiny-ImageNet, downscaled to 32x32, with random shifts and flips."""

    name: ClassVar[str] = "tiny"
    model: Literal["alexnet", "googlenet"]
    cache: Path | None = field(default=None, compare=False)
    """Folder for the unpacked images."""
    width: float = 1.0
    """Multiplies the channels of the small network."""
    scored: int = 1000

    def images(self) -> Images:
        return _load(self.data, self.cache)

    def preprocess(self, pixels: Tensor, draws: Sequence[Draw]) -> Tensor:
        if draws:
            pixels = shift_and_flip(pixels, self.seed, draws)
        return normalize(pixels, MEAN, STD)

    def build(self) -> nn.Module:
        if self.model == "alexnet":
            return SmallAlexNet(size=SIDE, width=self.width)
        return SmallGoogLeNet(width=self.width / 4)
