# SPDX-License-Identifier: BSD-3-Clause
"""The trace of a run: one versioned schema for simulated and real runs, as JSON lines.

The first line is the header; one record follows for each thing that happened, in order. A trace
holds all events of the run, so that `events` can be replayed with any policy, together with what
the policy decided and what only the shell knew (computation times, bytes, gradient norms).

Records are plain typed values; this module computes nothing from them but the events.
"""

import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from paceline.core.events import (
    Event,
    Fate,
    GradientArrived,
    StopRequested,
    TimerFired,
    UpdateApplied,
    WorkAbandoned,
    WorkerJoined,
    WorkerLeft,
    WorkerMissing,
)
from paceline.core.ledger import Ledger, Origin
from paceline.core.policy import Policy
from paceline.errors import TraceError
from paceline.files import DISK, DiskFile, atomic_write
from paceline.leases import Use
from paceline.spec import Late, RunSpec

__all__ = [
    "FINISHED",
    "FORMAT",
    "NAME",
    "STOPPED",
    "WITH_NOTICE",
    "Awaited",
    "Ended",
    "Gap",
    "Gradient",
    "Header",
    "Joined",
    "Left",
    "Missing",
    "Paused",
    "Record",
    "Restored",
    "Resumed",
    "Skipped",
    "Stopped",
    "Timer",
    "Trace",
    "Update",
    "event_of",
    "write_trace",
]

FORMAT = 2
"""The newest format. In format 1, updates have no weights and scales."""

NAME = "trace.jsonl"  # in the folder of a run

EPOCH_SAMPLES = "epoch_samples"  # what a header says about the training data, if it is known

LINES_AT_ONCE = 10_000  # that are encoded before they are written

FINISHED = "finished"  # the run made all its updates
STOPPED = "stopped"  # the run was stopped before that

WITH_NOTICE = "with notice"
"""Why a worker left that had said so, because its host was about to go; this is no failure."""

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
    samples: int | None = None
    min_workers: int = 1
    late: Late = "cancel"
    seed: int = 0
    cores: Amount | None = None  # that the processes of the run share; None: unknown
    optimizers: Whole = 1
    about: dict[str, str] = {}  # further information for people
    format: int = msgspec.field(default=FORMAT, name="paceline_trace")

    @classmethod
    def of(
        cls, source: Literal["sim", "run"], policy: Policy, spec: RunSpec, about: dict[str, str]
    ) -> "Header":
        """Return the header of a run with this policy and spec."""
        return cls(source=source, policy=str(policy), about=about, **asdict(spec))

    @property
    def has_weights(self) -> bool:
        """Whether the updates of this run are recorded with their weights and scales."""
        return self.format >= 2

    def spec(self) -> RunSpec:
        """Return the spec of the run."""
        return RunSpec(**{part.name: getattr(self, part.name) for part in fields(RunSpec)})


class Joined(_Line, tag="joined", frozen=True):
    """A worker joined."""

    t: float
    worker: Whole


class Left(_Line, tag="left", frozen=True):
    """A worker left."""

    t: float
    worker: Whole
    reason: str = ""
    working_since: float | None = None  # when it was asked for the work that is lost


class Missing(_Line, tag="missing", frozen=True):
    """A worker will never join."""

    t: float
    worker: Whole
    reason: str = ""


class Gradient(_Line, tag="gradient", frozen=True):
    """A gradient arrived, or was abandoned (fate "cancelled")."""

    t: float
    worker: Whole
    turn: Whole
    version: Whole
    fate: Fate
    staleness: Whole  # in updates: when applied if accepted, otherwise at time t
    asked_at: float  # when the server sent the parameters
    compute_s: Amount  # computation time; up to the cancellation if the fate is "cancelled"
    samples: Whole = 1
    pulled_bytes: Amount = 0
    pushed_bytes: Amount = 0
    sq_norm: Amount | None = None  # the squared norm of the gradient, if it was measured
    new_samples: Whole | None = None  # that no accepted gradient used before; None: all
    uses: tuple[Use, ...] = ()  # the batches of the shared order that it was computed on
    cpu_s: Amount = 0  # processor time of the worker's process since its last report

    @property
    def counted_samples(self) -> int:
        """The samples that this gradient adds to those of the run, if it is accepted."""
        return self.samples if self.new_samples is None else self.new_samples


class Skipped(_Line, tag="skipped", frozen=True):
    """A worker's script moved past batches without a step on them: they count as done."""

    t: float
    worker: Whole
    use: Use


class Awaited(_Line, tag="awaited", frozen=True):
    """The run has been waiting for a worker's gradient for much longer than usual."""

    t: float
    worker: Whole
    asked_at: float


class Update(_Line, tag="update", frozen=True):
    """An update was made."""

    t: float
    update: Whole
    contributors: tuple[int, ...]
    wanted: Whole
    sq_norm: Amount | None = None  # of the averaged gradient, if it was measured
    apply_s: Amount = 0  # time for adding up, stepping and publishing
    scalars: dict[str, float | None] = {}
    """What the scripts logged, averaged over the contributors; None: not finite."""

    weights: tuple[float, ...] | None = None
    """The weight of each contributor, proportional to its samples; None: all are equal."""

    scales: tuple[float, ...] | None = None
    """The factor that multiplies each contributor's weight; None: all are 1."""

    skipped: bool = False
    """Whether the optimizer did not step, because the averaged gradient wasn't finite."""

    def weighted(self) -> list[tuple[float, float]]:
        """Return the weight and the scale of each contributor, as the policy decided them."""
        count = len(self.contributors)
        weights = self.weights or (1 / count,) * count
        return list(zip(weights, self.scales or (1.0,) * count, strict=True))


class Timer(_Line, tag="timer", frozen=True):
    """A timer fired."""

    t: float
    timer: Whole


class Stopped(_Line, tag="stopped", frozen=True):
    """The run was asked to stop."""

    t: float
    at_once: bool = False  # with the newest version, although gradients were waiting for an update


class Paused(_Line, tag="paused", frozen=True):
    """The run paused; `reason` says what it waits for."""

    t: float
    reason: str


class Resumed(_Line, tag="resumed", frozen=True):
    """The run began, or continued after a pause."""

    t: float


class Restored(_Line, tag="restored", frozen=True):
    """A run that was stopped, or lost its server, continues from this version without workers.

    Later updates that precede this line in the trace are lost, and made again.
    """

    t: float  # the run's clock stops while there is no server
    version: Whole
    header: Header  # of the run from now on
    down_s: Amount = 0  # how long there was no server
    turns: dict[int, Whole] = {}  # how many turns each worker has had
    memory: Any = None  # the policy's memory as plain values
    resumed: bool = False  # resumed by a user; otherwise the server was killed and restarted
    samples: Whole = 0  # in the updates up to this version
    data: list[Any] = []  # by stream: samples done, the next batch, batches that aren't done

    def origin(self) -> Origin:
        """Return where the run continues from, for a `Decider`."""
        return Origin(self.version, self.turns, self.memory, self.samples)


class Gap(_Line, tag="gap", frozen=True):
    """Records are missing here: the disk was full, or the end of the file was lost."""

    t: float  # when the next record could be written
    version: Whole  # at that time
    samples: Whole = 0  # in the updates up to this version
    records: Whole | None = None  # how many are missing; None: not known
    ledger: Ledger | None = None
    """The state of the core at that time, its memory as plain values; None: the run is restored."""

    data: list[Any] = []  # by stream: samples done, the next batch, batches that aren't done

    @property
    def members(self) -> list[int]:
        """The workers that were here at that time."""
        return [] if self.ledger is None else list(self.ledger.members)


class Ended(_Line, tag="ended", frozen=True):
    """The run ended at time `t`; workers may still have reported after that."""

    t: float
    version: Whole
    unused: tuple[int, ...] = ()  # workers whose accepted gradients went into no update
    reason: str = FINISHED  # or `STOPPED`, or why the run failed
    data: list[Any] = []  # by stream: samples done, the next batch, batches that aren't done
    checksum: Whole | None = None  # CRC-32 of all lines before this one; None: not known


Happened = (
    Joined
    | Left
    | Missing
    | Gradient
    | Skipped
    | Awaited
    | Update
    | Timer
    | Stopped
    | Paused
    | Resumed
)
Record = Happened | Restored | Gap | Ended


@dataclass(frozen=True, slots=True)
class Trace:
    """A complete trace: the header and the records in order."""

    header: Header
    records: list[Record]
    is_growing: bool = False  # whether its run hasn't ended yet
    changed_before: int = 0  # the line before which its file was changed after the end; 0: none

    def gradients(self) -> Iterator[Gradient]:
        """Return the gradients, in order of arrival."""
        return (r for r in self.records if type(r) is Gradient)

    def updates(self) -> Iterator[Update]:
        """Return the updates, in order."""
        return (r for r in self.records if type(r) is Update)

    def events(self) -> Iterator[Event]:
        """Return the events that the core saw; pass them to a `Decider` to replay the run."""
        return (event for record in self.records if (event := event_of(record)) is not None)


def event_of(record: Record) -> Event | None:
    """Return the event that this record stands for; None: it stands for a decision."""
    event: Event | None = None
    match record:
        case Gradient(fate=Fate.CANCELLED):
            event = WorkAbandoned(record.t, record.worker, record.turn)
        case Gradient(t, worker, turn, version, fate, samples=samples, sq_norm=sq_norm):
            finite, new = fate is not Fate.NON_FINITE, record.new_samples
            event = GradientArrived(t, worker, turn, version, samples, finite, sq_norm, new)
        case Update(t, update, sq_norm=sq_norm):
            event = UpdateApplied(t, update, sq_norm)
        case Joined(t, worker):
            event = WorkerJoined(t, worker)
        case Left(t, worker, reason):
            event = WorkerLeft(t, worker, reason)
        case Missing(t, worker, reason):
            event = WorkerMissing(t, worker, reason)
        case Timer(t, timer):
            event = TimerFired(t, timer)
        case Stopped(t, at_once):
            event = StopRequested(t, at_once)
        case _:
            pass
    return event


def write_trace(trace: Trace, path: str | os.PathLike[str]) -> None:
    """Write the trace as JSON lines, atomically."""
    target = Path(path)
    try:
        # A pipe, for example, can't be replaced atomically.
        is_replaceable = target.is_file() or not target.exists()
        with atomic_write(target) if is_replaceable else DISK.open(target, "wb") as file:
            _write_lines(trace, file)
    except OSError as error:
        raise TraceError(f"cannot write {os.fspath(path)}: {error.strerror}") from None


def _write_lines(trace: Trace, file: DiskFile) -> None:
    encode = msgspec.json.Encoder().encode
    file.write(encode(trace.header) + b"\n")
    for first in range(0, len(trace.records), LINES_AT_ONCE):
        records = trace.records[first : first + LINES_AT_ONCE]
        file.write(b"".join([encode(record) + b"\n" for record in records]))
