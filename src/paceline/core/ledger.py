# SPDX-License-Identifier: BSD-3-Clause
"""The state of a run: who is here, who works on what, which updates are in the making.

The ledger only keeps the books; it decides nothing. `Decider` writes it, policies read it.
An update in the making is a `Tally`. Update u is made of gradients that were asked for as work
on u; only `delayed` has more than one update in the making.
"""

from dataclasses import dataclass, field
from math import inf
from typing import Any

from paceline.core.events import Contribution
from paceline.spec import RunSpec

__all__ = ["Ledger", "Member", "Tally", "Work"]


@dataclass(frozen=True, slots=True)
class Work:
    """A gradient that a worker was asked for."""

    version: int  # of the parameters that it computes with
    update: int  # the update that it is meant for


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
    """How many pieces of work it has had; the newest is `work`, or was when it had one."""

    clock: int = 0
    """Gradients that it has finished. A rule may set another beginning in `Policy.welcome`."""


@dataclass(slots=True)
class Tally:
    """An update in the making."""

    contributions: list[Contribution] = field(default_factory=list)

    refused: set[int] = field(default_factory=set)
    """Workers whose gradient was not finite; it takes the place that a sound one would have had."""

    done: set[int] = field(default_factory=set)
    """Members that have had their turn for this update, whatever their gradient's fate."""

    @property
    def arrived(self) -> int:
        """How many places are taken."""
        return len(self.contributions) + len(self.refused)

    def reopen(self) -> None:
        """Let all have their turn again, after nothing but refusals."""
        self.refused.clear()
        self.done.clear()


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

    opened_at: float = 0.0
    """When the newest version was made, or the run last went on after a pause."""

    members: dict[int, Member] = field(default_factory=dict)

    idle: dict[int, None] = field(default_factory=dict)
    """Members that wait for parameters, first come first (a dict used as an ordered set)."""

    tallies: dict[int, Tally] = field(default_factory=dict)
    """By update; only updates beyond `version`."""

    joined: set[int] = field(default_factory=set)
    """Every worker that ever joined, until the run has begun; empty afterwards."""

    begun: bool = False
    paused: bool = True
    stopping: bool = False
    finished: bool = False

    last: int | None = None
    """The update with which the run ends; None: not known yet."""

    timer: int = 0
    """The newest update for which a timer was started."""

    timer_at: float = inf
    """When that timer fires; one that fires earlier is void. Infinite: it must be started anew."""

    overdue: int = 0
    """The newest update whose timer has fired."""

    def next_tally(self) -> Tally:
        """The update that will be made next."""
        return self.tally(self.version + 1)

    def tally(self, update: int) -> Tally:
        """The given update in the making; it begins empty."""
        tally = self.tallies.get(update)
        if tally is None:
            tally = self.tallies[update] = Tally()
        return tally

    def outstanding(self, tally: Tally) -> int:
        """How many of those here may still give a gradient to this update."""
        return len(self.members) - len(tally.done)
