# SPDX-License-Identifier: BSD-3-Clause
"""Actor-critic: one model with two heads finds the shortest way out of a small grid."""

import argparse
import json
from collections import namedtuple

import torch
from torch import nn, optim
from torch.distributions import Categorical
from torch.nn import functional as F

import paceline

parser = argparse.ArgumentParser(description="Actor-critic")
parser.add_argument("--gamma", type=float, default=0.95)
parser.add_argument("--seed", type=int, default=543)
parser.add_argument("--episodes", type=int, default=250)
parser.add_argument("--log-interval", type=int, default=50)
args = parser.parse_args()
torch.manual_seed(args.seed)

SavedAction = namedtuple("SavedAction", ["log_prob", "value"])
MOVES = ((-1, 0), (1, 0), (0, -1), (0, 1))


class Grid:
    """A grid of 4 x 4 fields; the exit is in one corner, and each step costs a little."""

    def reset(self):
        self.steps = 0
        field = int(torch.randint(15, ()))
        self.row, self.column = divmod(field, 4)
        return self.observe()

    def observe(self):
        return F.one_hot(torch.tensor(4 * self.row + self.column), 16).float()

    def step(self, action):
        self.steps += 1
        down, right = MOVES[action]
        self.row = min(3, max(0, self.row + down))
        self.column = min(3, max(0, self.column + right))
        is_out = (self.row, self.column) == (3, 3)
        return self.observe(), 1.0 if is_out else -0.05, is_out or self.steps == 20


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.affine1 = nn.Linear(16, 32)
        self.action_head = nn.Linear(32, 4)
        self.value_head = nn.Linear(32, 1)
        self.saved_actions = []
        self.rewards = []

    def forward(self, x):
        x = F.relu(self.affine1(x))
        return F.softmax(self.action_head(x), dim=-1), self.value_head(x)


model = Policy()
optimizer = optim.Adam(model.parameters(), lr=1e-2)

run = paceline.join()
model, optimizer = run.prepare(model, optimizer)


def select_action(state):
    probs, state_value = model(state)
    m = Categorical(probs)
    action = m.sample()
    model.saved_actions.append(SavedAction(m.log_prob(action), state_value))
    return action.item()


def finish_episode():
    total, returns = 0.0, []
    for r in model.rewards[::-1]:
        total = r + args.gamma * total
        returns.insert(0, total)
    policy_losses, value_losses = [], []
    for (log_prob, value), r in zip(model.saved_actions, returns, strict=True):
        policy_losses.append(-log_prob * (r - value.item()))
        value_losses.append(F.smooth_l1_loss(value, torch.tensor([r])))
    optimizer.zero_grad()
    loss = torch.stack(policy_losses).sum() + torch.stack(value_losses).sum()
    loss.backward()
    optimizer.step()
    del model.rewards[:]
    del model.saved_actions[:]


def main():
    env = Grid()
    rewards = []
    for i_episode in range(1, args.episodes + 1):
        state, ep_reward, done = env.reset(), 0.0, False
        while not done:
            state, reward, done = env.step(select_action(state))
            model.rewards.append(reward)
            ep_reward += reward
        rewards.append(ep_reward)
        finish_episode()
        if i_episode % args.log_interval == 0:
            mean = sum(rewards[-50:]) / len(rewards[-50:])
            print(f"Episode {i_episode}\tAverage reward: {mean:.2f}")
    torch.save(model.state_dict(), "actor_critic.pt")
    facts = {
        "episodes": i_episode,
        "checkpoints": 1,
        "before": sum(rewards[:50]) / 50,
        "reward": sum(rewards[-50:]) / 50,
    }
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
