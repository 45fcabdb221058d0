# SPDX-License-Identifier: BSD-3-Clause
"""A GAN that generates MNIST digits at 8 x 8, scored by their distance from real ones.

The score is the Fréchet distance, as in the FID of Heusel et al. (2017), but on the features of a
small classifier trained on the same digits, which takes a second. It tells which of two GANs is
better; it can't be compared with distances on the features of another network.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import avg_pool2d, cross_entropy, pad

from paceline.lab.data.mnist import load_mnist
from paceline.lab.data.sampling import augmentation_rng, sample_indices
from paceline.lab.models.gan import Gan, digits_gan
from paceline.lab.problem import Draw, Problem

__all__ = ["DrawnDigits", "Features", "frechet"]

CLASSIFIER_UPDATES, CLASSIFIER_BATCH, CLASSIFIER_RATE = 500, 64, 4e-3


@dataclass(frozen=True, kw_only=True)
class DrawnDigits(Problem):
    """A sample is a real digit and a generated one."""

    name: ClassVar[str] = "drawn digits"

    data: Path = field(compare=False)
    """Folder of the data sets."""
    scored: int = 5000
    """Number of digits generated in an evaluation, always from the same noise."""

    @property
    def samples(self) -> int:
        return len(_load_small(self.data).train_y)

    def build(self) -> nn.Module:
        return digits_gan()

    def losses(self, model: nn.Module, draws: Sequence[Draw]) -> Tensor:
        assert isinstance(model, Gan)
        real = _load_small(self.data).train_x[
            sample_indices(self.seed, draws, self.batch, self.samples)
        ]
        noises = [
            augmentation_rng(self.seed, draw).standard_normal((self.batch, model.noise))
            for draw in draws
        ]
        noise = torch.from_numpy(np.concatenate(noises)).float()
        return model.losses(real, noise).view(len(draws), -1).mean(1)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        assert isinstance(model, Gan)
        generator = torch.Generator().manual_seed(0)
        images = model(torch.randn(self.scored, model.noise, generator=generator))
        generated = Features.of(_feature_network(self.data)(images))
        return {"distance": frechet(generated, _real_features(self.data))}


class Features(NamedTuple):
    """Mean and covariance of the features of many images."""

    mean: Tensor
    covariance: Tensor

    @classmethod
    def of(cls, rows: Tensor) -> "Features":
        """Return the moments of features [images, features]."""
        return cls(rows.double().mean(0), rows.double().T.cov())


def frechet(a: Features, b: Features) -> float:
    """Return the squared Fréchet distance of two normal distributions with these moments."""
    values, vectors = torch.linalg.eigh(a.covariance)
    root = vectors * values.clamp(min=0).sqrt() @ vectors.T
    between = torch.linalg.eigvalsh(root @ b.covariance @ root).clamp(min=0).sqrt().sum()
    means = (a.mean - b.mean).square().sum()
    return float(means + a.covariance.trace() + b.covariance.trace() - 2 * between)


class _SmallDigits(NamedTuple):
    """Digits [B, 1, 8, 8] with values from 0 to 1."""

    train_x: Tensor
    train_y: Tensor
    test_x: Tensor


@lru_cache(maxsize=1)
def _load_small(data: Path) -> _SmallDigits:
    images = load_mnist(data)
    return _SmallDigits(_shrink(images.train_x), images.train_y, _shrink(images.test_x))


def _shrink(pixels: Tensor) -> Tensor:
    """Pad 28 x 28 bytes by 2 on each side, and average blocks of 4 x 4."""
    return avg_pool2d(pad(pixels, (2, 2, 2, 2)).float() / 255, 4)


@lru_cache(maxsize=1)
def _real_features(data: Path) -> Features:
    return Features.of(_feature_network(data)(_load_small(data).test_x))


@lru_cache(maxsize=1)
def _feature_network(data: Path) -> nn.Module:
    """Train a classifier, always the same one, and return it without its last layer."""
    digits = _load_small(data)
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        torch.manual_seed(0)
        features = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU())
        model = nn.Sequential(features, nn.Linear(64, 10))
        optimizer = torch.optim.Adam(model.parameters(), CLASSIFIER_RATE)
        for number in range(CLASSIFIER_UPDATES):
            chosen = sample_indices(0, [Draw(0, number)], CLASSIFIER_BATCH, len(digits.train_y))
            optimizer.zero_grad()
            loss = cross_entropy(model(digits.train_x[chosen]), digits.train_y[chosen])
            loss.backward()
            optimizer.step()
    return features.requires_grad_(False)
