# SPDX-License-Identifier: BSD-3-Clause
"""The current numbers of a run, from a trace that is still being written.

`Live.read` reads what was added since the last call and never fails: a missing file, an unfinished
or bad line, and a file that was replaced are all expected. It keeps a few recent numbers for each
worker and nothing that grows with the run. It reads no clock: the caller passes the time.
"""

from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median_low
from typing import NamedTuple

from paceline.core.events import Fate
from paceline.trace.reader import TraceReader
from paceline.trace.schema import (
    EPOCH_SAMPLES,
    Awaited,
    Ended,
    Gap,
    Gradient,
    Header,
    Joined,
    Left,
    Paused,
    Record,
    Restored,
    Resumed,
    Update,
)

__all__ = ["Live", "Moment", "Slowest"]

WINDOW_S = 5.0  # of the trace's time, over which the rate is measured
MARKS = 50  # in the window
MARKS_MIN = 3  # so that even a slow run has a rate
LAG_S = 2.0  # by which the file may be behind
RECENT = 20  # gradients kept for each worker
RECENT_MIN = 3  # of them, to compare workers
RECENT_STALENESS = 64  # gradients
SCALARS_MAX = 16

READ_BYTES = 8 << 20  # in one call; a reader that starts late catches up over several calls

DROPPED = (Fate.LATE, Fate.CANCELLED, Fate.STALE)


@dataclass(frozen=True, slots=True)
class Slowest:
    """The worker that has been slowest recently."""

    worker: int
    mean_s: float  # of its recent gradients; cancelled ones count with the time they ran
    ratio: float  # to the median of all workers
    is_bound: bool = False  # whether `mean_s` is a lower bound, because some were cancelled


@dataclass(frozen=True, slots=True)
class Moment:
    """The state of a run at one moment."""

    version: int
    rate: float | None  # recent updates per second; None: not known yet
    left_s: float | None  # until the goal at this rate; None: not known
    samples: int  # in the updates
    epoch_samples: int | None  # in one epoch; None: not known
    samples_goal: int | None  # the run ends with these many; None: it has another goal, or none
    contributors: int  # to the newest update
    wanted: int
    gradients: int  # whose fate is known
    dropped: int  # late, cancelled or stale
    non_finite: int
    workers: int  # currently in the run
    slowest: Slowest | None
    staleness: float  # mean over recent accepted gradients
    scalars: dict[str, float | None]  # the last value of each
    paused: str  # why; empty: it isn't paused
    restorations: int  # of a server that was killed
    lost: int  # updates, with such a server
    ended: str  # how; empty: it hasn't
    silent_s: float  # since the trace last grew
    waiting_s: dict[int, float] = field(default_factory=dict)
    """How long the run has been waiting for each of these workers, if longer than usual."""

    @property
    def dropped_share(self) -> float:
        """The share of gradients that were dropped."""
        return self.dropped / self.gradients if self.gradients else 0.0


class _Mark(NamedTuple):
    """What had been done by a moment."""

    t: float
    made: int
    samples: int


@dataclass(slots=True)
class _State:
    """What is known from the records so far."""

    version: int = 0
    time: float = 0.0  # of the newest record
    made: int = 0  # updates, including lost ones
    made_at: float = 0.0  # time of the newest of them
    samples: int = 0  # in the updates up to this version
    accepted: int = 0  # samples of gradients that were accepted since the last update
    header: Header | None = None  # of the last restoration
    contributors: int = 0
    wanted: int = 0
    gradients: int = 0
    dropped: int = 0
    non_finite: int = 0
    paused: str = "waiting for workers"
    restorations: int = 0
    lost: int = 0
    ended: str = ""
    here: dict[int, deque[tuple[float, bool]]] = field(default_factory=dict)
    """For each worker in the run: how long recent gradients took, and if they were cancelled."""
    waiting: dict[int, float] = field(default_factory=dict)
    """Workers that the run is waiting for, and when each was asked."""
    fresh: set[int] = field(default_factory=set)  # workers in the run that have no gradient yet
    staleness: deque[int] = field(default_factory=lambda: deque(maxlen=RECENT_STALENESS))
    scalars: dict[str, float | None] = field(default_factory=dict)
    marks: deque["_Mark"] = field(default_factory=lambda: deque(maxlen=MARKS + 2))
    """Moments since the run last resumed."""


class Live:
    """Follows the trace of a run."""

    def __init__(self, path: Path) -> None:
        self._reader = TraceReader(path)
        self._generation = 0
        self._state = _State()
        self._grew_at: float | None = None

    def read(self, now: float) -> None:
        """Read what was added to the file; `now` is in seconds on any clock."""
        before = self._reader.offset
        records = self._reader.read(READ_BYTES)
        if self._reader.generation != self._generation:
            self._generation = self._reader.generation
            self._state = _State()
            before = 0
        if self._grew_at is None or self._reader.offset > before:
            self._grew_at = now
        for record in records:
            _add(self._state, record)

    def moment(self, now: float) -> Moment:
        """Return the state of the run, as far as it was read."""
        state = self._state
        silent_s = 0.0 if self._grew_at is None else max(0.0, now - self._grew_at)
        rate = _rate(state, state.time + silent_s)
        header = state.header or self._reader.header
        return Moment(
            version=state.version,
            rate=rate,
            left_s=_left(state, header, rate),
            samples=state.samples,
            epoch_samples=None if header is None else _epoch_samples(header),
            samples_goal=None if header is None else header.samples,
            contributors=state.contributors,
            wanted=state.wanted,
            gradients=state.gradients,
            dropped=state.dropped,
            non_finite=state.non_finite,
            workers=len(state.here),
            slowest=_slowest(state.here),
            staleness=fmean(state.staleness) if state.staleness else 0.0,
            scalars=dict(state.scalars),
            paused=state.paused,
            restorations=state.restorations,
            lost=state.lost,
            ended=state.ended,
            silent_s=silent_s,
            waiting_s={w: state.time + silent_s - at for w, at in state.waiting.items()},
        )


def _add(state: _State, record: Record) -> None:
    state.time = max(state.time, record.t)
    match record:
        case Gradient():
            _add_gradient(state, record)
        case Update():
            _add_update(state, record)
        case Joined():
            state.here[record.worker] = deque(maxlen=RECENT)
            state.fresh.add(record.worker)
        case Left():
            state.here.pop(record.worker, None)
            state.fresh.discard(record.worker)
            state.waiting.pop(record.worker, None)
        case Awaited():
            state.waiting[record.worker] = record.asked_at
        case Paused():
            state.paused = record.reason
        case Resumed():
            state.paused = ""
            state.marks.clear()
            state.marks.append(_Mark(record.t, state.made, state.samples))
        case Restored():
            _restore(state, record)
        case Gap():
            _continue_after(state, record)
        case Ended():
            state.ended = record.reason
        case _:
            pass


def _restore(state: _State, record: Restored) -> None:
    """Continue from a checkpoint."""
    if record.resumed:
        state.paused = "waiting for workers"
    else:
        state.restorations += 1
        state.lost += max(0, state.version - record.version)
        state.paused = "server restarted; waiting for workers"
    state.version, state.samples, state.accepted = record.version, record.samples, 0
    state.header = record.header
    state.ended = ""
    state.scalars.clear()  # logged at versions that may be lost
    state.here.clear()
    state.fresh.clear()
    state.waiting.clear()


def _continue_after(state: _State, gap: Gap) -> None:
    """Continue from the state recorded at the end of a gap."""
    state.version, state.samples, state.accepted = gap.version, gap.samples, 0
    state.here = {worker: state.here.get(worker, deque(maxlen=RECENT)) for worker in gap.members}
    if gap.ledger is not None:
        state.paused = "waiting for workers" if gap.ledger.paused else ""
    state.marks.clear()
    state.marks.append(_Mark(gap.t, state.made, state.samples))
    state.waiting.clear()


def _add_gradient(state: _State, record: Gradient) -> None:
    state.gradients += 1
    state.waiting.pop(record.worker, None)
    state.dropped += record.fate in DROPPED
    state.non_finite += record.fate is Fate.NON_FINITE
    if record.fate is Fate.ACCEPTED:
        state.staleness.append(record.staleness)
        state.accepted += record.counted_samples
    if record.worker in state.fresh:
        state.fresh.discard(record.worker)  # a warm-up
    elif record.worker in state.here and record.fate is not Fate.DUPLICATE:
        state.here[record.worker].append((record.compute_s, record.fate is Fate.CANCELLED))


def _add_update(state: _State, record: Update) -> None:
    state.version = record.update
    state.waiting.clear()
    state.made += 1
    state.made_at = record.t
    state.samples, state.accepted = state.samples + state.accepted, 0
    state.contributors, state.wanted = len(record.contributors), record.wanted
    state.scalars |= record.scalars
    for name in list(state.scalars)[:-SCALARS_MAX]:
        del state.scalars[name]
    marks = state.marks
    if not marks or record.t - marks[-1].t >= WINDOW_S / MARKS:
        marks.append(_Mark(record.t, state.made, state.samples))
        while len(marks) > MARKS_MIN and marks[1].t <= record.t - WINDOW_S:
            marks.popleft()


def _rate(state: _State, now: float) -> float | None:
    """Return recent updates per second; the rate falls once the next update is overdue."""
    if not state.marks:
        return None
    first = state.marks[0]
    made, span_s = state.made - first.made, state.made_at - first.t
    if made < 1 or span_s <= 0:
        return None
    usual_s = max(LAG_S, span_s / made)
    return made / max(span_s, now - usual_s - first.t)


def _left(state: _State, header: Header | None, rate: float | None) -> float | None:
    """Return the seconds until the first goal is reached at this rate of updates."""
    if header is None or rate is None:
        return None
    updates: list[float] = []
    if header.steps is not None:
        updates.append(header.steps - state.version)
    first = state.marks[0]  # there is one, or there would be no rate
    samples = (state.samples - first.samples) / (state.made - first.made)
    if header.samples is not None and samples > 0:
        updates.append((header.samples - state.samples) / samples)
    return max(0.0, min(updates)) / rate if updates else None


def _epoch_samples(header: Header) -> int | None:
    """Return the number of samples in an epoch, if the run noted it."""
    text = header.about.get(EPOCH_SAMPLES, "")
    return int(text) if text.isdecimal() and int(text) else None


def _slowest(recent: dict[int, deque[tuple[float, bool]]]) -> Slowest | None:
    means = {
        worker: fmean(took_s for took_s, _ in own)
        for worker, own in recent.items()
        if len(own) >= RECENT_MIN
    }
    if len(means) < 2:
        return None
    worker = max(means, key=lambda w: means[w])
    typical_s = median_low(means.values())
    if typical_s <= 0:
        return None
    is_bound = any(is_cancelled for _, is_cancelled in recent[worker])
    return Slowest(worker, means[worker], means[worker] / typical_s, is_bound)
