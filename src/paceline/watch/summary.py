# SPDX-License-Identifier: BSD-3-Clause
"""Summarize a trace in numbers: speed, staleness, waste, and a summary of each worker.

Updates that were lost with a server are counted separately, and the work that went into them is
waste. What a gap hides is left out of all numbers, and listed.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

import msgspec
import numpy as np

from paceline.core.events import Fate
from paceline.errors import TraceError
from paceline.trace.schema import (
    Ended,
    Gap,
    Gradient,
    Joined,
    Left,
    Paused,
    Restored,
    Trace,
    Update,
)
from paceline.watch.gaps import MissingPart, missing_parts
from paceline.watch.segments import (
    Segment,
    TimedUpdate,
    kept_updates,
    split,
    start_time,
    step_times,
    without_lost,
)
from paceline.watch.traffic import Traffic

__all__ = [
    "BREAKS_OFF",
    "RUNNING",
    "Restoration",
    "Spread",
    "Summary",
    "WorkerSummary",
    "end_reason",
    "outcomes",
    "restorations",
    "summarize",
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
    traffic: Traffic = Traffic()


class Summary(msgspec.Struct, frozen=True):
    """What a run did."""

    policy: str  # the last one; resuming a run may change it
    workers: int
    updates: int  # that were kept, and that the trace has
    updates_per_s: float | None  # None: gaps of the trace hide how long they took
    seconds: float  # from the beginning of the run to its last update, kept or lost
    step_s: Spread | None  # between updates; None: gaps of the trace hide all of it
    contributions: float  # to an update, on average
    staleness_mean: float  # of accepted gradients
    staleness: dict[int, int]  # number of accepted gradients by staleness
    fates: dict[Fate, int]
    lost_gradients: int  # accepted, but in no update that was kept
    samples: int  # in updates that were kept; each counts once, however many gradients use it
    acceptance: float  # share of the gradients that were accepted, without those after the end
    idle_share: float
    wasted_share: float
    traffic: Traffic  # all zero where memory is shared
    traffic_per_update: Traffic  # the mean
    by_worker: list[WorkerSummary]
    pauses: int
    ended: str
    lost_updates: int
    skipped_updates: int  # of those that were kept: the optimizer did not step
    restorations: list[Restoration]
    missing: list[MissingPart]  # the gaps of the trace


def outcomes(summary: Summary | WorkerSummary) -> Counter[str]:
    """Count the gradients by fate; accepted ones that were lost count as lost."""
    fates = Counter({str(fate): count for fate, count in summary.fates.items()})
    lost = summary.lost_gradients
    return fates - Counter(accepted=lost) + Counter(lost=lost)


def restorations(trace: Trace) -> list[Restoration]:
    """Return each restoration, and how many updates it lost."""
    found: list[Restoration] = []
    version = 0
    for record in trace.records:
        if isinstance(record, Update):
            version = record.update
        elif isinstance(record, Gap):
            version = record.version
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
    """Summarize a run; raise `TraceError` if its trace has no update that was kept."""
    segments = split(trace)
    updates = kept_updates(segments)
    if not updates:
        raise TraceError("the trace has no update that was kept, so there is nothing to summarize")
    gradients = list(trace.gradients())
    accepted = [g for g in without_lost(trace).gradients() if g.fate is Fate.ACCEPTED]
    wasted = [g for s in segments for g in s.records if type(g) is Gradient and s.is_wasted(g)]
    steps = step_times(trace, start_time(trace))
    by_worker = _by_worker(segments)
    lost_s = sum(w.lost_s for w in by_worker)
    computed_s = sum(g.compute_s for g in gradients) + lost_s
    wasted_s = sum(g.compute_s for g in wasted) + lost_s
    restored, traffic = restorations(trace), Traffic.of(gradients, wasted)
    return Summary(
        policy=segments[-1].header.policy,
        workers=segments[-1].header.workers,
        updates=len(updates),
        updates_per_s=_rate(steps),
        seconds=max(update.t for update in trace.updates()) - start_time(trace),
        step_s=Spread.of([step.lasted_s for step in steps]) if steps else None,
        contributions=float(np.mean([len(u.contributors) for u in updates])),
        staleness_mean=_mean([g.staleness for g in accepted]),
        staleness=dict(sorted(Counter(g.staleness for g in accepted).items())),
        fates=dict(Counter(g.fate for g in gradients)),
        lost_gradients=sum(w.lost_gradients for w in by_worker),
        samples=sum(w.samples for w in by_worker),
        acceptance=_acceptance(gradients, wasted),
        idle_share=_mean([w.idle_share for w in by_worker]),
        wasted_share=wasted_s / computed_s if computed_s else 0.0,
        traffic=traffic,
        traffic_per_update=traffic.per(len(updates)),
        by_worker=by_worker,
        pauses=sum(isinstance(r, Paused) for r in trace.records),
        ended=end_reason(trace),
        lost_updates=sum(r.lost for r in restored),
        skipped_updates=sum(u.skipped for u in updates),
        restorations=restored,
        missing=missing_parts(trace),
    )


def _rate(steps: list[TimedUpdate]) -> float | None:
    """Return how many updates per second were made and kept; None: not known."""
    kept, seconds = sum(step.is_kept for step in steps), sum(step.lasted_s for step in steps)
    if not kept:
        return None
    return kept / seconds if seconds else inf


def _mean(values: Sequence[float]) -> float:
    """Return the mean; 0 if a gap hides all values."""
    return float(np.mean(values)) if values else 0.0


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
            case Gap():
                since = {worker: min(record.t, end) for worker in record.members}
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
                begin = max(record.asked_at, since.get(record.worker, record.asked_at))
                own.busy_s += min(record.t, end) - min(begin, end)
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
        traffic=Traffic.of(totals.gradients, totals.wasted),
    )
