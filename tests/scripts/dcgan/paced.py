# SPDX-License-Identifier: BSD-3-Clause
"""A DCGAN: two models with batch norm, two optimizers, three backward passes per batch."""

import argparse
import json

import torch
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset

import paceline

parser = argparse.ArgumentParser(description="DCGAN")
parser.add_argument("--batch-size", type=int, default=32)
parser.add_argument("--nz", type=int, default=16, help="size of the latent z vector")
parser.add_argument("--niter", type=int, default=4, help="number of epochs")
parser.add_argument("--lr", type=float, default=0.002)
parser.add_argument("--beta1", type=float, default=0.5)
parser.add_argument("--manual-seed", type=int, default=999)
opt = parser.parse_args()

torch.manual_seed(opt.manual_seed)
device = torch.device("cpu")


def draw_spots(count):
    """Images of 8 x 8 pixels between -1 and 1, each with one round spot."""
    generator = torch.Generator().manual_seed(0)
    x, y = torch.rand(2, count, 1, 1, generator=generator) * 4 + 1.5
    at = torch.arange(8.0)
    distance = (at.view(1, 1, 8) - x) ** 2 + (at.view(1, 8, 1) - y) ** 2
    return (2 * torch.exp(-distance / 3) - 1)[:, None]


images = draw_spots(960)
dataloader = DataLoader(TensorDataset(images), batch_size=opt.batch_size, shuffle=True)


def weights_init(m):
    classname = m.__class__.__name__
    if "Conv" in classname:
        nn.init.normal_(m.weight, 0.0, 0.05)
    elif "BatchNorm" in classname:
        nn.init.normal_(m.weight, 1.0, 0.02)
        nn.init.zeros_(m.bias)


class Generator(nn.Module):
    def __init__(self, nz, ngf=16):
        super().__init__()
        self.main = nn.Sequential(
            nn.ConvTranspose2d(nz, ngf * 2, 2, 1, 0, bias=False),
            nn.BatchNorm2d(ngf * 2),
            nn.ReLU(True),
            nn.ConvTranspose2d(ngf * 2, ngf, 4, 2, 1, bias=False),
            nn.BatchNorm2d(ngf),
            nn.ReLU(True),
            nn.ConvTranspose2d(ngf, 1, 4, 2, 1, bias=False),
            nn.Tanh(),
        )

    def forward(self, inputs):
        return self.main(inputs)


class Discriminator(nn.Module):
    def __init__(self, ndf=16):
        super().__init__()
        self.main = nn.Sequential(
            nn.Conv2d(1, ndf, 4, 2, 1, bias=False),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(ndf, ndf * 2, 4, 2, 1, bias=False),
            nn.BatchNorm2d(ndf * 2),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(ndf * 2, 1, 2, 1, 0, bias=False),
            nn.Sigmoid(),
        )

    def forward(self, inputs):
        return self.main(inputs).view(-1)


netG = Generator(opt.nz).to(device)
netG.apply(weights_init)
netD = Discriminator().to(device)
netD.apply(weights_init)
criterion = nn.BCELoss()
fixed_noise = torch.randn(256, opt.nz, 1, 1, device=device)
optimizerD = optim.Adam(netD.parameters(), lr=opt.lr, betas=(opt.beta1, 0.999))
optimizerG = optim.Adam(netG.parameters(), lr=opt.lr, betas=(opt.beta1, 0.999))

run = paceline.join()
netG, netD, optimizerG, optimizerD, dataloader = run.prepare(
    netG, netD, optimizerG, optimizerD, dataloader
)


@torch.no_grad()
def energy_distance():
    """Return how far the drawn images are from the real ones; 0 means the same distribution."""
    real, fake = images[:256].flatten(1), netG(fixed_noise).flatten(1)
    within = torch.cdist(real, real).mean() + torch.cdist(fake, fake).mean()
    return (2 * torch.cdist(real, fake).mean() - within).item()


before = energy_distance()
distances, checkpoints = [], 0
for epoch in range(opt.niter):
    for i, (data,) in enumerate(dataloader):
        # Update D: maximize log(D(x)) + log(1 - D(G(z)))
        netD.zero_grad()
        real = data.to(device)
        label = torch.full((real.size(0),), 1.0, device=device)
        errD_real = criterion(netD(real), label)
        errD_real.backward()

        noise = torch.randn(real.size(0), opt.nz, 1, 1, device=device)
        fake = netG(noise)
        label.fill_(0.0)
        errD_fake = criterion(netD(fake.detach()), label)
        errD_fake.backward()
        errD = errD_real + errD_fake
        optimizerD.step()

        # Update G: maximize log(D(G(z)))
        netG.zero_grad()
        label.fill_(1.0)
        errG = criterion(netD(fake), label)
        errG.backward()
        optimizerG.step()

        if i % 10 == 0:
            losses = f"Loss_D: {errD.item():.4f} Loss_G: {errG.item():.4f}"
            print(f"[{epoch}/{opt.niter}][{i}/{len(dataloader)}] {losses}")

    distances.append(energy_distance())
    torch.save(netG.state_dict(), f"netG_epoch_{epoch}.pth")
    torch.save(netD.state_dict(), f"netD_epoch_{epoch}.pth")
    checkpoints += 2

facts = {
    "epochs": epoch + 1,
    "validations": len(distances),
    "checkpoints": checkpoints,
    "before": before,
    "distance": distances[-1],
}
print(json.dumps(facts))
