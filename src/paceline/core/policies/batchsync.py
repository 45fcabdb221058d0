# SPDX-License-Identifier: BSD-3-Clause
"""Synchronous training on the first k mini-batches from any workers.

A worker that has contributed computes another gradient at the same version until k have arrived. So
no worker idles, and a fast worker contributes more often. The gradients in progress when the k-th
arrives are lost: an update takes k·m/W if times are exponential with mean m, and longer if they
vary less.

Literature: K-batch-sync (Dutta et al. 2018); Rennala SGD (Tyurin and Richtárik 2023).
"""

from dataclasses import dataclass

from paceline.core.ledger import Ledger, Work
from paceline.core.policy import Policy
from paceline.errors import SpecError

__all__ = ["BatchSync"]


@dataclass(frozen=True)
class BatchSync(Policy):
    """Take the first k mini-batches of the version, from any workers.

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
        """Return k."""
        del ledger
        return self.k

    def is_due(self, ledger: Ledger) -> bool:
        """Return whether k have arrived; they will, as long as one worker is left."""
        return len(ledger.next_tally.contributions) >= self.k

    def assign(self, ledger: Ledger, worker: int) -> Work | None:
        """Return another gradient of the newest version, without waiting."""
        del worker
        return Work(version=ledger.version, update=ledger.version + 1)
