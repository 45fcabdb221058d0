# SPDX-License-Identifier: BSD-3-Clause
"""Rules that every model keeps, checked for a table of all models."""

import copy
import pickle
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from paceline.lab.models import cartpole
from paceline.lab.models.alexnet import AlexNet, SmallAlexNet
from paceline.lab.models.char_lm import CharLstm, CharTransformer
from paceline.lab.models.gan import digits_gan, mnist_gan
from paceline.lab.models.googlenet import GoogLeNet, SmallGoogLeNet
from paceline.lab.models.inception import Inception
from paceline.lab.models.logistic import Logistic
from paceline.lab.models.mnist_cnn import MnistCnn
from paceline.lab.models.normalization import set_groups
from paceline.lab.models.pixelcnn import PixelCnn, bits_per_dimension

BATCH = 4

GROUPS = 3


class ModelCase(NamedTuple):
    """A small model, its mini-batches, and the losses of its samples."""

    build: Callable[[], nn.Module]
    draw: Callable[[], tuple[Tensor, ...]]  # samples along the first dimension
    losses: Callable[..., Tensor]  # one per sample, from the model and the mini-batch


def images(channels, size, classes=10):
    return lambda: (torch.rand(BATCH, channels, size, size), torch.randint(classes, (BATCH,)))


def class_losses(model, x, y):
    return cross_entropy(model(x.to(dtype(model))), y, reduction="none")


def letters():
    pieces = torch.randint(11, (BATCH, 9))
    return pieces[:, :-1], pieces[:, 1:]


def letter_losses(model, x, y):
    return cross_entropy(model(x).transpose(1, 2), y, reduction="none").mean(1)


def gan_losses(model, real, noise):
    return model.losses(real.to(dtype(model)), noise.to(dtype(model)))


def dtype(model):
    return next(model.parameters()).dtype


CASES = {
    "mnist_cnn": ModelCase(lambda: MnistCnn(width=0.25), images(1, 28), class_losses),
    "inception": ModelCase(lambda: Inception(width=0.5), images(3, 32), class_losses),
    "small_alexnet": ModelCase(lambda: SmallAlexNet(10, 32, 0.25), images(3, 32), class_losses),
    "small_googlenet": ModelCase(lambda: SmallGoogLeNet(10, 0.125), images(3, 32), class_losses),
    "pixelcnn": ModelCase(
        lambda: PixelCnn(width=6, layers=3, mixtures=2),
        lambda: (torch.randint(256, (BATCH, 3, 6, 6), dtype=torch.uint8),),
        bits_per_dimension,
    ),
    "char_lstm": ModelCase(lambda: CharLstm(11, 16, 2), letters, letter_losses),
    "char_transformer": ModelCase(lambda: CharTransformer(11, 16), letters, letter_losses),
    "digits_gan": ModelCase(
        digits_gan, lambda: (torch.rand(BATCH, 1, 8, 8), torch.randn(BATCH, 16)), gan_losses
    ),
    "mnist_gan": ModelCase(
        mnist_gan, lambda: (torch.rand(BATCH, 1, 28, 28), torch.randn(BATCH, 32)), gan_losses
    ),
    "logistic": ModelCase(
        lambda: Logistic(5, l2=0.1),
        lambda: (torch.randn(BATCH, 5), torch.randint(2, (BATCH,)) * 2.0 - 1),
        lambda model, x, y: model.losses(x, y),
    ),
}

every_model = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def made(case):
    torch.manual_seed(0)
    return case.build().train()


def gradient(model):
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


def float_buffers(model):
    return [buffer for buffer in model.buffers() if buffer.is_floating_point()]


@every_model
def test_mini_batches_in_one_pass_give_the_mean_of_their_gradients(case):
    model = made(case).double()
    draws = [case.draw() for _ in range(GROUPS)]
    alone, gradients = [], []
    for draw in draws:
        worker = copy.deepcopy(model)
        losses = case.losses(worker, *draw)
        losses.mean().backward()
        gradients.append(gradient(worker))
        alone.append((losses.detach(), float_buffers(worker)))

    set_groups(model, GROUPS)
    losses = case.losses(model, *map(torch.cat, zip(*draws, strict=True)))
    losses.view(GROUPS, BATCH).mean(1).mean().backward()

    torch.testing.assert_close(losses.detach(), torch.cat([one for one, _ in alone]))
    torch.testing.assert_close(gradient(model), torch.stack(gradients).mean(0))
    for ours, *theirs in zip(float_buffers(model), *(b for _, b in alone), strict=True):
        torch.testing.assert_close(ours, torch.stack(theirs).mean(0))


@every_model
def test_initial_weights_follow_from_the_seed(case):
    torch.testing.assert_close(made(case).state_dict(), made(case).state_dict(), rtol=0, atol=0)


@every_model
def test_every_parameter_has_a_gradient(case):
    """No parameter is left out of the graph or starts with a gradient of zero."""
    model = made(case)
    case.losses(model, *case.draw()).mean().backward()
    without = [name for name, p in model.named_parameters() if not p.grad.any()]
    assert without == []


@every_model
def test_copies_and_pickles_compute_the_same(case):
    model = made(case).eval()
    draw = case.draw()
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        torch.testing.assert_close(case.losses(other, *draw), case.losses(model, *draw))


@pytest.mark.parametrize("name", [name for name in CASES if "gan" not in name])
def test_loss_falls(name):
    case = CASES[name]
    model, draw = made(case), case.draw()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses = []
    for _ in range(15):
        loss = case.losses(model, *draw).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.95 * losses[0]


SIZES = {
    "mnist_cnn": (MnistCnn, 43_930),
    "inception": (Inception, 82_922),
    "pixelcnn": (PixelCnn, 108_434),
    "alexnet": (AlexNet, 61_100_840),  # as published and in torchvision
    "small_alexnet": (SmallAlexNet, 999_092),
    "googlenet": (GoogLeNet, 6_998_552),  # Caffe's, without the auxiliary heads
    "small_googlenet": (SmallGoogLeNet, 388_708),
    "char_lstm": (lambda: CharLstm(65), 148_801),
    "char_transformer": (lambda: CharTransformer(65), 124_865),
    "mnist_gan_generator": (lambda: mnist_gan().generator, 60_209),
    "mnist_gan_discriminator": (lambda: mnist_gan().discriminator, 10_065),
    "digits_gan_generator": (lambda: digits_gan().generator, 10_432),
    "digits_gan_discriminator": (lambda: digits_gan().discriminator, 8_449),
    "cartpole": (cartpole.policy, 450),
    "logistic": (lambda: Logistic(123, 0.1), 123),
}


@pytest.mark.parametrize("name", SIZES)
def test_parameter_count_is_as_documented(name):
    build, count = SIZES[name]
    with torch.device("meta"):  # allocates nothing
        model = build()
    assert sum(parameter.numel() for parameter in model.parameters()) == count
