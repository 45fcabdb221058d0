# SPDX-License-Identifier: BSD-3-Clause
"""A generative adversarial network whose two players learn from one backward pass.

Each player has its own loss, and must not learn from the other's. The discriminator is shown drawn
images as constants, and the generator's images are judged with constants in place of the
discriminator's parameters; so the gradient of the sum of both losses is, for each player's
parameters, the gradient of its own. A worker's gradient is then one vector, as for any model.

`mnist_gan` has 60,209 + 10,065 parameters (generator + discriminator), `digits_gan` 10,432 + 8,449.
"""

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import softplus

__all__ = ["Gan", "digits_gan", "mnist_gan"]


class Gan(nn.Module):
    """A generator of images from noise [B, noise], and a discriminator that scores images.

    A high score says: real. Losses are the ones of Goodfellow et al. (2014), the generator's
    the one that does not saturate.
    """

    def __init__(self, generator: nn.Module, discriminator: nn.Module, noise: int) -> None:
        super().__init__()
        self.generator = generator
        self.discriminator = discriminator
        self.noise = noise

    def forward(self, noise: Tensor) -> Tensor:
        """Draw images."""
        images: Tensor = self.generator(noise)
        return images

    def losses(self, real: Tensor, noise: Tensor) -> Tensor:
        """Of each sample [B], the discriminator's and the generator's added."""
        discriminator, generator = self.both_losses(real, noise)
        return discriminator + generator

    def both_losses(self, real: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Of each sample [B], the discriminator's and the generator's; neither moves the other."""
        drawn = self.generator(noise)
        both = torch.cat([real, drawn.detach()])
        score_of_real, score_of_drawn = self.discriminator(both).flatten().chunk(2)
        constants = {name: p.detach() for name, p in self.discriminator.named_parameters()}
        judged = functional_call(self.discriminator, constants, drawn).flatten()
        return softplus(-score_of_real) + softplus(score_of_drawn), softplus(-judged)


def mnist_gan(noise: int = 32) -> Gan:
    """For images [B, 1, 28, 28] with values between 0 and 1."""
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
    """For images [B, 1, 8, 8] with values between 0 and 1."""
    generator = nn.Sequential(
        *(nn.Linear(noise, 128), nn.ReLU()),
        *(nn.Linear(128, 64), nn.Sigmoid(), nn.Unflatten(1, (1, 8, 8))),
    )
    discriminator = nn.Sequential(
        nn.Flatten(), nn.Linear(64, 128), nn.LeakyReLU(0.2), nn.Linear(128, 1)
    )
    return Gan(generator, discriminator, noise)
