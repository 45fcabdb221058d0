# SPDX-License-Identifier: BSD-3-Clause
"""Predict the next character of Shakespeare's plays, with an LSTM or a transformer."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import log
from pathlib import Path
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from paceline.lab.data import shakespeare
from paceline.lab.data.sampling import sample_indices
from paceline.lab.models.char_lm import CharLstm, CharTransformer
from paceline.lab.problem import Draw, Problem

__all__ = ["Shakespeare"]

SCORED_AT_ONCE = 100

load_shakespeare = lru_cache(maxsize=1)(shakespeare.load_shakespeare)


@dataclass(frozen=True, kw_only=True)
class Shakespeare(Problem):
    """A sample is a piece of the text at a random position; the model predicts each character."""

    name: ClassVar[str] = "shakespeare"

    data: Path = field(compare=False)
    """Folder of the data sets."""
    model: Literal["lstm", "transformer"]
    width: int
    length: int = 64
    """Characters per piece."""
    scored: int = 1000
    """How many pieces of the test text to evaluate on, from the first."""

    @property
    def samples(self) -> int:
        return len(load_shakespeare(self.data).train) // self.length

    def build(self) -> nn.Module:
        symbols = len(load_shakespeare(self.data).symbols)
        if self.model == "lstm":
            return CharLstm(symbols, self.width)
        return CharTransformer(symbols, self.width, length_max=self.length)

    def losses(self, model: nn.Module, draws: Sequence[Draw]) -> Tensor:
        train = load_shakespeare(self.data).train
        begins = sample_indices(self.seed, draws, self.batch, len(train) - self.length)
        return self._bits(model, train, begins).view(len(draws), -1).mean(1)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        test = load_shakespeare(self.data).test
        begins = torch.arange(0, len(test) - self.length, self.length)[: self.scored]
        bits = [
            self._bits(model, test, begins[i : i + SCORED_AT_ONCE])
            for i in range(0, len(begins), SCORED_AT_ONCE)
        ]
        return {"bits": torch.cat(bits).mean().item()}

    def _bits(self, model: nn.Module, characters: Tensor, begins: Tensor) -> Tensor:
        """Return the mean bits per character of the pieces that begin at these positions."""
        pieces = characters[begins[:, None] + torch.arange(self.length + 1)].long()
        scores = model(pieces[:, :-1]).transpose(1, 2)
        return cross_entropy(scores, pieces[:, 1:], reduction="none").mean(1) / log(2)
