# SPDX-License-Identifier: BSD-3-Clause
"""The models of the runtime benchmark, the same for Paceline and for DDP."""

import torch
from torch import Tensor, nn

__all__ = ["WORKLOADS", "Workload"]


class Workload:
    """A model, a fixed batch, and the number of steps to time."""

    def __init__(self, model: nn.Module, batch: Tensor, steps: int) -> None:
        self.model = model
        self.batch = batch
        self.steps = steps

    def loss(self) -> Tensor:
        """Return a scalar to minimize."""
        return self.model(self.batch).square().mean()


def _stack(width: int, layers: int, batch: int, steps: int) -> Workload:
    """Square layers with nothing between them: as little computation per parameter as possible."""
    model = nn.Sequential(*[nn.Linear(width, width) for _ in range(layers)])
    return Workload(model, torch.randn(batch, width), steps)


def _cnn() -> Workload:
    """About 100,000 parameters with much computation per parameter."""
    layers: list[nn.Module] = []
    channels = 3
    for width in (32, 64, 64):
        layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
        channels = width
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(channels * 16, 10))
    return Workload(model, torch.randn(32, 3, 32, 32), 30)


WORKLOADS = {
    "25m": lambda: _stack(2041, 6, batch=1, steps=12),
    "1m": lambda: _stack(408, 6, batch=1, steps=200),
    "cnn": _cnn,
    "tiny": lambda: _stack(16, 2, batch=4, steps=100),
}
