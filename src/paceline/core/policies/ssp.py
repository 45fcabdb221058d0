# SPDX-License-Identifier: BSD-3-Clause
"""Stale synchronous parallel: asynchronous, but no worker runs far ahead.

A worker that is more than s gradients ahead of the slowest waits until that one has caught up. This
absorbs short delays; a worker that is always slow sets the pace of all. A worker that joins later
starts with the count of the slowest member, so the others don't wait for it to catch up.

Literature: Ho et al. 2013.
"""

from dataclasses import dataclass

from paceline.core.barrier_free import Free
from paceline.core.ledger import Ledger, Work
from paceline.errors import SpecError
from paceline.spec import RunSpec

__all__ = ["Ssp"]


@dataclass(frozen=True)
class Ssp(Free):
    """Apply every gradient, but keep workers at most s gradients ahead of the slowest.

    >>> str(Ssp(3))
    'ssp:3'
    """

    name = "ssp"
    form = "ssp:s, e.g. ssp:3 to let the fastest be 3 gradients ahead of the slowest"

    s: int

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.s < 0:
            raise SpecError(f"s must be >= 0, got {self.s}; use 0 for a full barrier")

    def fresh_memory(self, spec: RunSpec) -> dict[int, int]:
        """Return the number of gradients that each member has finished, as the rule counts."""
        del spec
        return {}

    def welcome(self, ledger: Ledger, worker: int) -> None:
        """Start the worker at the slowest member's count, and forget workers that are gone."""
        others = {w: count for w, count in ledger.memory.items() if w in ledger.members}
        others.pop(worker, None)
        ledger.memory = others | {worker: min(others.values(), default=0)}

    def observe(self, ledger: Ledger, worker: int, took_s: float, whole: bool) -> None:
        """Count the gradients that the worker has finished."""
        del took_s
        ledger.memory[worker] += whole

    def assign(self, ledger: Ledger, worker: int) -> Work | None:
        """Return work at the newest version, unless the worker is too far ahead."""
        finished = ledger.memory
        slowest = min(finished[member] for member in ledger.members)
        if finished[worker] - slowest > self.s:
            return None
        return super().assign(ledger, worker)
