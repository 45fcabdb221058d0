# SPDX-License-Identifier: BSD-3-Clause
"""Balancing a pole on a cart: samples are games, played with the weights as they are then."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from paceline.lab.data.draws import rng
from paceline.lab.models.cartpole import losses, play, policy
from paceline.lab.problem import Draw, Problem

__all__ = ["CartPole"]


@dataclass(frozen=True, kw_only=True)
class CartPole(Problem):
    """A sample is an episode. There are as many as one likes; 1000 are called an epoch."""

    name: ClassVar[str] = "cartpole"
    scored: int = 200
    """So many episodes are played to see how good it is, always with the same chance."""

    @property
    def samples(self) -> int:
        return 1000

    def build(self) -> nn.Module:
        return policy()

    def losses(self, model: nn.Module, draws: Sequence[Draw]) -> Tensor:
        chances = [_generator(int(rng(self.seed, draw).integers(2**62))) for draw in draws]
        return losses(model, play(model, self.batch, *chances), len(draws))

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        return {"return": play(model, self.scored, _generator(0)).returns.mean().item()}


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)
