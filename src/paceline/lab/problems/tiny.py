# SPDX-License-Identifier: BSD-3-Clause
"""Telling twenty kinds of Tiny-ImageNet apart, with small relatives of what Daily et al. train."""

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
    """Images with half the height and width: each pixel the mean of four, rounded."""
    rows = pixels[:, :, ::2].short() + pixels[:, :, 1::2]
    mean: Tensor = (rows[..., ::2] + rows[..., 1::2] + 2).div(4, rounding_mode="floor").byte()
    return mean


@lru_cache(maxsize=1)
def _load(data: Path, cache: Path | None) -> Images:
    whole = load_tiny_imagenet(data, cache=cache)
    return replace(whole, train_x=halved(whole.train_x), test_x=halved(whole.test_x))


@dataclass(frozen=True, kw_only=True)
class Tiny(Classify):
    """Twenty classes of Tiny-ImageNet, made smaller to 32x32, with shifts and mirrors."""

    name: ClassVar[str] = "tiny"
    model: Literal["alexnet", "googlenet"]
    cache: Path | None = field(default=None, compare=False)
    """Where the unpacked images are kept."""
    width: float = 1.0
    """Multiplies the channels of the small network."""
    scored: int = 1000

    def images(self) -> Images:
        return _load(self.data, self.cache)

    def seen(self, pixels: Tensor, draws: Sequence[Draw]) -> Tensor:
        if draws:
            pixels = shift_and_flip(pixels, self.seed, draws)
        return normalize(pixels, MEAN, STD)

    def build(self) -> nn.Module:
        if self.model == "alexnet":
            return SmallAlexNet(size=SIDE, width=self.width)
        return SmallGoogLeNet(width=self.width / 4)
