# SPDX-License-Identifier: BSD-3-Clause
"""The state of a run: which workers are members, what they work on, what was accepted so far.

The ledger stores this state and decides nothing. `Decider` writes it, policies read it. A `Tally`
collects the contributions of an update that isn't made yet; only `delayed` has several at a time.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from paceline.core.events import ApplyUpdate, Contribution
from paceline.spec import RunSpec

__all__ = ["Ledger", "Member", "Origin", "Tally", "Work"]


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a run starts: from scratch, or from a checkpoint of an earlier part."""

    version: int = 0

    turns: Mapping[int, int] = field(default_factory=dict)
    """How many turns each worker had before."""

    memory: Any = None
    """The policy's memory as plain values; None: it has none."""

    samples: int = 0
    """How many samples the updates up to `version` used."""


@dataclass(frozen=True, slots=True)
class Work:
    """A gradient that a worker was asked for."""

    version: int  # of the parameters to compute it with
    update: int  # the update that it is meant for, or the earliest one that it can go into


@dataclass(slots=True)
class Member:
    """The state of a worker that has joined and not left."""

    work: Work | None = None
    """None iff the worker waits for parameters; it is then in `Ledger.idle`."""

    asked_at: float = 0.0
    """When the worker was asked for `work`."""

    cancelled: bool = False
    """Whether the worker was told to cancel `work`."""

    turn: int = 0
    """The turn of `work`, or the last one if the worker is idle."""


@dataclass(slots=True)
class Tally:
    """The contributions to an update that isn't made yet."""

    contributions: list[Contribution] = field(default_factory=list)

    done: set[int] = field(default_factory=set)
    """Members that have contributed to this update."""

    excused: set[int] = field(default_factory=set)
    """Members whose gradient was not finite: they try again, but the update doesn't wait."""

    def add(self, given: Contribution) -> None:
        """Add the contribution of a member."""
        self.excused.discard(given.worker)
        self.done.add(given.worker)
        self.contributions.append(given)


@dataclass(slots=True)
class Ledger:
    """Everything that a decision may depend on."""

    spec: RunSpec

    memory: Any
    """The policy's own memory; only the policy knows its form."""

    now: float = 0.0
    """The time of the newest event."""

    version: int = 0
    """How many updates were made."""

    samples: int = 0
    """How many samples these updates used; one that two optimizers use counts once."""

    oldest: int = 0
    """The version that this part of the run started from; earlier ones don't exist any more."""

    opened_at: float = 0.0
    """When the newest version was made, or when the run last resumed."""

    members: dict[int, Member] = field(default_factory=dict)

    idle: dict[int, None] = field(default_factory=dict)
    """Members that wait for parameters, in order of arrival (a dict used as an ordered set)."""

    tallies: dict[int, Tally] = field(default_factory=dict)
    """By update; only for updates after `version`."""

    applying: dict[int, ApplyUpdate] = field(default_factory=dict)
    """Updates that were made but that the shell hasn't reported as applied yet, oldest first.

    Always empty under a rule that doesn't learn from updates.
    """

    joined: set[int] = field(default_factory=set)
    """Workers that have joined or are known to be missing, until the run begins; then empty."""

    begun: bool = False
    paused: bool = True
    stopping: bool = False
    finished: bool = False

    last: int | None = None
    """The last update of the run; None: not known yet."""

    turns: dict[int, int] = field(default_factory=dict)
    """How many turns each worker ever had, so that no number is used twice."""

    timer: int = 0
    """The number of the newest timer."""

    timer_runs: bool = False
    """Whether that timer is for the next update; otherwise it is outdated."""

    overdue: bool = False
    """Whether the timer of the next update has fired."""

    def __post_init__(self) -> None:
        self.tallies.setdefault(self.version + 1, Tally())

    def tally(self, update: int) -> Tally:
        """Return the tally of an update that isn't made yet."""
        tally = self.tallies.get(update)
        if tally is None:
            tally = self.tallies[update] = Tally()
        return tally

    def destination(self, work: Work) -> int:
        """Return the update that a gradient goes into if it is accepted now."""
        return max(work.update, self.version + 1)

    def advance(self) -> Tally:
        """Make the next version; return the tally that it was made of."""
        tally = self.tallies.pop(self.version + 1)
        self.version += 1
        self.tally(self.version + 1)
        self.restart_wait()
        return tally

    def restart_wait(self) -> None:
        """Start the wait for the next update now; a running timer becomes outdated."""
        self.opened_at = self.now
        self.timer_runs = self.overdue = False

    @property
    def next_tally(self) -> Tally:
        """The tally of the next update; there always is one."""
        return self.tallies[self.version + 1]

    @property
    def has_enough_samples(self) -> bool:
        """Whether the run has used as many samples as it was asked to."""
        return self.spec.samples is not None and self.samples >= self.spec.samples

    def awaits_timer(self, timer: int) -> bool:
        """Return whether this timer is for the next update; an outdated one has no effect."""
        return timer == self.timer and self.timer_runs

    def outstanding(self) -> int:
        """Return how many members the next update may still wait for."""
        tally = self.next_tally
        return len(self.members) - len(tally.done) - len(tally.excused)
