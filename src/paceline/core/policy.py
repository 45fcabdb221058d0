# SPDX-License-Identifier: BSD-3-Clause
"""The contract of a rule: a frozen value that answers questions about a ledger.

Rules differ only in their answers:

    needed      how many contributions does the next update take?   (all W)
    is_due      is the next update due?                             (all are in, or nobody is left)
    assign      what may this idle worker compute?                  (its turn for the next update)
    judge       what becomes of a gradient that arrives now?        (late iff its update was made)
    scale       how much does a stale gradient count?               (fully)
    deadline    until when does the next update wait?               (for ever)

In brackets: the answers of this class, which are those of full synchronous training. A rule
overrides what it does otherwise. What it learns in `welcome`, `observe` and `observe_update` it
keeps in `ledger.memory`, which it makes in `fresh_memory`; everything else in the ledger is for
reading. Who asks, and what is done with the answers, is in `decider`.
"""

from dataclasses import MISSING, dataclass, fields
from typing import Any, ClassVar

from paceline.core.events import ApplyUpdate, Fate
from paceline.core.ledger import Ledger, Work
from paceline.spec import RunSpec

__all__ = ["Policy"]


@dataclass(frozen=True)
class Policy:
    """A rule; the answers here are those of full synchronous training."""

    name: ClassVar[str]
    """The word that begins its string."""

    form: ClassVar[str]
    """Its string as a user writes it, with an example: for help and errors."""

    repeats: ClassVar[bool] = False
    """Whether a worker may count more than once in an update."""

    @property
    def keeps_all(self) -> bool:
        """Whether no gradient is ever too old for it, so that there is never one to cancel."""
        return False

    @property
    def versions_kept(self) -> int:
        """How many of the newest versions a worker may yet be sent to; the shell keeps as many."""
        return 1

    def validate(self, spec: RunSpec) -> None:
        """Raise `SpecError` unless this rule can run with that spec."""

    def fresh_memory(self, spec: RunSpec) -> Any:
        """What the rule remembers at the beginning of a run."""
        del spec
        return None

    def plain_memory(self, memory: Any) -> Any:
        """What is worth remembering in a later part of the run, as lists and numbers; or None."""
        del memory

    def recall(self, spec: RunSpec, plain: Any) -> Any:
        """What the rule remembers when the run goes on with this; None: nothing was kept."""
        del plain
        return self.fresh_memory(spec)

    def welcome(self, ledger: Ledger, worker: int) -> None:
        """A worker has joined; remember of it what the rule needs."""

    def observe(self, ledger: Ledger, worker: int, took_s: float, whole: bool) -> None:
        """A worker has reported `took_s` after it was asked; learn from it. Not whole: given up."""

    def observe_update(self, ledger: Ledger, made: ApplyUpdate, sq_norm: float | None) -> None:
        """Learn from an update that was applied; `sq_norm` is of its averaged gradient."""

    def needed(self, ledger: Ledger) -> int:
        """How many contributions the next update takes. It may change from update to update."""
        return ledger.spec.workers

    def is_due(self, ledger: Ledger) -> bool:
        """Whether the next update can be made now; `ledger.overdue` says that its time is up."""
        count = len(ledger.next_tally.contributions)
        return count >= self.needed(ledger) or (count > 0 and ledger.outstanding() == 0)

    def assign(self, ledger: Ledger, worker: int) -> Work | None:
        """What an idle worker is to compute; None: it waits.

        A worker that waits is asked again after every event but one: another worker's gradient was
        accepted and made no update yet.
        """
        if worker in ledger.next_tally.done:
            return None
        return Work(version=ledger.version, update=ledger.version + 1)

    def judge(self, ledger: Ledger, work: Work) -> Fate:
        """The fate of a sound gradient, were it to arrive now. Once refused, refused for ever."""
        return Fate.ACCEPTED if work.update > ledger.version else Fate.LATE

    def scale(self, staleness: int) -> float:
        """The factor by which a gradient of this staleness counts, beside its weight."""
        del staleness
        return 1.0

    def deadline(self, ledger: Ledger) -> float | None:
        """When the time of the next update is up; asked again and again until it gives one."""
        del ledger
        return None

    def __str__(self) -> str:
        """The string that makes this policy."""
        given = [(f, getattr(self, f.name)) for f in fields(self)]
        parts = [f"{value}" for f, value in given if f.default is MISSING]
        parts += [f"{f.name}={v}" for f, v in given if f.default is not MISSING and v != f.default]
        return f"{self.name}:{','.join(parts)}" if parts else self.name
