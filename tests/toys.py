# SPDX-License-Identifier: BSD-3-Clause
"""A problem that trains very fast: a small network that separates two clouds of points.

It is in a separate module because other processes must be able to import it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from paceline.lab.problem import Draw, Problem


@dataclass(frozen=True, kw_only=True)
class Clouds(Problem):
    """Points around (1, 1) and around (-1, -1)."""

    name: ClassVar[str] = "clouds"
    batch: int = 4
    dropout: float = 0.0

    @property
    def samples(self) -> int:
        return 400

    def build(self) -> nn.Module:
        return nn.Sequential(
            nn.Linear(2, 8), nn.Tanh(), nn.Dropout(self.dropout), nn.Linear(8, 1)
        ).double()

    def points(self, draw: Draw) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(
            1_000_000 * self.seed + 1000 * draw.worker + draw.number
        )
        y = torch.randint(2, (self.batch,), generator=generator).double()
        noise = torch.randn(self.batch, 2, generator=generator, dtype=torch.float64)
        return noise + (2 * y - 1)[:, None], y

    def _together(self, draws: Sequence[Draw]) -> list[Tensor]:
        return [torch.cat(parts) for parts in zip(*map(self.points, draws), strict=True)]

    def losses(self, model: nn.Module, draws: Sequence[Draw]) -> Tensor:
        x, y = self._together(draws)
        losses = binary_cross_entropy_with_logits(model(x)[:, 0], y, reduction="none")
        return losses.view(len(draws), -1).mean(1)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        x, y = (
            torch.cat(p) for p in zip(*(self.points(Draw(99, n)) for n in range(50)), strict=True)
        )
        return {"accuracy": ((model(x)[:, 0] > 0) == (y > 0)).double().mean().item()}


class Failing(Clouds):
    """Fails at once with seed 1; with other seeds it trains normally."""

    def losses(self, model: nn.Module, draws: Sequence[Draw]) -> Tensor:
        if self.seed == 1:
            raise ValueError("seed 1 fails")
        return super().losses(model, draws)
