# SPDX-License-Identifier: BSD-3-Clause
"""Train a generative adversarial network to draw digits: two models, two optimizers.

$ paceline run --workers 4 --policy backup:1 --steps 1000 examples/gan.py
server    | 1000 updates of 96000 samples in 6.4 s
worker 0  | energy distance 3.30 at first, 0.29 at last
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import softplus
from torch.utils.data import DataLoader

import paceline

parser = argparse.ArgumentParser(description="Train a GAN to draw digits.")
parser.add_argument("--lr", type=float, default=0.002)
parser.add_argument("--epochs", type=int, default=30)
parser.add_argument("--seed", type=int, default=0)
args = parser.parse_args()

torch.manual_seed(args.seed)
images = torch.tensor(load_digits().data, dtype=torch.float32) / 16
loader = DataLoader(images, batch_size=32, shuffle=True)

generator = nn.Sequential(nn.Linear(16, 128), nn.ReLU(), nn.Linear(128, 64), nn.Sigmoid())
discriminator = nn.Sequential(nn.Linear(64, 128), nn.LeakyReLU(0.2), nn.Linear(128, 1))
g_optimizer = torch.optim.Adam(generator.parameters(), lr=args.lr, betas=(0.5, 0.999))
d_optimizer = torch.optim.Adam(discriminator.parameters(), lr=args.lr, betas=(0.5, 0.999))

run = paceline.join()
generator, discriminator, g_optimizer, d_optimizer, loader = run.prepare(
    generator, discriminator, g_optimizer, d_optimizer, loader
)


def draw(count):
    return generator(torch.randn(count, 16))


@torch.no_grad()
def distance():
    """Return the energy distance between drawn and real images; 0 means identical."""
    drawn = draw(len(images))
    across, within = torch.cdist(images, drawn), torch.cdist(images, images)
    return (2 * across.mean() - within.mean() - torch.cdist(drawn, drawn).mean()).item()


before = distance()
for _ in range(args.epochs):
    for real in loader:
        d_optimizer.zero_grad()
        d_loss = (
            softplus(-discriminator(real)).mean()
            + softplus(discriminator(draw(32).detach())).mean()
        )
        d_loss.backward()
        d_optimizer.step()  # one update

        g_optimizer.zero_grad()
        g_loss = softplus(-discriminator(draw(32))).mean()
        g_loss.backward()
        g_optimizer.step()  # another update: 1000 updates are 500 of each model
        run.log(d_loss=d_loss.item(), g_loss=g_loss.item())

if run.is_first:
    print(f"energy distance {before:.2f} at first, {distance():.2f} at last")
