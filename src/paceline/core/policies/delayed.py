# SPDX-License-Identifier: BSD-3-Clause
"""Every update takes all W gradients of its turn, but workers go on meanwhile, k updates ahead.

The gradients of update u are all computed at version u - 1 - k, so the staleness is exactly k (less
in the first k updates) and every worker follows the same sequence of parameters. Communication and
short delays hide behind k steps of computation; a worker that is always slow still sets the pace.

Literature: AGD-k, Daily et al. 2016.
"""

from dataclasses import dataclass

from paceline.core.policy import Policy
from paceline.errors import SpecError

__all__ = ["Delayed"]


@dataclass(frozen=True)
class Delayed(Policy):
    """All W of a turn, applied k turns late.

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
    def lead(self) -> int:
        """The k updates."""
        return self.k
