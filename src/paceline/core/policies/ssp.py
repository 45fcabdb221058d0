# SPDX-License-Identifier: BSD-3-Clause
"""Stale synchronous parallel: asynchronous, but nobody runs far ahead.

Every worker counts its turns; one that is more than s turns ahead of the slowest waits for it. A
short delay is absorbed, a worker that is always slow sets everybody's pace. A newcomer begins at
the turn of the slowest of those here, so that it is not owed the past.

Literature: Ho et al. 2013.
"""

from dataclasses import dataclass

from paceline.core.ledger import Ledger, Work
from paceline.core.policies.free import Free
from paceline.errors import SpecError

__all__ = ["Ssp"]


@dataclass(frozen=True)
class Ssp(Free):
    """Asynchronous, but nobody is more than s turns ahead of the slowest.

    >>> str(Ssp(3))
    'ssp:3'
    """

    name = "ssp"
    form = "ssp:s, e.g. ssp:3 to let the fastest be 3 turns ahead of the slowest"

    s: int

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.s < 0:
            raise SpecError(f"s must be >= 0, got {self.s}; use 0 for a full barrier")

    def welcome(self, ledger: Ledger, worker: int) -> None:
        """Begin where the slowest is."""
        others = (m.clock for w, m in ledger.members.items() if w != worker)
        ledger.members[worker].clock = min(others, default=0)

    def assign(self, ledger: Ledger, worker: int) -> Work | None:
        """The newest version, unless it is too far ahead."""
        slowest = min(m.clock for m in ledger.members.values())
        if ledger.members[worker].clock - slowest > self.s:
            return None
        return super().assign(ledger, worker)
