# SPDX-License-Identifier: BSD-3-Clause
"""The interface of a training problem: a model, reproducible mini-batches, and an evaluation.

A problem is a frozen value. What it returns depends only on its fields and on the draw, never on
earlier draws: a mini-batch is the same whether it is computed alone or with others, now or after a
resume, and a mini-batch that nobody needs is never created.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from torch import Tensor, nn

__all__ = ["Draw", "Problem"]


class Draw(NamedTuple):
    """A mini-batch, identified by the worker that computes on it and its number, from 0.

    Mini-batches are numbered in the order that all workers of a run share. If each worker draws its
    own, as in a simulation, they are numbered on each worker.
    """

    worker: int
    number: int


@dataclass(frozen=True)
class Problem(ABC):
    """A model to train, and its data."""

    batch: int
    """Samples per gradient."""

    seed: int = 0
    """Seed of the initial weights and of every mini-batch."""

    name: ClassVar[str]
    """Part of the key of stored results, so it must not change."""
    pass_samples: ClassVar[int] = 512
    """Samples to put through the model in one pass, if that many are available; a larger pass isn't
    any faster."""

    @property
    @abstractmethod
    def samples(self) -> int:
        """The size of the training set, which is one epoch."""

    @abstractmethod
    def build(self) -> nn.Module:
        """Return the model with its initial weights; torch has been seeded before the call."""

    @abstractmethod
    def losses(self, model: nn.Module, draws: Sequence[Draw]) -> Tensor:
        """Return the mean loss of each draw, computed in one pass; their gradients don't mix."""

    @abstractmethod
    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Return the scores of the model on test data; it is in evaluation mode."""
