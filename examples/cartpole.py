# SPDX-License-Identifier: BSD-3-Clause
"""Balance a pole on a cart with policy gradients (REINFORCE with a baseline).

$ paceline run --workers 4 --policy backup:1 --steps 100 examples/cartpole.py
server    | 100 updates of 300 samples in 19.9 s
worker 0  | mean return 17 at first, 194 at last
"""

import argparse

import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits

import paceline

parser = argparse.ArgumentParser(description="Balance a pole on a cart.")
parser.add_argument("--lr", type=float, default=0.01)
parser.add_argument("--steps", type=int, default=300, help="maximum number of gradients per worker")
parser.add_argument("--seed", type=int, default=0)
args = parser.parse_args()

EPISODES, MOMENTS = 8, 200  # episodes per gradient; steps of 1/50 s per episode
LIMITS = torch.tensor([2.4, torch.inf, 0.21, torch.inf])  # in metres and radians


def move(state, right):
    """Push the cart to the left or to the right (Barto, Sutton and Anderson 1983)."""
    _, speed, angle, spin = state.unbind(-1)
    sin, cos = angle.sin(), angle.cos()
    push = (20 * right - 10 + 0.05 * spin**2 * sin) / 1.1
    turn = (9.8 * sin - cos * push) / (2 / 3 - cos**2 / 22)
    return state + 0.02 * torch.stack([speed, push - turn * cos / 22, spin, turn], -1)


@torch.no_grad()
def play(model):
    """Play episodes; return states, actions, and 1 while the pole stands, 0 afterwards."""
    state, stood = torch.rand(EPISODES, 4) * 0.1 - 0.05, torch.ones(EPISODES)
    moments = []
    # Play to the end even if all poles have fallen. If bad games ended sooner, a rule that doesn't
    # wait for slow workers would learn mostly from bad games.
    for _ in range(MOMENTS):
        right = model(state)[:, 0].sigmoid().bernoulli()
        moments.append((state, right, stood))
        state = move(state, right)
        stood = stood * (state.abs() < LIMITS).all(-1)
    return map(torch.stack, zip(*moments, strict=True))


torch.manual_seed(args.seed)
model = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 2))  # the action and the baseline
optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)

run = paceline.join()
model, optimizer = run.prepare(model, optimizer)

returns = []
for _ in range(args.steps):
    if run.finished:  # without a loader, the loop must check for the end of the run
        break
    states, rights, stood = play(model)
    future = stood.flip(0).cumsum(0).flip(0)  # number of steps that it still stands
    scores, baseline = model(states).unbind(-1)
    advantage = future / MOMENTS - baseline
    surprise = binary_cross_entropy_with_logits(scores, rights, reduction="none")
    loss = (stood * (surprise * advantage.detach() + advantage**2)).sum() / stood.sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    returns.append(stood.sum(0).mean().item())
    run.log(mean_return=returns[-1])

if run.is_first:
    last = returns[-10:]
    print(f"mean return {returns[0]:.0f} at first, {sum(last) / len(last):.0f} at last")
