# SPDX-License-Identifier: BSD-3-Clause
"""Turn an event, and the actions that were decided on it, into the records of a trace."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import isfinite
from types import MappingProxyType
from typing import Any

import msgspec

from paceline.core.events import (
    Accept,
    Action,
    ApplyUpdate,
    Drop,
    Event,
    Fate,
    GradientArrived,
    Pause,
    Resume,
    StopRequested,
    TimerFired,
    UpdateApplied,
    WorkAbandoned,
    WorkerJoined,
    WorkerLeft,
    WorkerMissing,
)
from paceline.core.ledger import Ledger
from paceline.core.policy import Policy
from paceline.errors import InternalError
from paceline.leases import Use
from paceline.trace.schema import (
    Gap,
    Gradient,
    Joined,
    Left,
    Missing,
    Paused,
    Record,
    Resumed,
    Stopped,
    Timer,
    Update,
)

__all__ = ["Made", "Measured", "record_event", "record_gap"]


class Measured(msgspec.Struct, frozen=True, gc=False):
    """What only the shell knows about a turn."""

    asked_at: float
    compute_s: float = 0.0
    pulled_bytes: float = 0.0
    pushed_bytes: float = 0.0
    sq_norm: float | None = None
    uses: tuple[Use, ...] = ()
    cpu_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Made:
    """What only the shell knows about an update."""

    sq_norm: float | None = None
    apply_s: float = 0.0
    scalars: dict[str, float] = field(default_factory=dict)
    skipped: bool = False  # the optimizer did not step, because the gradient wasn't finite


_NOT_MEASURED = Made()
_NOTHING_MADE: Mapping[int, Made] = MappingProxyType({})


def record_event(
    event: Event,
    actions: list[Action],
    version: int,
    measured: Measured | None = None,
    made: Mapping[int, Made] = _NOTHING_MADE,
) -> Iterator[Record]:
    """Yield the records of one event and of the actions that were decided on it.

    `version` is the newest version before the event. The end of a run isn't recorded here, because
    workers may still report after it.
    """
    if type(event) is GradientArrived or type(event) is WorkAbandoned:
        yield _gradient(event, actions[0], version, measured or Measured(event.time))
    elif type(event) is not UpdateApplied:  # the `Update` record represents it
        yield _record(event, measured)
    for action in actions:  # `match` would take noticeably longer, for each gradient
        if type(action) is ApplyUpdate:
            yield _update(event.time, action, made.get(action.update, _NOT_MEASURED))
        elif type(action) is Pause:
            yield Paused(event.time, action.reason)
        elif type(action) is Resume:
            yield Resumed(event.time)


def record_gap(time: float, policy: Policy, ledger: Ledger, data: list[Any]) -> Gap:
    """Return a record that says where a run is after records were lost.

    It refers to the ledger, so encode it before the next event. `data`: what is done of each
    stream of batches.
    """
    plain = replace(ledger, memory=policy.plain_memory(ledger.memory))
    return Gap(time, ledger.version, ledger.samples, ledger=plain, data=data)


def _update(time: float, action: ApplyUpdate, made: Made) -> Update:
    weights, scales = action.weights, action.scales
    scalars = made.scalars
    return Update(
        time,
        action.update,
        tuple([c.worker for c in action.contributions]),
        action.wanted,
        made.sq_norm,
        made.apply_s,
        {name: value if isfinite(value) else None for name, value in scalars.items()}
        if scalars
        else {},
        None if weights.count(weights[0]) == len(weights) else weights,
        None if scales.count(1.0) == len(scales) else scales,
        made.skipped,
    )


def _record(event: Event, measured: Measured | None) -> Record:
    match event:
        case WorkerJoined():
            return Joined(event.time, event.worker)
        case WorkerLeft():
            since = None if measured is None else measured.asked_at
            return Left(event.time, event.worker, event.reason, since)
        case WorkerMissing():
            return Missing(event.time, event.worker, event.reason)
        case TimerFired():
            return Timer(event.time, event.timer)
        case StopRequested():
            return Stopped(event.time, event.at_once)
        case _:
            raise InternalError(f"there is no record for {event!r}")


def _gradient(
    event: GradientArrived | WorkAbandoned, decision: Action, version: int, measured: Measured
) -> Gradient:
    if type(decision) is Accept:
        fate, staleness = Fate.ACCEPTED, decision.update - 1 - decision.version
    elif type(decision) is Drop:
        fate, staleness = decision.fate, version - decision.version
    else:
        raise InternalError(f"the first action on {event!r} must be its fate, got {decision!r}")
    arrived = event if type(event) is GradientArrived else None
    sq_norm = measured.sq_norm if arrived is None or arrived.sq_norm is None else arrived.sq_norm
    return Gradient(
        event.time,
        event.worker,
        event.turn,
        decision.version,
        fate,
        staleness,
        measured.asked_at,
        measured.compute_s,
        0 if arrived is None else arrived.samples,
        measured.pulled_bytes,
        measured.pushed_bytes,
        sq_norm,
        None if arrived is None else arrived.new_samples,
        measured.uses,
        measured.cpu_s,
    )
