# SPDX-License-Identifier: BSD-3-Clause
"""The interface of the core: events (what happened) and actions (what to do).

A shell, simulated or real, turns what happens into events, passes them to `Decider.handle`, and
performs the actions that it returns, in order. Nothing else passes between a shell and the core, so
the list of events *is* the run: replay it and you get the same actions.

Events and actions are frozen values. Every event has a time, in seconds on the shell's own clock,
which never goes backwards.
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
    """What became of a gradient. Every gradient has exactly one fate."""

    ACCEPTED = "accepted"  # kept for an update
    LATE = "late"  # complete, but its update was made without it
    STALE = "stale"  # complete, but older than the rule allows
    DUPLICATE = "duplicate"  # this turn was reported before
    CANCELLED = "cancelled"  # abandoned before it was complete
    NON_FINITE = "non-finite"  # contains a NaN or an infinity


# --------------------------------------------------------------------------------------- events


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened at `time`."""

    time: float


@dataclass(frozen=True, slots=True)
class WorkerJoined(Event):
    """A worker joined and waits for parameters."""

    worker: int


@dataclass(frozen=True, slots=True)
class WorkerLeft(Event):
    """A worker is gone: it died, its connection was lost, or it had nothing more to do."""

    worker: int
    reason: str = ""


@dataclass(frozen=True, slots=True)
class WorkerMissing(Event):
    """A worker that the run was started for will never join: don't wait for it."""

    worker: int
    reason: str = ""


@dataclass(frozen=True, slots=True)
class GradientArrived(Event):
    """A worker finished the gradient that it was asked for, and waits for parameters.

    If the work was cancelled, the shell may report this without transferring the gradient.
    """

    worker: int
    turn: int  # the `turn` of the `SendParams` that asked for it
    version: int  # of the parameters that it was computed with
    samples: int = 1  # in its mini-batch; contributions are weighted by samples
    finite: bool = True
    sq_norm: float | None = None  # its squared norm; None: not measured, or not finite
    new_samples: int | None = None  # that no accepted gradient was computed on before; None: all


@dataclass(frozen=True, slots=True)
class WorkAbandoned(Event):
    """A worker abandoned the gradient that it was asked for, and waits for parameters."""

    worker: int
    turn: int


@dataclass(frozen=True, slots=True)
class TimerFired(Event):
    """The time of a `StartTimer` was reached."""

    timer: int


@dataclass(frozen=True, slots=True)
class UpdateApplied(Event):
    """The shell performed an `ApplyUpdate`.

    If the rule learns from updates, the shell reports every update once, in order. Other rules
    ignore the reports, so the shell may leave them out. The time is that of the event that made the
    update due.
    """

    update: int
    sq_norm: float | None = None  # of the averaged gradient; None: not measured, or not finite


@dataclass(frozen=True, slots=True)
class StopRequested(Event):
    """The run should end as soon as the updates that have contributions are made."""

    at_once: bool = False  # don't wait for them: the run ends with the newest version


# -------------------------------------------------------------------------------------- actions


@dataclass(frozen=True, slots=True)
class Contribution:
    """An accepted gradient that goes into an update.

    The contributions of an update are listed in the order in which they were accepted.
    """

    worker: int
    version: int
    samples: int
    scale: float = 1.0  # multiplies its weight; decided when it was accepted
    sq_norm: float | None = None  # the squared norm of the gradient; None: not known
    new_samples: int | None = None  # that no accepted gradient was computed on before; None: all


@dataclass(frozen=True, slots=True)
class Action:
    """Something that the shell must do."""


@dataclass(frozen=True, slots=True)
class Accept(Action):
    """Keep the gradient that just arrived, for `update`, and tell the worker.

    The update adds `samples · scale` times this gradient and divides by the samples of all its
    contributions, so a shell can start to add up gradients before the update is complete.
    """

    worker: int
    version: int
    update: int
    samples: int = 1
    scale: float = 1.0


@dataclass(frozen=True, slots=True)
class Drop(Action):
    """Drop the gradient that just arrived or was abandoned, and tell the worker its fate."""

    worker: int
    version: int
    fate: Fate


@dataclass(frozen=True, slots=True)
class ApplyUpdate(Action):
    """Step the optimizer with the weighted sum of the contributions.

    Update u turns version u-1 into version u. The gradient is Σ weightᵢ · scaleᵢ · gradientᵢ.
    """

    update: int
    contributions: tuple[Contribution, ...]
    weights: tuple[float, ...]  # proportional to samples; they sum to 1
    scales: tuple[float, ...]  # how the rule scales stale gradients; 1 if it doesn't
    wanted: int  # how many contributions the rule asks for; there may be fewer

    @property
    def new_samples(self) -> int:
        """The samples that no earlier contribution was computed on; they count towards the goal."""
        new = [c.samples if c.new_samples is None else c.new_samples for c in self.contributions]
        return sum(new)

    @property
    def staleness(self) -> tuple[int, ...]:
        """The staleness of each contribution, in updates."""
        return tuple(self.update - 1 - c.version for c in self.contributions)


@dataclass(frozen=True, slots=True)
class SendParams(Action):
    """Let the worker compute a gradient at this version. Its report must carry the turn.

    Under `delayed:k` the version may be up to k older than the newest, so the shell must keep the
    newest k + 1 versions.
    """

    worker: int
    turn: int  # counts the gradients that this worker was ever asked for, from 1
    version: int


@dataclass(frozen=True, slots=True)
class Cancel(Action):
    """The gradient that this worker computes will be dropped in any case: it may stop."""

    worker: int
    turn: int


@dataclass(frozen=True, slots=True)
class StartTimer(Action):
    """Send `TimerFired` with this number at time `at`; an outdated timer has no effect."""

    timer: int
    at: float


@dataclass(frozen=True, slots=True)
class Pause(Action):
    """The run pauses; `reason` says what it waits for."""

    reason: str


@dataclass(frozen=True, slots=True)
class Resume(Action):
    """The run starts, or continues after a pause."""


@dataclass(frozen=True, slots=True)
class Finish(Action):
    """The run is over: no worker gets work any more, not even one that joins later."""

    version: int
    unused: tuple[Contribution, ...] = ()  # accepted, but the run ended before their update
