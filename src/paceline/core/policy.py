# SPDX-License-Identifier: BSD-3-Clause
"""The contract of a rule: a frozen value that answers questions about a ledger.

Rules differ only in their answers:

    needed      how many contributions does the next update take?   (all W)
    is_due      is the next update due?                             (all are in, or none can come)
    assign      what should this idle worker compute?               (a gradient for the next update)
    judge       what becomes of a gradient that arrives now?        (late iff its update was made)
    scale       how much does a stale gradient count?               (fully)
    deadline    until when does the next update wait?               (forever)

The answers of this class, in brackets, are those of full synchronous training. A rule overrides
what it does differently. It may learn in `welcome`, `observe` and `observe_update`, and stores what
it learns in `ledger.memory`, which `fresh_memory` creates. It must not change anything else in the
ledger. `decider` asks the questions and acts on the answers.
"""

from dataclasses import MISSING, dataclass, fields
from typing import Any, ClassVar

from paceline.core.events import ApplyUpdate, Fate
from paceline.core.ledger import Ledger, Work
from paceline.spec import RunSpec

__all__ = ["Policy"]

_OURS = "paceline.core."


@dataclass(frozen=True)
class Policy:
    """Base class of all rules; its answers are those of full synchronous training."""

    name: ClassVar[str]
    """The word that the string of a built-in rule starts with; your own rule needs none."""

    form: ClassVar[str] = ""
    """How users write its string, with an example; shown in errors."""

    repeats: ClassVar[bool] = False
    """Whether a worker may count more than once in an update."""

    @property
    def keeps_all(self) -> bool:
        """Whether the rule accepts gradients of any age, so that none is ever cancelled."""
        return False

    @property
    def versions_kept(self) -> int:
        """How many of the newest versions workers may still be sent; the shell must keep them."""
        return 1

    def validate(self, spec: RunSpec) -> None:
        """Raise `SpecError` if this rule can't run with that spec."""

    def fresh_memory(self, spec: RunSpec) -> Any:
        """Return the rule's memory at the start of a run."""
        del spec
        return None

    def plain_memory(self, memory: Any) -> Any:
        """Return what a checkpoint should keep of the memory, as lists and numbers, or None."""
        del memory

    def recall(self, spec: RunSpec, plain: Any) -> Any:
        """Return the rule's memory when a run is restored; `plain` is what the checkpoint kept."""
        del plain
        return self.fresh_memory(spec)

    def welcome(self, ledger: Ledger, worker: int) -> None:
        """Learn that a worker has joined."""

    def observe(self, ledger: Ledger, worker: int, took_s: float, whole: bool) -> None:
        """Learn that a worker reported `took_s` after it was asked; `whole`: not abandoned."""

    def observe_update(self, ledger: Ledger, made: ApplyUpdate, sq_norm: float | None) -> None:
        """Learn that an update was applied; `sq_norm` is that of its averaged gradient."""

    def needed(self, ledger: Ledger) -> int:
        """Return how many contributions the next update takes; this may change over time."""
        return ledger.spec.workers

    def is_due(self, ledger: Ledger) -> bool:
        """Return whether to make the next update now; `ledger.overdue`: its deadline passed."""
        count = len(ledger.next_tally.contributions)
        return count >= self.needed(ledger) or (count > 0 and ledger.outstanding() == 0)

    def assign(self, ledger: Ledger, worker: int) -> Work | None:
        """Return what an idle worker should compute; None: it waits.

        The decider asks again after every event, except when another worker's gradient was accepted
        and didn't complete an update.
        """
        if worker in ledger.next_tally.done:
            return None
        return Work(version=ledger.version, update=ledger.version + 1)

    def judge(self, ledger: Ledger, work: Work) -> Fate:
        """Return the fate of a finite gradient if it arrived now. Once refused, always refused."""
        return Fate.ACCEPTED if work.update > ledger.version else Fate.LATE

    def scale(self, staleness: int) -> float:
        """Return the factor that multiplies the weight of a gradient of this staleness."""
        del staleness
        return 1.0

    def deadline(self, ledger: Ledger) -> float | None:
        """Return when the next update stops waiting; None: no deadline is known yet."""
        del ledger
        return None

    @classmethod
    def first_words(cls) -> str:
        """Return what its string starts with: its name, or its module and class if it is yours."""
        is_ours = cls.__module__.startswith(_OURS)
        return cls.name if is_ours else f"{cls.__module__}:{cls.__qualname__}"

    @classmethod
    def written_form(cls) -> str:
        """Return how to write its string."""
        if cls.form:
            return cls.form
        settings = ",".join(f.name for f in fields(cls) if f.init)
        return f"{cls.first_words()}:{settings}" if settings else cls.first_words()

    def __str__(self) -> str:
        """Return the string that `parse_policy` turns into this policy."""
        given = [(f, getattr(self, f.name)) for f in fields(self) if f.init]
        plain = [f for f, _ in given if not f.kw_only and f.default is f.default_factory is MISSING]
        parts = [_text(value) for f, value in given if f in plain]
        parts += [f"{f.name}={_text(v)}" for f, v in given if f not in plain and v != f.default]
        words = self.first_words()
        return f"{words}:{','.join(parts)}" if parts else words


def _text(value: Any) -> str:
    """Return a setting as users write it."""
    return str(value).lower() if isinstance(value, bool) else str(value)
