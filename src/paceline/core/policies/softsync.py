# SPDX-License-Identifier: BSD-3-Clause
"""An update for every c gradients, from any workers, of any version.

No worker waits and no gradient is dropped. There are c times fewer updates than under `async`, so
with W workers the mean staleness is (W - 1)/c. By default a gradient counts 1/staleness.

Literature: SoftSync, Zhang et al. 2015 (their n-softsync has c = W/n).
"""

from dataclasses import dataclass, field

from paceline.core.barrier_free import Free, LearningRate
from paceline.core.ledger import Ledger
from paceline.errors import SpecError

__all__ = ["SoftSync"]


@dataclass(frozen=True)
class SoftSync(Free):
    """Make an update of every c gradients, including stale ones.

    >>> str(SoftSync(4)), str(SoftSync(4, lr="constant"))
    ('softsync:4', 'softsync:4,lr=constant')
    """

    name = "softsync"
    form = "softsync:c, e.g. softsync:4 or softsync:c=4,lr=constant"
    repeats = True

    c: int
    lr: LearningRate = field(default="inverse", kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.c < 1:
            raise SpecError(f"c must be >= 1, got {self.c}")

    def needed(self, ledger: Ledger) -> int:
        """Return c."""
        del ledger
        return self.c
