# SPDX-License-Identifier: BSD-3-Clause
"""A Wasserstein GAN: the critic's weights are clipped after each of its steps.

The clipping is a hook of the optimizer, so that it runs where the optimizer steps.
"""

import argparse
import json
import math

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser(description="WGAN")
parser.add_argument("--n-epochs", type=int, default=12)
parser.add_argument("--batch-size", type=int, default=32)
parser.add_argument("--lr", type=float, default=0.002)
parser.add_argument("--n-critic", type=int, default=5, help="steps of the critic per generator's")
parser.add_argument("--clip-value", type=float, default=0.1)
parser.add_argument("--latent-dim", type=int, default=4)
opt = parser.parse_args()
torch.manual_seed(0)


def draw_ring(count):
    """Points on a ring with a radius of 2."""
    generator = torch.Generator().manual_seed(0)
    angle = torch.rand(count, generator=generator) * 2 * math.pi
    points = 2 * torch.stack([angle.cos(), angle.sin()], 1)
    return points + 0.05 * torch.randn(points.shape, generator=generator)


points = draw_ring(1920)
dataloader = DataLoader(TensorDataset(points), batch_size=opt.batch_size, shuffle=True)

generator = nn.Sequential(
    nn.Linear(opt.latent_dim, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2)
)
critic = nn.Sequential(
    nn.Linear(2, 64), nn.LeakyReLU(0.2), nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1)
)
optimizer_g = torch.optim.RMSprop(generator.parameters(), lr=opt.lr)
optimizer_c = torch.optim.RMSprop(critic.parameters(), lr=opt.lr)


@torch.no_grad()
def clip_weights(optimizer, *_):
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.clamp_(-opt.clip_value, opt.clip_value)


optimizer_c.register_step_post_hook(clip_weights)


@torch.no_grad()
def energy_distance():
    real = points[:500]
    fake = generator(torch.randn(500, opt.latent_dim, generator=torch.Generator().manual_seed(1)))
    within = torch.cdist(real, real).mean() + torch.cdist(fake, fake).mean()
    return (2 * torch.cdist(real, fake).mean() - within).item()


before = energy_distance()
distances, largest, generator_steps = [], [], 0
for epoch in range(opt.n_epochs):
    for i, (real,) in enumerate(dataloader):
        optimizer_c.zero_grad()
        z = torch.randn(real.size(0), opt.latent_dim)
        fake = generator(z).detach()
        loss_c = -critic(real).mean() + critic(fake).mean()
        loss_c.backward()
        optimizer_c.step()

        if i % opt.n_critic == 0:
            optimizer_g.zero_grad()
            loss_g = -critic(generator(z)).mean()
            loss_g.backward()
            optimizer_g.step()
            generator_steps += 1

    distances.append(energy_distance())
    largest.append(max(p.abs().max().item() for p in critic.parameters()))
    print(f"[Epoch {epoch}/{opt.n_epochs}] [distance: {distances[-1]:.4f}]")

torch.save({"generator": generator.state_dict(), "critic": critic.state_dict()}, "wgan.pt")
facts = {
    "epochs": epoch + 1,
    "validations": len(distances),
    "checkpoints": 1,
    "generator_steps": generator_steps,
    "largest_weight": max(largest),
    "before": before,
    "distance": min(distances),
}
print(json.dumps(facts))
