# SPDX-License-Identifier: BSD-3-Clause
"""Synchronous training that waits until a deadline learnt from past arrivals.

An update takes whoever is there, and at least n_min, when the q-quantile of recent answer times has
passed since its version was opened, and a tenth of it more for those who are just as fast. Answers
that were cut short by a cancellation are known only to be longer than what was seen; they count as
longer than all others. Where the quantile falls among them, and where too little was seen yet, the
rule waits twice the longest time that it knows of, so that it can learn a longer one and is still
never blocked. `after` replaces all that by seconds.

Literature: time-outs instead of backups, named as future work in Chen et al. 2016.
"""

from collections import deque
from dataclasses import dataclass
from math import ceil, inf

from paceline.core.ledger import Ledger
from paceline.core.policy import Policy
from paceline.errors import SpecError
from paceline.spec import RunSpec

__all__ = ["Deadline"]

Answers = deque[tuple[float, bool]]  # seconds, and whether they were the whole time

SLACK = 1.1
REMEMBERED_TURNS = 16  # answers remembered for each worker of the run


@dataclass(frozen=True)
class Deadline(Policy):
    """Whoever is there when a time learnt from past arrivals has passed, at least n_min.

    >>> str(Deadline(0.8, n_min=2))
    'deadline:q=0.8,n_min=2'
    """

    name = "deadline"
    form = "deadline:q, e.g. deadline:0.9 or deadline:q=0.9,n_min=4 or deadline:after=200ms"

    q: float = 0.9
    n_min: int = 1
    after: float | None = None

    def __post_init__(self) -> None:
        if not 0 < self.q <= 1:
            raise SpecError(f"q must be in (0, 1], got {self.q}; 0.9 waits for about 9 of 10")
        if self.n_min < 1:
            raise SpecError(f"n_min must be >= 1, got {self.n_min}")
        if self.after is not None and not 0 <= self.after < inf:
            raise SpecError(f"after must be >= 0 seconds and finite, got {self.after}")

    def validate(self, spec: RunSpec) -> None:
        """No more than all can be there."""
        if self.n_min > spec.workers:
            raise SpecError(f"n_min must be <= workers={spec.workers}, got {self.n_min}")

    def fresh_memory(self, spec: RunSpec) -> Answers:
        """The recent answers."""
        return deque(maxlen=REMEMBERED_TURNS * spec.workers)

    def observe(self, ledger: Ledger, worker: int, took_s: float, whole: bool) -> None:
        """Remember how long the answer took."""
        del worker
        ledger.memory.append((took_s, whole))

    def is_due(self, ledger: Ledger) -> bool:
        """All are in, or the time has passed and n_min are."""
        arrived = ledger.next_tally().arrived
        passed = ledger.overdue > ledger.version and arrived >= self.n_min
        return passed or super().is_due(ledger)

    def deadline(self, ledger: Ledger) -> float | None:
        """The opening of the version plus what was learnt."""
        if self.after is not None:
            return ledger.opened_at + self.after
        if len(ledger.memory) >= ledger.spec.workers:
            return ledger.opened_at + SLACK * self._learnt(ledger.memory)
        if ledger.next_tally().arrived >= self.n_min:
            return ledger.opened_at + _twice_the_longest(ledger.memory)
        return None

    def _learnt(self, answers: Answers) -> float:
        """The q-quantile of the answer times, or twice the longest if it is not known."""
        whole = sorted(took_s for took_s, is_whole in answers if is_whole)
        rank = ceil(self.q * len(answers))
        if rank <= len(whole):
            return whole[rank - 1]
        return _twice_the_longest(answers)


def _twice_the_longest(answers: Answers) -> float:
    return 2 * max(took_s for took_s, _ in answers)
