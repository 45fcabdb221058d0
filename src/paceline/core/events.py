# SPDX-License-Identifier: BSD-3-Clause
"""The two vocabularies of the core: events (what happened) and actions (what to do).

A shell, simulated or real, turns what happens into events, each with its time, hands them to
`Decider.handle`, and performs the actions that come back, in their order. Nothing else passes
between a shell and the core, so the list of events *is* the run: feed it in again and the same
actions come out.

All are frozen values. Times are seconds on the shell's own clock and never run backwards.
"""

from dataclasses import dataclass
from enum import StrEnum

__all__ = [
    "Accept",
    "Action",
    "ApplyUpdate",
    "Cancel",
    "Contribution",
    "Drop",
    "Event",
    "Fate",
    "Finish",
    "GradientArrived",
    "Pause",
    "Resume",
    "SendParams",
    "StartTimer",
    "StopRequested",
    "TimerFired",
    "UpdateApplied",
    "WorkAbandoned",
    "WorkerJoined",
    "WorkerLeft",
    "WorkerMissing",
]


class Fate(StrEnum):
    """What became of a gradient. Every gradient has exactly one."""

    ACCEPTED = "accepted"  # kept for an update
    LATE = "late"  # whole, but its update was made without it
    STALE = "stale"  # whole, but older than the rule allows
    DUPLICATE = "duplicate"  # nobody waits for it: its turn was reported on before
    CANCELLED = "cancelled"  # given up before it was whole
    NON_FINITE = "non-finite"  # it has a NaN or an infinity in it


# --------------------------------------------------------------------------------------- events


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened at `time`."""

    time: float


@dataclass(frozen=True, slots=True)
class WorkerJoined(Event):
    """A worker is here and waits for parameters."""

    worker: int


@dataclass(frozen=True, slots=True)
class WorkerLeft(Event):
    """A worker is gone: it died, was lost, or had nothing more to do."""

    worker: int
    reason: str = ""


@dataclass(frozen=True, slots=True)
class WorkerMissing(Event):
    """A worker that the run was started for has never come, and will not: do not wait for it."""

    worker: int
    reason: str = ""


@dataclass(frozen=True, slots=True)
class GradientArrived(Event):
    """A worker has finished the gradient that it was asked for, and waits for parameters.

    Of one that was cancelled the shell may bring word only, and leave the numbers where they are.
    """

    worker: int
    turn: int  # which of its pieces of work this is: the `turn` of the `SendParams`
    version: int  # of the parameters that it was computed at
    samples: int = 1  # in its mini-batch; contributions are weighted by them
    finite: bool = True
    sq_norm: float | None = None  # its squared norm; None: not measured, or not finite


@dataclass(frozen=True, slots=True)
class WorkAbandoned(Event):
    """A worker has given up the gradient that it was asked for, and waits for parameters."""

    worker: int
    turn: int


@dataclass(frozen=True, slots=True)
class TimerFired(Event):
    """The time of a `StartTimer` has come."""

    timer: int


@dataclass(frozen=True, slots=True)
class UpdateApplied(Event):
    """The shell has performed an `ApplyUpdate`; its time is that of the event that caused it.

    The shell reports every update once, in order.
    """

    update: int
    sq_norm: float | None = None  # of the averaged gradient; None: not measured, or not finite


@dataclass(frozen=True, slots=True)
class StopRequested(Event):
    """The run is to end once the updates in the making are made."""


# -------------------------------------------------------------------------------------- actions


@dataclass(frozen=True, slots=True)
class Contribution:
    """An accepted gradient on its way into an update.

    The contributions to an update are in the order in which they were accepted.
    """

    worker: int
    version: int
    samples: int
    scale: float = 1.0  # how much it counts besides its weight, decided when it was accepted
    sq_norm: float | None = None  # the squared norm of the gradient; None: not known


@dataclass(frozen=True, slots=True)
class Action:
    """Something that the shell must do."""


@dataclass(frozen=True, slots=True)
class Accept(Action):
    """Keep the gradient that just arrived: it goes into `update`. Tell the worker.

    In that update it counts `samples · scale`, divided by the samples of all contributions, so a
    shell may start adding up gradients before the update is complete.
    """

    worker: int
    version: int
    update: int
    samples: int = 1
    scale: float = 1.0


@dataclass(frozen=True, slots=True)
class Drop(Action):
    """Forget the gradient that just arrived, or was given up. Tell the worker its fate."""

    worker: int
    version: int
    fate: Fate


@dataclass(frozen=True, slots=True)
class ApplyUpdate(Action):
    """Step the optimizer with the weighted sum of the contributions; that makes `update`.

    Update u turns version u-1 into version u. The step is along Σ weightᵢ · scaleᵢ · gradientᵢ.
    """

    update: int
    contributions: tuple[Contribution, ...]
    weights: tuple[float, ...]  # by samples; they sum to 1
    scales: tuple[float, ...]  # what the rule makes of staleness; 1 where it does not care
    wanted: int  # how many the rule asks for; fewer: too few are alive or sound, or time was up

    @property
    def staleness(self) -> tuple[int, ...]:
        """How many updates old each contribution is."""
        return tuple(self.update - 1 - c.version for c in self.contributions)


@dataclass(frozen=True, slots=True)
class SendParams(Action):
    """Let the worker compute a gradient at this version; its report carries the turn.

    Under `delayed:k` the version may be up to k older than the newest: keep as many.
    """

    worker: int
    turn: int  # 1 for the first piece of work that this worker ever gets, and so on
    version: int


@dataclass(frozen=True, slots=True)
class Cancel(Action):
    """What this worker computes will be dropped whenever it comes: it may as well give up."""

    worker: int
    turn: int


@dataclass(frozen=True, slots=True)
class StartTimer(Action):
    """Send a `TimerFired` with this number at time `at`; one that is out of date is harmless."""

    timer: int
    at: float


@dataclass(frozen=True, slots=True)
class Pause(Action):
    """The run waits, and this is what for."""

    reason: str


@dataclass(frozen=True, slots=True)
class Resume(Action):
    """The run goes on, or begins."""


@dataclass(frozen=True, slots=True)
class Finish(Action):
    """The run is over: nobody need compute any more, nor anybody who joins after this."""

    version: int
    unused: tuple[Contribution, ...] = ()  # accepted, but stopped before their update was made
