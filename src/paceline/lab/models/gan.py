# SPDX-License-Identifier: BSD-3-Clause
"""A generative adversarial network whose two networks learn from one backward pass.

Each network has its own loss and must not learn from the other's. The discriminator sees generated
images as constants, and for the generator's loss the discriminator's parameters are constants. So
the gradient of the sum of both losses is, for each network, the gradient of its own loss. A
worker's gradient is then one vector, as for any model.

`mnist_gan` has 60,209 + 10,065 parameters (generator + discriminator), `digits_gan` 10,432 + 8,449.
"""

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import softplus

__all__ = ["Gan", "digits_gan", "mnist_gan"]


class Gan(nn.Module):
    """A generator of images from noise [B, noise], and a discriminator that scores images.

    A high score means "real". The losses are those of Goodfellow et al. (2014), with the
    non-saturating one for the generator.
    """

    def __init__(self, generator: nn.Module, discriminator: nn.Module, noise: int) -> None:
        super().__init__()
        self.generator = generator
        self.discriminator = discriminator
        self.noise = noise

    def forward(self, noise: Tensor) -> Tensor:
        """Generate images."""
        images: Tensor = self.generator(noise)
        return images

    def losses(self, real: Tensor, noise: Tensor) -> Tensor:
        """Return the sum of both losses of each sample [B]."""
        discriminator, generator = self.both_losses(real, noise)
        return discriminator + generator

    def both_losses(self, real: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Return the losses [B] of discriminator and generator, with separate gradients."""
        generated = self.generator(noise)
        both = torch.cat([real, generated.detach()])
        real_scores, generated_scores = self.discriminator(both).flatten().chunk(2)
        constants = {name: p.detach() for name, p in self.discriminator.named_parameters()}
        judged = functional_call(self.discriminator, constants, generated).flatten()
        return softplus(-real_scores) + softplus(generated_scores), softplus(-judged)


def mnist_gan(noise: int = 32) -> Gan:
    """Return a GAN for images [B, 1, 28, 28] with values between 0 and 1."""
    generator = nn.Sequential(
        *(nn.Linear(noise, 32 * 7 * 7), nn.ReLU(), nn.Unflatten(1, (32, 7, 7))),
        *(nn.ConvTranspose2d(32, 16, 4, 2, 1), nn.ReLU()),
        *(nn.ConvTranspose2d(16, 1, 4, 2, 1), nn.Sigmoid()),
    )
    discriminator = nn.Sequential(
        *(nn.Conv2d(1, 16, 4, 2, 1), nn.LeakyReLU(0.2)),
        *(nn.Conv2d(16, 32, 4, 2, 1), nn.LeakyReLU(0.2)),
        *(nn.Flatten(), nn.Linear(32 * 7 * 7, 1)),
    )
    return Gan(generator, discriminator, noise)


def digits_gan(noise: int = 16) -> Gan:
    """Return a GAN for images [B, 1, 8, 8] with values between 0 and 1."""
    generator = nn.Sequential(
        *(nn.Linear(noise, 128), nn.ReLU()),
        *(nn.Linear(128, 64), nn.Sigmoid(), nn.Unflatten(1, (1, 8, 8))),
    )
    discriminator = nn.Sequential(
        nn.Flatten(), nn.Linear(64, 128), nn.LeakyReLU(0.2), nn.Linear(128, 1)
    )
    return Gan(generator, discriminator, noise)
