# SPDX-License-Identifier: BSD-3-Clause
"""The trace of a run: one schema for simulated and real runs, JSON lines, versioned.

The first line is the header; then comes one record for each thing that happened, in order. A trace
holds the run's events whole, so that `events` can be fed to any policy again, together with what
the policy decided and with what only the shell knew (computation times, bytes, gradient norms).

Records are plain typed values; this room computes nothing from them but the events.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from math import isfinite
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Literal, TypeVar

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
    WorkAbandoned,
    WorkerJoined,
    WorkerLeft,
)
from paceline.core.policy import Policy
from paceline.errors import InternalError, TraceError
from paceline.spec import Late, RunSpec

__all__ = [
    "FORMAT",
    "Ended",
    "Gradient",
    "Header",
    "Joined",
    "Left",
    "Made",
    "Measured",
    "Paused",
    "Record",
    "Resumed",
    "Stopped",
    "Timer",
    "Trace",
    "Update",
    "event_of",
    "read_trace",
    "record_event",
    "write_trace",
]

FORMAT = 1

Whole = Annotated[int, msgspec.Meta(ge=0)]
Amount = Annotated[float, msgspec.Meta(ge=0)]


class _Line(msgspec.Struct, frozen=True, gc=False, omit_defaults=True, forbid_unknown_fields=True):
    """A line of the file; its "type" is the name of its class in lower case."""


class Header(_Line, tag="header", frozen=True, kw_only=True, omit_defaults=False):
    """The first line: what was run."""

    source: Literal["sim", "run"]
    policy: str
    workers: int
    steps: int | None = None
    min_workers: int = 1
    late: Late = "cancel"
    seed: int = 0
    about: dict[str, str] = {}  # whatever else a reader may want to know, for people
    format: int = msgspec.field(default=FORMAT, name="paceline_trace")

    @classmethod
    def of(
        cls, source: Literal["sim", "run"], policy: Policy, spec: RunSpec, about: dict[str, str]
    ) -> "Header":
        """The header of a run of this policy and spec."""
        return cls(source=source, policy=str(policy), about=about, **asdict(spec))

    def spec(self) -> RunSpec:
        """The description of the run that was traced."""
        return RunSpec(
            workers=self.workers,
            steps=self.steps,
            min_workers=self.min_workers,
            late=self.late,
            seed=self.seed,
        )


class Joined(_Line, tag="joined", frozen=True):
    """A worker joined."""

    t: float
    worker: Whole


class Left(_Line, tag="left", frozen=True):
    """A worker left."""

    t: float
    worker: Whole
    reason: str = ""
    working_since: float | None = None  # when it was asked for the work that is lost with it


class Gradient(_Line, tag="gradient", frozen=True):
    """A gradient arrived, or was given up (fate "cancelled")."""

    t: float
    worker: Whole
    turn: Whole
    version: Whole
    fate: Fate
    staleness: Whole  # in updates: when applied if accepted, otherwise at time t
    asked_at: float  # when the server sent the parameters
    compute_s: Amount  # spent on computing; all of it, unless the fate is "cancelled"
    samples: Whole = 1
    pulled_bytes: Amount = 0
    pushed_bytes: Amount = 0
    sq_norm: Amount | None = None  # the squared norm of the gradient, where it was measured


class Update(_Line, tag="update", frozen=True):
    """An update was made."""

    t: float
    update: Whole
    contributors: tuple[int, ...]
    wanted: Whole
    sq_norm: Amount | None = None  # of the averaged gradient, where it was measured
    apply_s: Amount = 0  # spent on adding up, stepping and publishing
    scalars: dict[str, float | None] = {}
    """What the scripts logged, averaged over the contributors; None: it was not finite."""


class Timer(_Line, tag="timer", frozen=True):
    """A timer fired."""

    t: float
    timer: Whole


class Stopped(_Line, tag="stopped", frozen=True):
    """The run was told to stop."""

    t: float


class Paused(_Line, tag="paused", frozen=True):
    """The run paused, and this is what it waits for."""

    t: float
    reason: str


class Resumed(_Line, tag="resumed", frozen=True):
    """The run began, or went on."""

    t: float


class Ended(_Line, tag="ended", frozen=True):
    """The run ended; its last update may have been earlier than the last report on some work."""

    t: float
    version: Whole
    unused: tuple[int, ...] = ()  # workers whose accepted gradients came into no update
    reason: str = "finished"


Record = Joined | Left | Gradient | Update | Timer | Stopped | Paused | Resumed | Ended


class _Format(msgspec.Struct, tag="header"):
    """As much of a header as any version of the format has."""

    paceline_trace: int


T = TypeVar("T")

_NOTHING_MADE: Mapping[int, "Made"] = MappingProxyType({})

_FORMAT = msgspec.json.Decoder(_Format)
_RECORD = msgspec.json.Decoder(Record)
_HEADER = msgspec.json.Decoder(Header)


class Measured(msgspec.Struct, frozen=True, gc=False):
    """What only the shell knows of a piece of work."""

    asked_at: float
    compute_s: float = 0.0
    pulled_bytes: float = 0.0
    pushed_bytes: float = 0.0
    sq_norm: float | None = None


@dataclass(frozen=True, slots=True)
class Made:
    """What only the shell knows of an update."""

    sq_norm: float | None = None
    apply_s: float = 0.0
    scalars: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Trace:
    """A whole trace: the header and the records in order."""

    header: Header
    records: list[Record]

    def gradients(self) -> Iterator[Gradient]:
        """The gradients, in order of arrival."""
        return (r for r in self.records if type(r) is Gradient)

    def updates(self) -> Iterator[Update]:
        """The updates, in order."""
        return (r for r in self.records if type(r) is Update)

    def events(self) -> Iterator[Event]:
        """What happened, as the core saw it; feed it to a `Decider` to decide again."""
        return (event for record in self.records if (event := event_of(record)) is not None)


def event_of(record: Record) -> Event | None:
    """The event that this record tells of; None: it tells of a decision."""
    event: Event | None = None
    match record:
        case Gradient(fate=Fate.CANCELLED):
            event = WorkAbandoned(record.t, record.worker, record.turn)
        case Gradient(t, worker, turn, version, fate, samples=samples):
            finite = fate is not Fate.NON_FINITE
            event = GradientArrived(t, worker, turn, version, samples, finite)
        case Joined(t, worker):
            event = WorkerJoined(t, worker)
        case Left(t, worker, reason):
            event = WorkerLeft(t, worker, reason)
        case Timer(t, timer):
            event = TimerFired(t, timer)
        case Stopped(t):
            event = StopRequested(t)
        case _:
            pass
    return event


def record_event(
    event: Event,
    actions: list[Action],
    version: int,
    measured: Measured | None = None,
    made: Mapping[int, Made] = _NOTHING_MADE,
) -> Iterator[Record]:
    """The records of one event and of what was decided on it, made as they are asked for.

    `version` is the server's before the event. The end of a run is not recorded here, because work
    may still be reported after it.
    """
    yield _record(event, actions, version, measured)
    for action in actions:
        match action:
            case ApplyUpdate():
                yield _update(event.time, action, made.get(action.update))
            case Pause():
                yield Paused(event.time, action.reason)
            case Resume():
                yield Resumed(event.time)
            case _:
                pass


def _update(time: float, action: ApplyUpdate, made: Made | None) -> Update:
    contributors = tuple([c.worker for c in action.contributions])
    if made is None:
        return Update(time, action.update, contributors, action.wanted)
    scalars = {name: value if isfinite(value) else None for name, value in made.scalars.items()}
    known = (made.sq_norm, made.apply_s, scalars)
    return Update(time, action.update, contributors, action.wanted, *known)


def _record(event: Event, actions: list[Action], version: int, measured: Measured | None) -> Record:
    match event:
        case GradientArrived() | WorkAbandoned():
            return _gradient(event, actions[0], version, measured or Measured(event.time, 0.0))
        case WorkerJoined():
            return Joined(event.time, event.worker)
        case WorkerLeft():
            since = None if measured is None else measured.asked_at
            return Left(event.time, event.worker, event.reason, since)
        case TimerFired():
            return Timer(event.time, event.timer)
        case _:
            return Stopped(event.time)


def _gradient(
    event: GradientArrived | WorkAbandoned, decision: Action, version: int, measured: Measured
) -> Gradient:
    if type(decision) is Accept:
        fate, staleness = Fate.ACCEPTED, decision.update - 1 - decision.version
    elif type(decision) is Drop:
        fate, staleness = decision.fate, version - decision.version
    else:
        raise InternalError(f"the first action on {event!r} must be its fate, got {decision!r}")
    return Gradient(
        event.time,
        event.worker,
        event.turn,
        decision.version,
        fate,
        staleness,
        measured.asked_at,
        measured.compute_s,
        event.samples if type(event) is GradientArrived else 0,
        measured.pulled_bytes,
        measured.pushed_bytes,
        measured.sq_norm,
    )


def write_trace(trace: Trace, path: str | os.PathLike[str]) -> None:
    """Write the trace as JSON lines; a file appears whole or not at all."""
    target = Path(path)
    try:
        if target.exists() and not target.is_file():  # a pipe, say; it cannot be put in place whole
            _write_lines(trace, target)
            return
        partial = target.parent / f".{target.name}.partial"
        try:
            _write_lines(trace, partial)
            partial.replace(target)
        except BaseException:
            with suppress(OSError):
                partial.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise TraceError(f"cannot write {os.fspath(path)}: {error.strerror}") from None


def _write_lines(trace: Trace, path: Path) -> None:
    encode = msgspec.json.Encoder().encode
    with path.open("wb") as file:
        file.writelines(encode(line) + b"\n" for line in (trace.header, *trace.records))


def read_trace(path: str | os.PathLike[str]) -> Trace:
    """Read a trace; raises `TraceError` that names the line and the reason if it is bad."""
    name = os.fspath(path)
    try:
        lines = Path(path).read_bytes().splitlines()
    except OSError as error:
        raise TraceError(f"cannot read {name}: {error.strerror}") from None
    if not lines:
        raise TraceError(f"{name} is empty; a trace begins with its header")
    found = _decode(_FORMAT, lines[0], f"{name}:1 (the header)").paceline_trace
    if found != FORMAT:
        raise TraceError(f"{name}:1 has format {found}; this version reads {FORMAT}")
    header = _decode(_HEADER, lines[0], f"{name}:1 (the header)")
    records = [_decode(_RECORD, line, f"{name}:{n}") for n, line in enumerate(lines[1:], start=2)]
    return Trace(header, records)


def _decode(decoder: "msgspec.json.Decoder[T]", line: bytes, place: str) -> T:
    if not line.strip():
        raise TraceError(f"{place}: the line is empty")
    try:
        return decoder.decode(line)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise TraceError(f"{place}: {error}") from None
