# SPDX-License-Identifier: BSD-3-Clause
"""The state of a run: who is here, who works on what, which updates are in the making.

The ledger only keeps the books; it decides nothing. `Decider` writes it, policies read it.
An update in the making is a `Tally`; only `delayed` has more than one.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from paceline.core.events import ApplyUpdate, Contribution
from paceline.spec import RunSpec

__all__ = ["Ledger", "Member", "Origin", "Tally", "Work"]


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a run begins: at nothing, or where an earlier part of it was saved."""

    version: int = 0

    turns: Mapping[int, int] = field(default_factory=dict)
    """How many pieces of work each worker had before."""

    memory: Any = None
    """What the policy remembered, as plain values; None: nothing."""

    samples: int = 0
    """Samples in the updates that led there."""


@dataclass(frozen=True, slots=True)
class Work:
    """A gradient that a worker was asked for."""

    version: int  # of the parameters that it computes with
    update: int  # what it is meant for; where any version counts, the earliest that it can go into


@dataclass(slots=True)
class Member:
    """What is known of a worker that is here."""

    work: Work | None = None
    """None iff it waits for parameters; then it is in `Ledger.idle`."""

    asked_at: float = 0.0
    """When it was asked for `work`."""

    cancelled: bool = False
    """It was told that `work` is of no use any more."""

    turn: int = 0
    """The number of `work`, or of the last that it had."""


@dataclass(slots=True)
class Tally:
    """An update in the making."""

    contributions: list[Contribution] = field(default_factory=list)

    done: set[int] = field(default_factory=set)
    """Members that have given to this update."""

    excused: set[int] = field(default_factory=set)
    """Members whose gradient for it was not finite: they try again, but nobody waits for them."""


@dataclass(slots=True)
class Ledger:
    """Everything that a decision may depend on."""

    spec: RunSpec

    memory: Any
    """What the policy itself remembers; only the policy knows its form."""

    now: float = 0.0
    """The time of the newest event."""

    version: int = 0
    """How many updates were made."""

    samples: int = 0
    """How many samples went into them."""

    oldest: int = 0
    """The version that this part of the run began with; those before it are not to be had."""

    opened_at: float = 0.0
    """When the newest version was made, or the run last went on after a pause."""

    members: dict[int, Member] = field(default_factory=dict)

    idle: dict[int, None] = field(default_factory=dict)
    """Members that wait for parameters, first come first (a dict used as an ordered set)."""

    tallies: dict[int, Tally] = field(default_factory=dict)
    """By update; only updates beyond `version`."""

    applying: dict[int, ApplyUpdate] = field(default_factory=dict)
    """Updates that were decided, oldest first, until the shell reports that it has applied them."""

    joined: set[int] = field(default_factory=set)
    """Every worker that ever joined, or will never, until the run has begun; empty afterwards."""

    begun: bool = False
    paused: bool = True
    stopping: bool = False
    finished: bool = False

    last: int | None = None
    """The update with which the run ends; None: not known yet."""

    turns: dict[int, int] = field(default_factory=dict)
    """How many pieces of work each worker ever had, so that no number is given twice."""

    timer: int = 0
    """The number of the newest timer."""

    timer_runs: bool = False
    """Whether that timer is for the next update; otherwise it is out of date."""

    overdue: bool = False
    """Whether the timer of the next update has fired."""

    def __post_init__(self) -> None:
        self.tallies.setdefault(self.version + 1, Tally())

    @property
    def next_tally(self) -> Tally:
        """The update that will be made next; there always is one."""
        return self.tallies[self.version + 1]

    @property
    def has_enough_samples(self) -> bool:
        """Whether the run has used as many samples as it was asked to."""
        return self.spec.samples is not None and self.samples >= self.spec.samples

    def awaits_timer(self, timer: int) -> bool:
        """Whether this timer is for the next update; one that is out of date is ignored."""
        return timer == self.timer and self.timer_runs

    def outstanding(self) -> int:
        """How many of those here the next update may still wait for."""
        tally = self.next_tally
        return len(self.members) - len(tally.done) - len(tally.excused)
