# SPDX-License-Identifier: BSD-3-Clause
"""Synchronous training whose workers run k updates ahead.

Every update takes the W gradients meant for it. The gradients of update u are all computed at
version u - 1 - k, so the staleness is exactly k (less in the first k updates), and all workers see
the same sequence of parameters. Communication and short delays hide behind k steps of computation;
a worker that is always slow still sets the pace.

Literature: AGD-k, Daily et al. 2016.
"""

from dataclasses import dataclass

from paceline.core.ledger import Ledger, Work
from paceline.core.policy import Policy
from paceline.errors import SpecError

__all__ = ["Delayed"]


@dataclass(frozen=True)
class Delayed(Policy):
    """Take all W gradients meant for an update, computed k updates before it.

    >>> str(Delayed(2))
    'delayed:2'
    """

    name = "delayed"
    form = "delayed:k, e.g. delayed:1 to apply each update one step late"

    k: int

    def __post_init__(self) -> None:
        if self.k < 0:
            raise SpecError(f"k must be >= 0, got {self.k}; use 0 for sync")

    @property
    def versions_kept(self) -> int:
        """The newest version and the k before it."""
        return self.k + 1

    def assign(self, ledger: Ledger, worker: int) -> Work | None:
        """Return work for the first of the next k + 1 updates that lacks this worker."""
        for update in range(ledger.version + 1, ledger.version + self.k + 2):
            tally = ledger.tallies.get(update)
            if tally is None or worker not in tally.done:
                version = max(ledger.oldest, update - 1 - self.k)
                return Work(version=version, update=update)
        return None
