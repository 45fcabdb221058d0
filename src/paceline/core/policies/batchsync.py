# SPDX-License-Identifier: BSD-3-Clause
"""Synchronous training on the first k mini-batches, whoever computes them.

A worker that has given its gradient computes another at the same version until k are in, so nobody
idles and a fast worker counts as often as it is fast. What is under way when the k-th arrives is
lost: an update takes k·m/W with exponential times of mean m, and longer with more even ones.

Literature: K-batch-sync (Dutta et al. 2018); Rennala SGD (Tyurin and Richtárik 2023).
"""

from dataclasses import dataclass

from paceline.core.ledger import Ledger, Work
from paceline.core.policy import Policy
from paceline.errors import SpecError

__all__ = ["BatchSync"]


@dataclass(frozen=True)
class BatchSync(Policy):
    """The first k mini-batches of this version from anyone.

    >>> str(BatchSync(8))
    'batchsync:8'
    """

    name = "batchsync"
    form = "batchsync:k, e.g. batchsync:8 for an update every 8 mini-batches"
    repeats = True

    k: int

    def __post_init__(self) -> None:
        if self.k < 1:
            raise SpecError(f"k must be >= 1, got {self.k}")

    def needed(self, ledger: Ledger) -> int:
        """The k mini-batches."""
        del ledger
        return self.k

    def is_due(self, ledger: Ledger) -> bool:
        """As soon as k are in: as long as one worker is here, k will be."""
        return len(ledger.next_tally.contributions) >= self.k

    def assign(self, ledger: Ledger, worker: int) -> Work | None:
        """Another mini-batch of the newest version, at once."""
        del worker
        return Work(version=ledger.version, update=ledger.version + 1)
