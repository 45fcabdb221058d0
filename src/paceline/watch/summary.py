# SPDX-License-Identifier: BSD-3-Clause
"""Summarize a trace in numbers: speed, staleness, waste, and a summary of each worker.

A trace is split into segments, one for each server process. Updates that were lost with a server
are counted separately, and the work that went into them is waste.
"""

from collections import Counter, defaultdict
from dataclasses import dataclass
from math import inf

import msgspec
import numpy as np

from paceline.core.events import Fate
from paceline.errors import TraceError
from paceline.trace.schema import (
    Ended,
    Gradient,
    Header,
    Joined,
    Left,
    Paused,
    Record,
    Restored,
    Resumed,
    Trace,
    Update,
)

__all__ = [
    "BREAKS_OFF",
    "RUNNING",
    "Restoration",
    "Segment",
    "Spread",
    "Summary",
    "WorkerSummary",
    "end_reason",
    "kept_updates",
    "outcomes",
    "restorations",
    "split",
    "start_time",
    "summarize",
    "without_lost",
]

BREAKS_OFF = "the trace breaks off"  # end reason of a trace without an end
RUNNING = "still running"


class Spread(msgspec.Struct, frozen=True):
    """The distribution of a quantity."""

    mean: float
    p50: float
    p90: float
    p99: float
    max: float

    @classmethod
    def of(cls, values: list[float]) -> "Spread":
        """Return the spread of these values, of which there must be at least one."""
        p50, p90, p99 = np.percentile(values, [50, 90, 99]).tolist()
        return cls(float(np.mean(values)), p50, p90, p99, float(max(values)))


class Restoration(msgspec.Struct, frozen=True):
    """The run continued from a checkpoint, because it was resumed or its server was killed."""

    t: float
    version: int
    lost: int  # updates: those from version + 1 to version + lost
    down_s: float  # how long there was no server
    resumed: bool  # by the user; otherwise the server was killed


class WorkerSummary(msgspec.Struct, frozen=True):
    """What one worker did."""

    worker: int
    fates: dict[Fate, int]
    lost_gradients: int  # accepted, but in no update that was kept
    samples: int  # in updates that were kept; each counts once, however many gradients use it
    compute_s: Spread | None  # of complete gradients; None: it finished none
    idle_share: float  # of the time from joining to leaving, or to the last update
    lost_s: float  # computation that was lost when it left
    wasted_share: float  # of its computation
    acceptance: float  # share of its gradients that were accepted, without those after the end


class Summary(msgspec.Struct, frozen=True):
    """What a run did."""

    policy: str  # the last one; resuming a run may change it
    workers: int
    updates: int  # that were kept
    updates_per_s: float
    seconds: float  # from the beginning of the run to its last update, kept or lost
    step_s: Spread  # between updates
    contributions: float  # to an update, on average
    staleness_mean: float  # of accepted gradients
    staleness: dict[int, int]  # number of accepted gradients by staleness
    fates: dict[Fate, int]
    lost_gradients: int  # accepted, but in no update that was kept
    samples: int  # in updates that were kept; each counts once, however many gradients use it
    acceptance: float  # share of the gradients that were accepted, without those after the end
    idle_share: float
    wasted_share: float
    sent_bytes_per_update: float  # in both directions
    vain_bytes_per_update: float  # of these, for gradients that were not used
    by_worker: list[WorkerSummary]
    pauses: int
    ended: str
    lost_updates: int
    restorations: list[Restoration]


@dataclass(frozen=True, slots=True)
class Segment:
    """The records of one server process."""

    header: Header  # of this segment; resuming a run may change it
    records: list[Record]
    kept: float  # updates beyond this version were lost; inf: none was
    end: float  # time of its last update; of its beginning if it made none

    def is_lost(self, gradient: Gradient) -> bool:
        """Return whether it was accepted for an update that was lost or never made."""
        if self.kept == inf or gradient.fate is not Fate.ACCEPTED:
            return False
        return gradient.version + gradient.staleness + 1 > self.kept

    def is_wasted(self, gradient: Gradient) -> bool:
        """Return whether its computation was wasted; work under way at the end isn't waste."""
        if gradient.fate is Fate.ACCEPTED:
            return self.is_lost(gradient)
        return gradient.t < self.end


def outcomes(summary: Summary | WorkerSummary) -> Counter[str]:
    """Count the gradients by fate; accepted ones that were lost count as lost."""
    fates = Counter({str(fate): count for fate, count in summary.fates.items()})
    lost = summary.lost_gradients
    return fates - Counter(accepted=lost) + Counter(lost=lost)


def split(trace: Trace) -> list[Segment]:
    """Split a trace into segments; each `Restored` begins a new one."""
    begins = [i for i, record in enumerate(trace.records) if type(record) is Restored]
    segments: list[Segment] = []
    kept, stop = inf, len(trace.records)
    for begin in reversed([0, *begins]):
        records = trace.records[begin:stop]
        begin_s = records[0].t if records else 0.0
        end = max((r.t for r in records if type(r) is Update), default=begin_s)
        # Gradients accepted for an update that was not made before the end are lost.
        kept = min([kept, *(r.version for r in records if type(r) is Ended)])
        first = records[0] if records else None
        if isinstance(first, Restored):
            segments.append(Segment(first.header, records, kept, end))
            kept = min(kept, first.version)
        else:
            segments.append(Segment(trace.header, records, kept, end))
        stop = begin
    return segments[::-1]


def kept_updates(segments: list[Segment]) -> list[Update]:
    """Return the updates that were not lost, in order."""
    return [
        record
        for segment in segments
        for record in segment.records
        if type(record) is Update and record.update <= segment.kept
    ]


def without_lost(trace: Trace) -> Trace:
    """Return the trace without lost updates and the gradients in them."""
    records = [
        record
        for segment in split(trace)
        for record in segment.records
        if not (isinstance(record, Update) and record.update > segment.kept)
        and not (isinstance(record, Gradient) and segment.is_lost(record))
    ]
    return Trace(trace.header, records)


def restorations(trace: Trace) -> list[Restoration]:
    """Return each restoration, and how many updates it lost."""
    found: list[Restoration] = []
    version = 0
    for record in trace.records:
        if isinstance(record, Update):
            version = record.update
        elif isinstance(record, Restored):
            lost = max(0, version - record.version)
            found.append(Restoration(record.t, record.version, lost, record.down_s, record.resumed))
            version = record.version
    return found


def end_reason(trace: Trace) -> str:
    """Return why the run ended; one that was resumed after its end has not ended."""
    last = next((r for r in reversed(trace.records) if isinstance(r, Ended | Restored)), None)
    if isinstance(last, Ended):
        return last.reason
    return RUNNING if trace.is_growing else BREAKS_OFF


def summarize(trace: Trace) -> Summary:
    """Summarize a run; raise `TraceError` if it made no update."""
    segments = split(trace)
    updates = kept_updates(segments)
    if not updates:
        raise TraceError("the run made no update, so there is nothing to summarize")
    gradients = list(trace.gradients())
    accepted = [g for g in without_lost(trace).gradients() if g.fate is Fate.ACCEPTED]
    wasted = [g for s in segments for g in s.records if type(g) is Gradient and s.is_wasted(g)]
    times = [start_time(trace), *(u.t for u in trace.updates())]
    seconds = times[-1] - times[0]
    by_worker = _by_worker(segments)
    lost_s = sum(w.lost_s for w in by_worker)
    computed_s = sum(g.compute_s for g in gradients) + lost_s
    wasted_s = sum(g.compute_s for g in wasted) + lost_s
    restored = restorations(trace)
    return Summary(
        policy=segments[-1].header.policy,
        workers=segments[-1].header.workers,
        updates=len(updates),
        updates_per_s=len(updates) / seconds if seconds else inf,
        seconds=seconds,
        step_s=Spread.of(np.diff(times).tolist()),
        contributions=float(np.mean([len(u.contributors) for u in updates])),
        staleness_mean=float(np.mean([g.staleness for g in accepted])),
        staleness=dict(sorted(Counter(g.staleness for g in accepted).items())),
        fates=dict(Counter(g.fate for g in gradients)),
        lost_gradients=sum(w.lost_gradients for w in by_worker),
        samples=sum(w.samples for w in by_worker),
        acceptance=_acceptance(gradients, wasted),
        idle_share=float(np.mean([w.idle_share for w in by_worker])),
        wasted_share=wasted_s / computed_s if computed_s else 0.0,
        sent_bytes_per_update=_bytes(gradients) / len(updates),
        vain_bytes_per_update=_bytes(wasted) / len(updates),
        by_worker=by_worker,
        pauses=sum(isinstance(r, Paused) for r in trace.records),
        ended=end_reason(trace),
        lost_updates=sum(r.lost for r in restored),
        restorations=restored,
    )


def start_time(trace: Trace) -> float:
    """Return when the run began, which is some time after its server started."""
    return next((r.t for r in trace.records if isinstance(r, Resumed)), 0.0)


def _bytes(gradients: list[Gradient]) -> float:
    return sum(g.pulled_bytes + g.pushed_bytes for g in gradients)


def _acceptance(gradients: list[Gradient], wasted: list[Gradient]) -> float:
    """Return the share that was accepted, without work that was under way at the end."""
    accepted = sum(g.fate is Fate.ACCEPTED for g in gradients)
    dropped = sum(g.fate is not Fate.ACCEPTED for g in wasted)
    return accepted / max(1, accepted + dropped)


@dataclass(slots=True)
class _WorkerTotals:
    """What a worker did until the last update of each segment."""

    gradients: list[Gradient]
    wasted: list[Gradient]
    here_s: float = 0.0
    busy_s: float = 0.0
    lost_s: float = 0.0  # computation that was lost when it left


def _by_worker(segments: list[Segment]) -> list[WorkerSummary]:
    totals: dict[int, _WorkerTotals] = defaultdict(lambda: _WorkerTotals([], []))
    for segment in segments:
        _add_segment(segment, totals)
    return [_worker(worker, totals[worker]) for worker in sorted(totals)]


def _add_segment(segment: Segment, totals: dict[int, _WorkerTotals]) -> None:
    """Add what each worker did in one segment; all workers leave at its end."""
    end = segment.end
    since: dict[int, float] = {}
    for record in segment.records:
        match record:
            case Joined():
                since[record.worker] = min(record.t, end)
            case Left() if record.worker in since:
                own = totals[record.worker]
                own.here_s += min(record.t, end) - since.pop(record.worker)
                if record.working_since is not None:
                    worked_s = min(record.t, end) - min(record.working_since, end)
                    own.lost_s += worked_s
                    own.busy_s += worked_s
            case Gradient():
                own = totals[record.worker]
                own.gradients.append(record)
                own.busy_s += min(record.t, end) - min(record.asked_at, end)
                if segment.is_wasted(record):
                    own.wasted.append(record)
            case _:
                pass
    for worker, joined_at in since.items():
        totals[worker].here_s += end - joined_at


def _worker(worker: int, totals: _WorkerTotals) -> WorkerSummary:
    lost = [g for g in totals.wasted if g.fate is Fate.ACCEPTED]
    accepted = [g for g in totals.gradients if g.fate is Fate.ACCEPTED]
    computed_s = sum(g.compute_s for g in totals.gradients) + totals.lost_s
    wasted_s = sum(g.compute_s for g in totals.wasted) + totals.lost_s
    complete = [g.compute_s for g in totals.gradients if g.fate is not Fate.CANCELLED]
    return WorkerSummary(
        worker=worker,
        fates=dict(Counter(g.fate for g in totals.gradients)),
        lost_gradients=len(lost),
        samples=sum(g.counted_samples for g in accepted) - sum(g.counted_samples for g in lost),
        compute_s=Spread.of(complete) if complete else None,
        idle_share=max(0.0, 1 - totals.busy_s / totals.here_s) if totals.here_s else 0.0,
        lost_s=totals.lost_s,
        wasted_share=wasted_s / computed_s if computed_s else 0.0,
        acceptance=_acceptance(totals.gradients, totals.wasted),
    )
