# SPDX-License-Identifier: BSD-3-Clause
"""CartPole, and a policy network that learns to balance the pole (REINFORCE with a baseline).

The physics are those of Barto, Sutton and Anderson (1983), the same as in examples/cartpole.py,
computed for all episodes at once. All randomness comes from the given generators, one per
mini-batch, so a worker plays the same games alone and together with others.

Every episode has the same length, even if the pole falls. If bad games ended sooner, a rule that
doesn't wait for slow workers would learn mostly from bad games. A fallen pole stays where it is,
and the simulation stops once no pole is upright.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

__all__ = ["LIMITS", "MOMENTS", "Games", "losses", "move", "play", "policy"]

MOMENTS = 200
"""Time steps of an episode, each a fiftieth of a second."""

LIMITS = torch.tensor([2.4, torch.inf, 0.21, torch.inf])
"""Limits of the state: position (metres), velocity, angle (radians), angular velocity. Beyond
them the pole has fallen."""


class Games(NamedTuple):
    """Recorded episodes; the first dimension is time, the second the episode."""

    states: Tensor  # [MOMENTS, E, 4]
    rights: Tensor  # [MOMENTS, E]: 1 where the cart was pushed to the right
    upright: Tensor  # [MOMENTS, E]: 1 while the pole is upright, then 0

    @property
    def returns(self) -> Tensor:
        """The number of time steps that the pole of each episode was upright."""
        return self.upright.sum(0)


def policy(width: int = 64) -> nn.Sequential:
    """Return a network that maps states [..., 4] to a score for pushing right, and a baseline."""
    return nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 2))


def move(state: Tensor, right: Tensor) -> Tensor:
    """Return the state [..., 4] after a time step with a push to the right (1) or left (0)."""
    _, velocity, angle, spin = state.unbind(-1)
    sin, cos = angle.sin(), angle.cos()
    push = (20 * right - 10 + 0.05 * spin**2 * sin) / 1.1
    turn = (9.8 * sin - cos * push) / (2 / 3 - cos**2 / 22)
    return state + 0.02 * torch.stack([velocity, push - turn * cos / 22, spin, turn], -1)


@torch.no_grad()
def play(model: nn.Module, episodes: int, *rngs: torch.Generator) -> Games:
    """Play this many episodes with each generator; those of the first generator come first."""
    starts = [torch.rand(episodes, 4, generator=rng) for rng in rngs]
    coins = torch.cat([torch.rand(MOMENTS, episodes, generator=rng) for rng in rngs], dim=1)
    state = torch.cat(starts) * 0.1 - 0.05
    upright = torch.ones(len(state))
    moments = []
    for coin in coins:
        right = (coin < model(state)[:, 0].sigmoid()) * upright
        moments.append((state, right, upright))
        state = state.where(upright[:, None] == 0, move(state, right))
        upright = upright * (state.abs() < LIMITS).all(-1)
        if not upright.any():  # nothing moves any more, and there is nothing to learn
            moments += [(state, upright, upright)] * (MOMENTS - len(moments))
            break
    return Games(*map(torch.stack, zip(*moments, strict=True)))


def losses(model: nn.Module, games: Games, workers: int = 1) -> Tensor:
    """Return the loss [workers] of each worker's games; each worker has the same number of them."""
    states, rights, upright = games
    future = upright.flip(0).cumsum(0).flip(0)  # remaining time steps upright
    scores, baseline = model(states).unbind(-1)
    advantage = future / MOMENTS - baseline
    log_loss = binary_cross_entropy_with_logits(scores, rights, reduction="none")
    terms = upright * (log_loss * advantage.detach() + advantage**2)

    def sums(x: Tensor) -> Tensor:
        return x.sum(0).view(workers, -1).sum(1)

    return sums(terms) / sums(upright)
