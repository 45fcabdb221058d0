# SPDX-License-Identifier: BSD-3-Clause
"""Synchronous training that waits until a deadline learned from past answer times.

An update takes the gradients that have arrived when its deadline passes, but at least n_min. The
deadline is 1.1 times the q-quantile of recent answer times after the version was opened; the extra
tenth admits workers that are just as fast. A cancelled answer is only known to take longer than
observed, so it counts as longer than all others. If the quantile falls among those, or if too few
answers were seen yet, the rule waits twice the longest complete answer instead, so a worker that
never answers can't extend the wait. `after` sets a fixed deadline in seconds.

Literature: time-outs instead of backups, named as future work in Chen et al. 2016.
"""

from collections import deque
from dataclasses import dataclass
from itertools import islice
from math import ceil, inf
from typing import Any

from paceline.core.ledger import Ledger
from paceline.core.policy import Policy
from paceline.errors import SpecError
from paceline.spec import RunSpec, Seconds

__all__ = ["Deadline"]

Answers = deque[tuple[float, bool]]  # seconds, and whether the answer was complete

SLACK = 1.1
REMEMBERED_TURNS = 16  # answers remembered for each worker of the run


@dataclass(frozen=True)
class Deadline(Policy):
    """Take what has arrived when a learned deadline passes, but at least n_min.

    >>> str(Deadline(0.8, n_min=2))
    'deadline:q=0.8,n_min=2'
    """

    name = "deadline"
    form = "deadline:q, e.g. deadline:0.9 or deadline:q=0.9,n_min=4 or deadline:after=200ms"

    q: float = 0.9
    n_min: int = 1
    after: Seconds | None = None

    def __post_init__(self) -> None:
        if not 0 < self.q <= 1:
            raise SpecError(f"q must be in (0, 1], got {self.q}; 0.9 waits for about 9 of 10")
        if self.n_min < 1:
            raise SpecError(f"n_min must be >= 1, got {self.n_min}")
        if self.after is not None and not 0 <= self.after < inf:
            raise SpecError(f"after must be >= 0 seconds and finite, got {self.after}")

    def validate(self, spec: RunSpec) -> None:
        """Check that n_min is at most the number of workers."""
        if self.n_min > spec.workers:
            raise SpecError(f"n_min must be <= workers={spec.workers}, got {self.n_min}")

    def fresh_memory(self, spec: RunSpec) -> Answers:
        """Return an empty record of recent answers."""
        return deque(maxlen=REMEMBERED_TURNS * spec.workers)

    def plain_memory(self, memory: Any) -> Any:
        """Return the recent answers as lists."""
        return [list(answer) for answer in memory]

    def recall(self, spec: RunSpec, plain: Any) -> Answers:
        """Return the recent answers that a checkpoint kept."""
        answers = self.fresh_memory(spec)
        try:
            answers.extend((float(took_s), bool(is_whole)) for took_s, is_whole in plain or [])
        except (TypeError, ValueError):
            raise SpecError(
                f"expected pairs of a time and whether the answer was complete, got {plain!r}"
            ) from None
        return answers

    def observe(self, ledger: Ledger, worker: int, took_s: float, whole: bool) -> None:
        """Remember how long the answer took; always keep the newest complete one."""
        del worker
        answers: Answers = ledger.memory
        is_full = len(answers) == answers.maxlen
        if is_full and not any(is_whole for _, is_whole in islice(answers, 1, None)):
            del answers[1]
        answers.append((took_s, whole))

    def is_due(self, ledger: Ledger) -> bool:
        """Return whether all have arrived, or the deadline passed and n_min have."""
        enough = len(ledger.next_tally.contributions) >= self.n_min
        return (ledger.overdue and enough) or super().is_due(ledger)

    def deadline(self, ledger: Ledger) -> float | None:
        """Return the opening of the version plus the learned wait."""
        if self.after is not None:
            return ledger.opened_at + self.after
        has_learned = len(ledger.memory) >= ledger.spec.workers
        if has_learned or len(ledger.next_tally.contributions) >= self.n_min:
            wait_s = self._wait(ledger.memory, has_learned)
            return None if wait_s is None else ledger.opened_at + wait_s
        return None

    def _wait(self, answers: Answers, has_learned: bool) -> float | None:
        """Return the wait by the q-quantile, or twice the longest complete answer without it."""
        whole = sorted(took_s for took_s, is_whole in answers if is_whole)
        rank = ceil(self.q * len(answers))
        if has_learned and rank <= len(whole):
            return SLACK * whole[rank - 1]
        return 2 * whole[-1] if whole else None
