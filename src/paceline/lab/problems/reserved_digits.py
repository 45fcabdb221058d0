# SPDX-License-Identifier: BSD-3-Clause
"""MNIST with some digits on some workers only: their accuracy shows whose gradients count."""

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import ClassVar

import torch
from torch import nn

from paceline.lab.data.sampling import Shares
from paceline.lab.problems.images import SCORED_AT_ONCE, Digits, load_mnist

__all__ = ["ReservedDigits"]


@dataclass(frozen=True, kw_only=True)
class ReservedDigits(Digits):
    """Every worker has all digits, except the reserved ones, which only their owners have."""

    name: ClassVar[str] = "reserved digits"

    reserved: tuple[int, ...]
    owners: tuple[int, ...]
    workers: int

    def pool(self) -> Shares:
        return _shares(self.data, self.reserved, self.owners, self.workers)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        images = self.images()
        labels = images.test_y[: self.scored]
        answers = torch.cat(
            [
                model(self.preprocess(images.test_x[i : i + SCORED_AT_ONCE], [])).argmax(1)
                for i in range(0, self.scored, SCORED_AT_ONCE)
            ]
        )
        is_right = (answers[: self.scored] == labels).double()
        is_reserved = torch.isin(labels, torch.tensor(self.reserved))
        return {
            "accuracy": is_right.mean().item(),
            "reserved": is_right[is_reserved].mean().item(),
            "others": is_right[~is_reserved].mean().item(),
        }


@lru_cache(maxsize=1)
def _shares(data: Path, reserved: tuple[int, ...], owners: tuple[int, ...], workers: int) -> Shares:
    labels = load_mnist(data).train_y
    return Shares.reserved(labels, workers, dict.fromkeys(reserved, owners))
