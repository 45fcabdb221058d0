# SPDX-License-Identifier: BSD-3-Clause
"""Synchronous training with b backup workers.

Each update takes the first N = W - b gradients of the current version; the rest are late and are
dropped. An update takes the N-th smallest of the W arrival times instead of the largest, and no
gradient is ever stale.

Literature: Chen et al. 2016, "Revisiting Distributed Synchronous SGD"; K-sync with K = N.
"""

from dataclasses import dataclass

from paceline.core.ledger import Ledger
from paceline.core.policy import Policy
from paceline.errors import SpecError
from paceline.spec import RunSpec

__all__ = ["Backup"]


@dataclass(frozen=True)
class Backup(Policy):
    """Take the first W - b gradients of the version; the rest are late.

    >>> str(Backup(2))
    'backup:2'
    """

    name = "backup"
    form = "backup:b, e.g. backup:2 to do without the last 2 gradients"

    b: int

    def __post_init__(self) -> None:
        if self.b < 0:
            raise SpecError(f"b must be >= 0, got {self.b}; use 0 to wait for all workers")

    def validate(self, spec: RunSpec) -> None:
        """Check that the update waits for at least one worker."""
        if self.b >= spec.workers:
            raise SpecError(
                f"b must be smaller than the number of workers, got b={self.b} of {spec.workers}"
            )

    def needed(self, ledger: Ledger) -> int:
        """Return N = W - b."""
        return ledger.spec.workers - self.b
