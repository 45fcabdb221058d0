# SPDX-License-Identifier: BSD-3-Clause
"""Telling images apart: digits with the paper's CNN, photographs with an Inception network."""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import ClassVar

from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from paceline.lab.data import cifar10, mnist
from paceline.lab.data.augment import normalize, rotate_and_zoom, shift_and_flip
from paceline.lab.data.draws import Shares, indices
from paceline.lab.data.images import Images
from paceline.lab.models.inception import Inception
from paceline.lab.models.mnist_cnn import MnistCnn
from paceline.lab.problem import Draw, Problem

__all__ = ["Classify", "Digits", "Photographs"]

SCORED_AT_ONCE = 500

load_cifar10 = lru_cache(maxsize=1)(cifar10.load_cifar10)
load_mnist = lru_cache(maxsize=1)(mnist.load_mnist)


@dataclass(frozen=True, kw_only=True)
class Classify(Problem):
    """A model that gives a score to each class; the one with the highest is its answer."""

    data: Path = field(compare=False)
    """Where the data sets are."""
    scored: int = 10_000
    """So many of the images to test on, the first, are looked at; not more than there are."""

    @abstractmethod
    def images(self) -> Images:
        """What there is."""

    @abstractmethod
    def seen(self, pixels: Tensor, draws: Sequence[Draw]) -> Tensor:
        """Images as the model is trained on them; without draws, as it is tested on them."""

    @property
    def samples(self) -> int:
        return len(self.images().train_y)

    def pool(self) -> int | Shares:
        """What mini-batches are drawn from."""
        return self.samples

    def losses(self, model: nn.Module, draws: Sequence[Draw]) -> Tensor:
        images = self.images()
        chosen = indices(self.seed, draws, self.batch, self.pool())
        found = model(self.seen(images.train_x.index_select(0, chosen), draws))
        by_image = cross_entropy(found, images.train_y[chosen], reduction="none")
        return by_image.view(len(draws), -1).mean(1)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        images = self.images()
        right, loss = 0.0, 0.0
        for begin in range(0, self.scored, SCORED_AT_ONCE):
            some = slice(begin, min(begin + SCORED_AT_ONCE, self.scored))
            scores, labels = model(self.seen(images.test_x[some], [])), images.test_y[some]
            right += float((scores.argmax(1) == labels).sum())
            loss += float(cross_entropy(scores, labels, reduction="sum"))
        return {"accuracy": right / self.scored, "loss": loss / self.scored}


@dataclass(frozen=True, kw_only=True)
class Digits(Classify):
    """MNIST and the CNN that Chen et al. train on it, with small rotations and zooms."""

    name: ClassVar[str] = "digits"
    width: float = 1.0

    def images(self) -> Images:
        return load_mnist(self.data)

    def seen(self, pixels: Tensor, draws: Sequence[Draw]) -> Tensor:
        if draws:
            pixels = rotate_and_zoom(pixels, self.seed, draws)
        return normalize(pixels, mnist.MEAN, mnist.STD)

    def build(self) -> nn.Module:
        return MnistCnn(self.width)


@dataclass(frozen=True, kw_only=True)
class Photographs(Classify):
    """CIFAR-10 and a small Inception network, with shifts and mirrors."""

    name: ClassVar[str] = "photographs"
    width: float = 1.0
    cache: Path | None = field(default=None, compare=False)
    """Where the unpacked images are kept."""

    def images(self) -> Images:
        return load_cifar10(self.data, self.cache)

    def seen(self, pixels: Tensor, draws: Sequence[Draw]) -> Tensor:
        if draws:
            pixels = shift_and_flip(pixels, self.seed, draws)
        return normalize(pixels, cifar10.MEAN, cifar10.STD)

    def build(self) -> nn.Module:
        return Inception(width=self.width)
