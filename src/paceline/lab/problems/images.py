# SPDX-License-Identifier: BSD-3-Clause
"""Image classification: digits with the paper's CNN, photographs with an Inception network."""

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
from paceline.lab.data.images import Images
from paceline.lab.data.sampling import Shares, sample_indices
from paceline.lab.models.inception import Inception
from paceline.lab.models.mnist_cnn import MnistCnn
from paceline.lab.problem import Draw, Problem

__all__ = ["Classify", "Digits", "Photographs"]

SCORED_AT_ONCE = 500

load_cifar10 = lru_cache(maxsize=1)(cifar10.load_cifar10)
load_mnist = lru_cache(maxsize=1)(mnist.load_mnist)


@dataclass(frozen=True, kw_only=True)
class Classify(Problem):
    """A model that scores each class; the highest score is its answer."""

    data: Path = field(compare=False)
    """Folder of the data sets."""
    scored: int = 10_000
    """How many test images to evaluate on, from the first; at most as many as there are."""

    @abstractmethod
    def images(self) -> Images:
        """Return the data set."""

    @abstractmethod
    def preprocess(self, pixels: Tensor, draws: Sequence[Draw]) -> Tensor:
        """Return the model's inputs; without draws, those for evaluation."""

    @property
    def samples(self) -> int:
        return len(self.images().train_y)

    def pool(self) -> int | Shares:
        """Return the number of samples to draw from, or the share of each worker."""
        return self.samples

    def losses(self, model: nn.Module, draws: Sequence[Draw]) -> Tensor:
        images = self.images()
        chosen = sample_indices(self.seed, draws, self.batch, self.pool())
        scores = model(self.preprocess(images.train_x.index_select(0, chosen), draws))
        by_image = cross_entropy(scores, images.train_y[chosen], reduction="none")
        return by_image.view(len(draws), -1).mean(1)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        images = self.images()
        right, loss = 0.0, 0.0
        for begin in range(0, self.scored, SCORED_AT_ONCE):
            some = slice(begin, min(begin + SCORED_AT_ONCE, self.scored))
            scores, labels = model(self.preprocess(images.test_x[some], [])), images.test_y[some]
            right += float((scores.argmax(1) == labels).sum())
            loss += float(cross_entropy(scores, labels, reduction="sum"))
        return {"accuracy": right / self.scored, "loss": loss / self.scored}


@dataclass(frozen=True, kw_only=True)
class Digits(Classify):
    """MNIST, and the CNN that Chen et al. train on it, with small rotations and zooms."""

    name: ClassVar[str] = "digits"
    width: float = 1.0

    def images(self) -> Images:
        return load_mnist(self.data)

    def preprocess(self, pixels: Tensor, draws: Sequence[Draw]) -> Tensor:
        if draws:
            pixels = rotate_and_zoom(pixels, self.seed, draws)
        return normalize(pixels, mnist.MEAN, mnist.STD)

    def build(self) -> nn.Module:
        return MnistCnn(self.width)


@dataclass(frozen=True, kw_only=True)
class Photographs(Classify):
    """CIFAR-10, and a small Inception network, with random shifts and flips."""

    name: ClassVar[str] = "photographs"
    width: float = 1.0
    cache: Path | None = field(default=None, compare=False)
    """Folder for the unpacked images."""

    def images(self) -> Images:
        return load_cifar10(self.data, self.cache)

    def preprocess(self, pixels: Tensor, draws: Sequence[Draw]) -> Tensor:
        if draws:
            pixels = shift_and_flip(pixels, self.seed, draws)
        return normalize(pixels, cifar10.MEAN, cifar10.STD)

    def build(self) -> nn.Module:
        return Inception(width=self.width)
