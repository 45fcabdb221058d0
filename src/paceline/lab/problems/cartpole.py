# SPDX-License-Identifier: BSD-3-Clause
"""CartPole as a training problem: samples are games, played with the current weights."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from paceline.lab.data.sampling import augmentation_rng
from paceline.lab.models.cartpole import losses, play, policy
from paceline.lab.problem import Draw, Problem

__all__ = ["CartPole"]


@dataclass(frozen=True, kw_only=True)
class CartPole(Problem):
    """A sample is an episode. There is no limit to them, so 1000 count as an epoch."""

    name: ClassVar[str] = "cartpole"
    scored: int = 200
    """Number of episodes in an evaluation, always with the same random numbers."""

    @property
    def samples(self) -> int:
        return 1000

    def build(self) -> nn.Module:
        return policy()

    def losses(self, model: nn.Module, draws: Sequence[Draw]) -> Tensor:
        seeds = [int(augmentation_rng(self.seed, draw).integers(2**62)) for draw in draws]
        games = play(model, self.batch, *map(_generator, seeds))
        return losses(model, games, len(draws))

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        return {"return": play(model, self.scored, _generator(0)).returns.mean().item()}


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)
