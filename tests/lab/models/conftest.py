# SPDX-License-Identifier: BSD-3-Clause
"""Fixtures for the tests of single models."""

import pytest
import torch
from torch import nn


@pytest.fixture
def multiplications():
    """Count the multiplications of a model's convolutions and linear layers."""

    def count_all(model, x):
        counts = []

        def count(layer, _, output):
            positions = output[0, 0].numel() if output.dim() == 4 else 1
            counts.append(positions * layer.weight.numel())

        for layer in model.modules():
            if isinstance(layer, nn.Conv2d | nn.Linear):
                layer.register_forward_hook(count)
        with torch.no_grad():
            model.eval()(x)
        return sum(counts)

    return count_all


@pytest.fixture
def parameter_counts():
    """Count the parameters of models of several widths, without allocating them."""

    def count_all(build, *widths):
        with torch.device("meta"):
            models = [build(width=width) for width in widths]
        return [sum(p.numel() for p in model.parameters()) for model in models]

    return count_all
