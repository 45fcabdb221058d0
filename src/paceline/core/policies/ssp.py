# SPDX-License-Identifier: BSD-3-Clause
"""Stale synchronous parallel: asynchronous, but nobody runs far ahead.

A worker that has finished more than s gradients more than the slowest starts nothing until that one
has caught up. A short delay is absorbed, a worker that is always slow sets everybody's pace. A
newcomer begins with the count of the slowest of those here, so that it is not owed the past.

Literature: Ho et al. 2013.
"""

from dataclasses import dataclass

from paceline.core.ledger import Ledger, Work
from paceline.core.policies.free import Free
from paceline.errors import SpecError
from paceline.spec import RunSpec

__all__ = ["Ssp"]


@dataclass(frozen=True)
class Ssp(Free):
    """Asynchronous, but nobody starts when more than s gradients ahead of the slowest.

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
        """How many gradients each member has finished, as the rule counts them."""
        del spec
        return {}

    def welcome(self, ledger: Ledger, worker: int) -> None:
        """Begin where the slowest is, and forget those who are gone."""
        others = {w: count for w, count in ledger.memory.items() if w in ledger.members}
        others.pop(worker, None)
        ledger.memory = others | {worker: min(others.values(), default=0)}

    def observe(self, ledger: Ledger, worker: int, took_s: float, whole: bool) -> None:
        """Count what it has finished."""
        del took_s
        ledger.memory[worker] += whole

    def assign(self, ledger: Ledger, worker: int) -> Work | None:
        """The newest version, unless it is too far ahead."""
        finished = ledger.memory
        slowest = min(finished[member] for member in ledger.members)
        if finished[worker] - slowest > self.s:
            return None
        return super().assign(ledger, worker)
