# SPDX-License-Identifier: BSD-3-Clause
"""How an update follows from a gradient: optimizer, learning rate, clipping, weight averaging."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from paceline.errors import SpecError

__all__ = ["Recipe"]


@dataclass(frozen=True)
class Recipe:
    """Hyperparameters of a training run.

    The learning rate depends on how much data has been used, not on how many updates that took.
    """

    rate_max: float
    method: Literal["sgd", "rmsprop", "adam"] = "sgd"
    momentum: float = 0.0
    smoothing: float = 0.9
    """Decay of RMSProp's running mean of squared gradients."""
    eps: float = 1.0
    """Added to RMSProp's denominator. The paper's 1 keeps the first steps small, while the mean of
    squares is still unknown."""
    weight_decay: float = 0.0
    fall_from: float = 1.0
    """Fraction of the run after which the rate falls linearly to 0; 1 keeps it constant."""
    clip_norm: float | None = None
    ema: float | None = None

    def __post_init__(self) -> None:
        if not self.rate_max > 0:
            raise SpecError(f"rate must be > 0, got {self.rate_max}")

    def rate(self, epochs: float, epochs_in_all: float) -> float:
        """Return the learning rate after this many epochs of data."""
        fraction = epochs / epochs_in_all
        if fraction <= self.fall_from:
            return self.rate_max
        return self.rate_max * max(0.0, 1 - fraction) / (1 - self.fall_from)

    def optimizer(self, parameters: Sequence[Tensor]) -> Optimizer:
        """Return the torch optimizer for these parameters."""
        rate, decay = self.rate_max, self.weight_decay
        match self.method:
            case "sgd":
                return torch.optim.SGD(parameters, rate, self.momentum, weight_decay=decay)
            case "rmsprop":
                return torch.optim.RMSprop(
                    parameters, rate, self.smoothing, self.eps, decay, self.momentum
                )
            case "adam":
                return torch.optim.Adam(parameters, rate, weight_decay=decay)
