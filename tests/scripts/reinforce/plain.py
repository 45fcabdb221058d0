# SPDX-License-Identifier: BSD-3-Clause
"""REINFORCE: catch a falling ball, one episode per update, until the game is solved."""

import argparse
import json
from collections import deque

import torch
from torch import nn, optim
from torch.distributions import Categorical
from torch.nn import functional as F

parser = argparse.ArgumentParser(description="REINFORCE")
parser.add_argument("--gamma", type=float, default=0.99)
parser.add_argument("--seed", type=int, default=543)
parser.add_argument("--max-episodes", type=int, default=3000)
parser.add_argument("--log-interval", type=int, default=50)
args = parser.parse_args()
torch.manual_seed(args.seed)


class Catch:
    """A ball falls down three rows; a paddle below it moves left, right, or not at all."""

    reward_threshold = 0.7

    def reset(self):
        self.row = 0
        self.ball = int(torch.randint(4, ()))
        self.paddle = int(torch.randint(4, ()))
        return self.observe()

    def observe(self):
        position = torch.tensor([self.ball, self.paddle])
        return torch.cat([F.one_hot(position, 4).flatten().float(), torch.tensor([self.row / 3])])

    def step(self, action):
        self.row += 1
        self.paddle = min(3, max(0, self.paddle + action - 1))
        done = self.row == 3
        reward = (1.0 if self.ball == self.paddle else -1.0) if done else 0.0
        return self.observe(), reward, done


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.affine1 = nn.Linear(9, 32)
        self.affine2 = nn.Linear(32, 3)
        self.saved_log_probs = []
        self.rewards = []

    def forward(self, x):
        return F.softmax(self.affine2(F.relu(self.affine1(x))), dim=-1)


env = Catch()
policy = Policy()
optimizer = optim.Adam(policy.parameters(), lr=3e-3)


def select_action(state):
    m = Categorical(policy(state))
    action = m.sample()
    policy.saved_log_probs.append(m.log_prob(action))
    return action.item()


def finish_episode(baseline):
    total = 0.0
    returns = deque()
    for r in policy.rewards[::-1]:
        total = r + args.gamma * total
        returns.appendleft(total)
    policy_loss = [
        -p * (r - baseline) for p, r in zip(policy.saved_log_probs, returns, strict=True)
    ]
    optimizer.zero_grad()
    torch.stack(policy_loss).sum().backward()
    optimizer.step()
    del policy.rewards[:]
    del policy.saved_log_probs[:]


def main():
    running_reward = -0.5
    for i_episode in range(1, args.max_episodes + 1):
        state, ep_reward, done = env.reset(), 0.0, False
        while not done:
            state, reward, done = env.step(select_action(state))
            policy.rewards.append(reward)
            ep_reward += reward
        finish_episode(baseline=running_reward)
        running_reward = 0.05 * ep_reward + 0.95 * running_reward
        if i_episode % args.log_interval == 0:
            print(f"Episode {i_episode}\tAverage reward: {running_reward:.2f}")
        if running_reward > env.reward_threshold:
            print(f"Solved! Running reward is now {running_reward:.2f}")
            break
    torch.save(policy.state_dict(), "policy.pt")
    print(json.dumps({"episodes": i_episode, "checkpoints": 1, "reward": running_reward}))


if __name__ == "__main__":
    main()
