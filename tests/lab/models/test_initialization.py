# SPDX-License-Identifier: BSD-3-Clause
"""He initialization keeps the mean square of activations through many layers."""

import torch
from torch import nn

from paceline.lab.models.initialization import init_he


def network(layers=8):
    torch.manual_seed(0)
    hidden = [part for _ in range(layers) for part in (nn.Linear(256, 256), nn.ReLU())]
    return nn.Sequential(*hidden, nn.Linear(256, 10))


@torch.no_grad()
def test_mean_square_survives_eight_layers():
    x = torch.randn(500, 256)
    default, he = network(), network()
    init_he(he)
    shrunk, kept = (model[:-1](x).square().mean().item() for model in (default, he))
    assert shrunk < 0.01
    assert 0.3 < kept < 3


def test_last_layer_keeps_the_defaults_and_biases_are_zero():
    default, he = network(2), network(2)
    init_he(he)
    assert torch.equal(he[-1].weight, default[-1].weight)
    assert not torch.equal(he[0].weight, default[0].weight)
    assert he[0].bias.eq(0).all()
