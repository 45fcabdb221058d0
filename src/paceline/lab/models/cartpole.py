# SPDX-License-Identifier: BSD-3-Clause
"""A pole on a cart, and a policy network that learns to balance it (REINFORCE with a baseline).

The physics are those of Barto, Sutton and Anderson (1983), the same as in examples/cartpole.py, for
all episodes at once. Chance comes from the given generators alone, one for each mini-batch, so that
a worker plays the same games whether it plays alone or together with others.

An episode lasts to its last moment, even if the pole has fallen: if bad games were over sooner, a
rule that does not wait for the slow would learn from the bad ones. What lies stays where it is, and
is not computed any further once no pole stands.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

__all__ = ["LIMITS", "MOMENTS", "Games", "losses", "move", "play", "policy"]

MOMENTS = 200
"""Of an episode, fiftieths of a second."""

LIMITS = torch.tensor([2.4, torch.inf, 0.21, torch.inf])
"""Of the state: place (metres), speed, angle (radians), spin. Beyond, the pole has fallen."""


class Games(NamedTuple):
    """What was played: each with moments first and episodes second."""

    states: Tensor  # [MOMENTS, E, 4]
    rights: Tensor  # [MOMENTS, E]: 1 where the cart was pushed to the right
    stood: Tensor  # [MOMENTS, E]: 1 for as long as the pole stood, then 0

    @property
    def returns(self) -> Tensor:
        """For how many moments the pole of each episode stood."""
        return self.stood.sum(0)


def policy(width: int = 64) -> nn.Sequential:
    """For states [..., 4]: a score for the push to the right, and the baseline."""
    return nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 2))


def move(state: Tensor, right: Tensor) -> Tensor:
    """The state [..., 4] a moment later; the cart is pushed to the right (1) or to the left (0)."""
    _, speed, angle, spin = state.unbind(-1)
    sin, cos = angle.sin(), angle.cos()
    push = (20 * right - 10 + 0.05 * spin**2 * sin) / 1.1
    turn = (9.8 * sin - cos * push) / (2 / 3 - cos**2 / 22)
    return state + 0.02 * torch.stack([speed, push - turn * cos / 22, spin, turn], -1)


@torch.no_grad()
def play(model: nn.Module, episodes: int, *rngs: torch.Generator) -> Games:
    """Play so many episodes with the chance of each generator; those of the first come first."""
    starts = [torch.rand(episodes, 4, generator=rng) for rng in rngs]
    coins = torch.cat([torch.rand(MOMENTS, episodes, generator=rng) for rng in rngs], dim=1)
    state = torch.cat(starts) * 0.1 - 0.05
    stood = torch.ones(len(state))
    moments = []
    for coin in coins:
        right = (coin < model(state)[:, 0].sigmoid()) * stood
        moments.append((state, right, stood))
        state = state.where(stood[:, None] == 0, move(state, right))
        stood = stood * (state.abs() < LIMITS).all(-1)
        if not stood.any():  # nothing moves any more, and nothing is learnt from that
            moments += [(state, stood, stood)] * (MOMENTS - len(moments))
            break
    return Games(*map(torch.stack, zip(*moments, strict=True)))


def losses(model: nn.Module, games: Games, workers: int = 1) -> Tensor:
    """The loss [workers] of each worker's games, which are equally many and in their order."""
    states, rights, stood = games
    future = stood.flip(0).cumsum(0).flip(0)  # for how many moments it still stood
    scores, baseline = model(states).unbind(-1)
    advantage = future / MOMENTS - baseline
    surprise = binary_cross_entropy_with_logits(scores, rights, reduction="none")
    terms = stood * (surprise * advantage.detach() + advantage**2)

    def sums(x: Tensor) -> Tensor:
        return x.sum(0).view(workers, -1).sum(1)

    return sums(terms) / sums(stood)
