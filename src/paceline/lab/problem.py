# SPDX-License-Identifier: BSD-3-Clause
"""The contract of a problem: a model, mini-batches that can be drawn again, and how good it is.

A problem is a frozen value. What it gives depends on its fields and on the draw alone, never on
what was drawn before: a mini-batch is the same whether it is computed alone or with others, now or
after a resume, and one that nobody needs is never made.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from torch import Tensor, nn

__all__ = ["Draw", "Problem"]


class Draw(NamedTuple):
    """A mini-batch: the worker's own of that number, from 0."""

    worker: int
    number: int


@dataclass(frozen=True)
class Problem(ABC):
    """What is trained."""

    batch: int
    """Samples of one gradient."""

    seed: int = 0
    """Of the first weights, and of every mini-batch."""

    name: ClassVar[str]
    pass_samples: ClassVar[int] = 512
    """As many as go through the model at once, where more can: beyond that nothing is gained."""

    @property
    @abstractmethod
    def samples(self) -> int:
        """How many there are to train on: an epoch."""

    @abstractmethod
    def build(self) -> nn.Module:
        """The model with its first weights; torch's random numbers were set from the seed."""

    @abstractmethod
    def losses(self, model: nn.Module, draws: Sequence[Draw]) -> Tensor:
        """The mean loss of each draw, several in one pass; their gradients do not mix."""

    @abstractmethod
    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """How good the model is on data that it was not trained on; it is in evaluation mode."""
