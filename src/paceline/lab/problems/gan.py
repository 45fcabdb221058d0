# SPDX-License-Identifier: BSD-3-Clause
"""Drawing digits that look written: a GAN on MNIST at 8 x 8, and how far its digits are from real.

The distance is Fréchet's, as in the FID of Heusel et al. (2017), but between the features of a
small classifier that is trained on the same digits, which takes a second. It says which of two GANs
is better; it cannot be compared with distances between the features of another network.
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

from paceline.lab.data.draws import indices, rng
from paceline.lab.data.mnist import load_mnist
from paceline.lab.models.gan import Gan, digits_gan
from paceline.lab.problem import Draw, Problem

__all__ = ["DrawnDigits", "Features", "frechet"]

JUDGE_UPDATES, JUDGE_BATCH, JUDGE_RATE = 500, 64, 4e-3


@dataclass(frozen=True, kw_only=True)
class DrawnDigits(Problem):
    """A sample is a real digit, and a drawn one."""

    name: ClassVar[str] = "drawn digits"

    data: Path = field(compare=False)
    """Where the data sets are."""
    scored: int = 5000
    """So many digits are drawn to see how good it is, always from the same noise."""

    @property
    def samples(self) -> int:
        return len(_small(self.data).train_y)

    def build(self) -> nn.Module:
        return digits_gan()

    def losses(self, model: nn.Module, draws: Sequence[Draw]) -> Tensor:
        assert isinstance(model, Gan)
        real = _small(self.data).train_x[indices(self.seed, draws, self.batch, self.samples)]
        noises = [rng(self.seed, draw).standard_normal((self.batch, model.noise)) for draw in draws]
        noise = torch.from_numpy(np.concatenate(noises)).float()
        return model.losses(real, noise).view(len(draws), -1).mean(1)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        assert isinstance(model, Gan)
        generator = torch.Generator().manual_seed(0)
        drawn = model(torch.randn(self.scored, model.noise, generator=generator))
        found = Features.of(_judge(self.data)(drawn))
        return {"distance": frechet(found, _real_features(self.data))}


class Features(NamedTuple):
    """What many images have in common: the mean of their features, and how these vary."""

    mean: Tensor
    covariance: Tensor

    @classmethod
    def of(cls, rows: Tensor) -> "Features":
        """Of images with these features [images, features]."""
        return cls(rows.double().mean(0), rows.double().T.cov())


def frechet(a: Features, b: Features) -> float:
    """The squared distance between two normal distributions with these moments."""
    values, vectors = torch.linalg.eigh(a.covariance)
    root = vectors * values.clamp(min=0).sqrt() @ vectors.T
    between = torch.linalg.eigvalsh(root @ b.covariance @ root).clamp(min=0).sqrt().sum()
    apart = (a.mean - b.mean).square().sum()
    return float(apart + a.covariance.trace() + b.covariance.trace() - 2 * between)


class _Small(NamedTuple):
    """Digits [B, 1, 8, 8] with values from 0 to 1."""

    train_x: Tensor
    train_y: Tensor
    test_x: Tensor


@lru_cache(maxsize=1)
def _small(data: Path) -> _Small:
    images = load_mnist(data)
    return _Small(_shrunk(images.train_x), images.train_y, _shrunk(images.test_x))


def _shrunk(pixels: Tensor) -> Tensor:
    """28 x 28 bytes with a margin of 2, each 4 x 4 made into one."""
    return avg_pool2d(pad(pixels, (2, 2, 2, 2)).float() / 255, 4)


@lru_cache(maxsize=1)
def _real_features(data: Path) -> Features:
    return Features.of(_judge(data)(_small(data).test_x))


@lru_cache(maxsize=1)
def _judge(data: Path) -> nn.Module:
    """A classifier without its last layer, always the same."""
    digits = _small(data)
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        torch.manual_seed(0)
        features = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU())
        model = nn.Sequential(features, nn.Linear(64, 10))
        optimizer = torch.optim.Adam(model.parameters(), JUDGE_RATE)
        for number in range(JUDGE_UPDATES):
            chosen = indices(0, [Draw(0, number)], JUDGE_BATCH, len(digits.train_y))
            optimizer.zero_grad()
            loss = cross_entropy(model(digits.train_x[chosen]), digits.train_y[chosen])
            loss.backward()  # type: ignore[no-untyped-call] # torch's
            optimizer.step()
    return features.requires_grad_(False)
