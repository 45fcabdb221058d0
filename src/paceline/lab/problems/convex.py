# SPDX-License-Identifier: BSD-3-Clause
"""A convex problem whose optimum is known: logistic regression on a9a with a quadratic penalty."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from paceline.lab.data import a9a
from paceline.lab.data.draws import indices
from paceline.lab.models.logistic import Curvature, Logistic, curvature, optimum
from paceline.lab.problem import Draw, Problem

__all__ = ["Census"]

load_a9a = lru_cache(maxsize=1)(a9a.load_a9a)


class _Known(NamedTuple):
    best: float  # F*
    curvature: Curvature
    x: Tensor  # the rows in double precision
    y: Tensor
    lengths: Tensor  # of the rows, squared


@dataclass(frozen=True, kw_only=True)
class Census(Problem):
    """F is what is trained on, so it is what is looked at, too: all of it, at every row."""

    name: ClassVar[str] = "census"

    data: Path = field(compare=False)
    """Where the data sets are."""
    l2: float

    @property
    def samples(self) -> int:
        return len(load_a9a(self.data).train_y)

    @property
    def curvature(self) -> Curvature:
        """Of F, everywhere."""
        return _known(self.data, self.l2).curvature

    def build(self) -> nn.Module:
        return Logistic(load_a9a(self.data).train_x.shape[1], self.l2)

    def losses(self, model: nn.Module, draws: Sequence[Draw]) -> Tensor:
        assert isinstance(model, Logistic)
        table = load_a9a(self.data)
        chosen = indices(self.seed, draws, self.batch, self.samples)
        by_row = model.losses(table.train_x[chosen], table.train_y[chosen])
        return by_row.view(len(draws), -1).mean(1)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """F(w) - F*, and the variance of the gradient of one row: σ² where the model is."""
        assert isinstance(model, Logistic)
        best, _, x, y, lengths = _known(self.data, self.l2)
        margins = y * (x @ model.weight)
        value = softplus(-margins).mean() + self.l2 / 2 * model.weight.square().sum()
        pulls = torch.sigmoid(-margins)  # the gradient of a row is -pull y x + l2 w
        mean = (pulls * y) @ x / len(y)
        variance = (pulls.square() * lengths).mean() - mean.square().sum()
        return {"gap": float(value) - best, "variance": float(variance)}


@lru_cache(maxsize=1)
def _known(data: Path, l2: float) -> _Known:
    table = load_a9a(data)
    _, best = optimum(table.train_x, table.train_y, l2)
    x = table.train_x.double()
    return _Known(best, curvature(x, l2), x, table.train_y.double(), x.square().sum(1))
