# SPDX-License-Identifier: BSD-3-Clause
"""What the rules without a barrier have in common; not a rule itself.

A worker that has reported continues immediately with the newest version, and gradients of any
version count. The price is staleness. A rule can scale stale gradients (`lr=inverse`: a gradient
counts 1/staleness, Zhang et al. 2015) or refuse them (`bound=s`: more than s updates old).
"""

from dataclasses import dataclass, field
from typing import Literal, get_args

from paceline.core.events import Fate
from paceline.core.ledger import Ledger, Work
from paceline.core.policy import Policy
from paceline.errors import SpecError

__all__ = ["Free", "LearningRate"]

LearningRate = Literal["constant", "inverse"]


@dataclass(frozen=True)
class Free(Policy):
    """Base class of the rules under which no worker waits and any gradient counts."""

    lr: LearningRate = field(default="constant", kw_only=True)
    bound: int | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        if self.lr not in get_args(LearningRate):
            raise SpecError(f"lr must be 'constant' or 'inverse', got {self.lr!r}")
        if self.bound is not None and self.bound < 0:
            raise SpecError(f"bound must be >= 0, got {self.bound}; leave it out for no bound")

    @property
    def keeps_all(self) -> bool:
        """Whether there is no bound."""
        return self.bound is None

    def needed(self, ledger: Ledger) -> int:
        """Return 1: each gradient makes an update."""
        del ledger
        return 1

    def is_due(self, ledger: Ledger) -> bool:
        """Return whether enough gradients have arrived, from any workers."""
        return len(ledger.next_tally.contributions) >= self.needed(ledger)

    def assign(self, ledger: Ledger, worker: int) -> Work | None:
        """Return work at the newest version, without waiting."""
        del worker
        return Work(version=ledger.version, update=ledger.version + 1)

    def judge(self, ledger: Ledger, work: Work) -> Fate:
        """Accept the gradient unless it is older than the bound."""
        is_stale = self.bound is not None and ledger.version - work.version > self.bound
        return Fate.STALE if is_stale else Fate.ACCEPTED

    def scale(self, staleness: int) -> float:
        """Return 1/staleness for a stale gradient under `lr=inverse`, otherwise 1."""
        return 1.0 / max(1, staleness) if self.lr == "inverse" else 1.0
