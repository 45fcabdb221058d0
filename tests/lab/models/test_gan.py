# SPDX-License-Identifier: BSD-3-Clause
"""GANs: one backward pass gives both networks their own gradients."""

import pytest
import torch
from torch.nn.functional import softplus

from paceline.lab.models.gan import digits_gan, mnist_gan

both = pytest.mark.parametrize(("build", "size"), [(digits_gan, 8), (mnist_gan, 28)])


def setting(build, size):
    torch.manual_seed(0)
    gan = build().double()
    real = torch.rand(6, 1, size, size, dtype=torch.double)
    return gan, real, torch.randn(6, gan.noise, dtype=torch.double)


@both
def test_one_backward_pass_gives_each_network_the_gradient_of_its_own_loss(build, size):
    gan, real, noise = setting(build, size)
    drawn = gan.generator(noise)
    shown = gan.discriminator(drawn.detach())
    d_loss = (softplus(-gan.discriminator(real)) + softplus(shown)).sum()
    g_loss = softplus(-gan.discriminator(drawn)).sum()
    d_parameters = list(gan.discriminator.parameters())
    g_parameters = list(gan.generator.parameters())
    d_gradient = torch.autograd.grad(d_loss, d_parameters)
    g_gradient = torch.autograd.grad(g_loss, g_parameters)

    losses = gan.losses(real, noise)
    losses.sum().backward()
    torch.testing.assert_close(losses.sum(), d_loss + g_loss)
    torch.testing.assert_close([p.grad for p in d_parameters], list(d_gradient))
    torch.testing.assert_close([p.grad for p in g_parameters], list(g_gradient))


@both
def test_sum_of_both_losses_is_the_loss(build, size):
    gan, real, noise = setting(build, size)
    d_losses, g_losses = gan.both_losses(real, noise)
    assert d_losses.shape == g_losses.shape == (6,)
    torch.testing.assert_close(d_losses + g_losses, gan.losses(real, noise))


@both
@torch.no_grad()
def test_generated_images_have_the_shape_and_range_of_images(build, size):
    gan, real, noise = setting(build, size)
    drawn = gan(noise)
    assert drawn.shape == real.shape
    assert ((drawn >= 0) & (drawn <= 1)).all()


def test_generated_images_become_like_real_ones():
    """If real images are white on the left, so are generated ones after some training."""
    torch.manual_seed(0)
    gan = digits_gan()
    real = torch.zeros(32, 1, 8, 8)
    real[..., :4] = 1.0

    def distance():
        with torch.no_grad():
            return (gan(torch.randn(64, gan.noise)) - real[0]).abs().mean().item()

    first = distance()
    optimizer = torch.optim.Adam(gan.parameters(), lr=0.002, betas=(0.5, 0.999))
    for _ in range(100):
        optimizer.zero_grad()
        gan.losses(real, torch.randn(32, gan.noise)).mean().backward()
        optimizer.step()
    assert distance() < first / 2
