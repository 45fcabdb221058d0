# SPDX-License-Identifier: BSD-3-Clause
"""A convex problem with a known optimum: logistic regression on a9a with a quadratic penalty."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from paceline.lab.data import a9a
from paceline.lab.data.sampling import sample_indices
from paceline.lab.models.logistic import Curvature, Logistic, curvature, optimum
from paceline.lab.problem import Draw, Problem

__all__ = ["Census"]

load_a9a = lru_cache(maxsize=1)(a9a.load_a9a)


class _Constants(NamedTuple):
    best: float  # F*
    curvature: Curvature
    x: Tensor  # the rows in double precision
    y: Tensor
    lengths: Tensor  # squared norms of the rows


@dataclass(frozen=True, kw_only=True)
class Census(Problem):
    """The training objective F is also the score, over all rows."""

    name: ClassVar[str] = "census"

    data: Path = field(compare=False)
    """Folder of the data sets."""
    l2: float

    @property
    def samples(self) -> int:
        return len(load_a9a(self.data).train_y)

    @property
    def curvature(self) -> Curvature:
        """Bounds on the curvature of F."""
        return _constants(self.data, self.l2).curvature

    def build(self) -> nn.Module:
        return Logistic(load_a9a(self.data).train_x.shape[1], self.l2)

    def losses(self, model: nn.Module, draws: Sequence[Draw]) -> Tensor:
        assert isinstance(model, Logistic)
        table = load_a9a(self.data)
        chosen = sample_indices(self.seed, draws, self.batch, self.samples)
        by_row = model.losses(table.train_x[chosen], table.train_y[chosen])
        return by_row.view(len(draws), -1).mean(1)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Return F(w) - F*, and σ² at w: the variance of the gradient of one row."""
        assert isinstance(model, Logistic)
        best, _, x, y, lengths = _constants(self.data, self.l2)
        margins = y * (x @ model.weight)
        value = softplus(-margins).mean() + self.l2 / 2 * model.weight.square().sum()
        pulls = torch.sigmoid(-margins)  # the gradient of a row is -pull y x + l2 w
        mean = (pulls * y) @ x / len(y)
        variance = (pulls.square() * lengths).mean() - mean.square().sum()
        return {"gap": float(value) - best, "variance": float(variance)}


@lru_cache(maxsize=1)
def _constants(data: Path, l2: float) -> _Constants:
    table = load_a9a(data)
    _, best = optimum(table.train_x, table.train_y, l2)
    x = table.train_x.double()
    return _Constants(best, curvature(x, l2), x, table.train_y.double(), x.square().sum(1))
