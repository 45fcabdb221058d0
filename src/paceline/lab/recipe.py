# SPDX-License-Identifier: BSD-3-Clause
"""How an update is made of a gradient: the optimizer, its rate over time, clipping, averaging."""

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
    """The rate of an update depends on how much data was used by then, not on who gave it."""

    rate_max: float
    method: Literal["sgd", "rmsprop", "adam"] = "sgd"
    momentum: float = 0.0
    smoothing: float = 0.9
    """Of the squares that rmsprop divides by."""
    eps: float = 1.0
    """Added there; the paper's 1 keeps the first steps small, when squares are not known yet."""
    weight_decay: float = 0.0
    fall_from: float = 1.0
    """From this part of the run on the rate goes to 0, in a straight line; 1: it does not."""
    clip_norm: float | None = None
    ema: float | None = None

    def __post_init__(self) -> None:
        if not self.rate_max > 0:
            raise SpecError(f"a rate must be > 0, got {self.rate_max}")

    def rate(self, epochs: float, epochs_in_all: float) -> float:
        """The learning rate after so many epochs of data."""
        part = epochs / epochs_in_all
        if part <= self.fall_from:
            return self.rate_max
        return self.rate_max * max(0.0, 1 - part) / (1 - self.fall_from)

    def optimizer(self, parameters: Sequence[Tensor]) -> Optimizer:
        """The optimizer of torch."""
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
