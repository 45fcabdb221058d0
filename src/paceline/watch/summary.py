# SPDX-License-Identifier: BSD-3-Clause
"""The numbers in a trace: how fast, how stale, how much was wasted, and who was slow.

A run whose server was restored is told in stretches, one for each life of the server. What stands
in the end is counted; what was lost with a server is counted apart, and the work in it is waste.
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
    "Spread",
    "Stretch",
    "Summary",
    "WorkerSummary",
    "began",
    "how_it_ended",
    "outcomes",
    "restorations",
    "split",
    "standing_updates",
    "summarize",
    "without_lost",
]

BREAKS_OFF = "the trace breaks off"  # how a run ended that has no end
RUNNING = "still running"


class Spread(msgspec.Struct, frozen=True):
    """How a quantity is distributed."""

    mean: float
    p50: float
    p90: float
    p99: float
    max: float

    @classmethod
    def of(cls, values: list[float]) -> "Spread":
        """The spread of these values; there must be at least one."""
        p50, p90, p99 = np.percentile(values, [50, 90, 99]).tolist()
        return cls(float(np.mean(values)), p50, p90, p99, float(max(values)))


class Restoration(msgspec.Struct, frozen=True):
    """The server was killed, or the run was resumed, and it went on from an earlier version."""

    t: float
    version: int
    lost: int  # updates; they are those from version + 1 to version + lost
    down_s: float  # for how long there was no server
    resumed: bool  # by somebody; otherwise the server was killed


class WorkerSummary(msgspec.Struct, frozen=True):
    """What one worker did."""

    worker: int
    fates: dict[Fate, int]
    lost_gradients: int  # of the accepted, those in no update that stands
    samples: int  # in updates that stand
    compute_s: Spread | None  # of whole gradients; None: it finished none
    idle_share: float  # of the time that it was here, up to the last update
    lost_s: float  # work that died with it
    wasted_share: float  # of the time that it computed, what came to nothing
    acceptance: float  # the share of its gradients that were accepted, of those before the end


class Summary(msgspec.Struct, frozen=True):
    """What a run did."""

    policy: str  # in the end, as whoever resumes a run may change it
    workers: int
    updates: int  # that stand in the end
    updates_per_s: float
    seconds: float  # from the beginning of the run to its last update, whether it stands or not
    step_s: Spread  # between updates
    contributions: float  # to an update, on average
    staleness_mean: float  # of the gradients that were accepted
    staleness: dict[int, int]  # how many of them were that stale
    fates: dict[Fate, int]
    lost_gradients: int  # of the accepted, those in no update that stands
    samples: int  # in updates that stand
    acceptance: float  # the share of gradients that were accepted, of those before the end
    idle_share: float
    wasted_share: float
    sent_bytes_per_update: float  # both ways
    vain_bytes_per_update: float  # of these, for gradients that were not accepted
    by_worker: list[WorkerSummary]
    pauses: int
    ended: str
    lost_updates: int
    restorations: list[Restoration]


@dataclass(frozen=True, slots=True)
class Stretch:
    """The records in one life of the server."""

    header: Header  # what was run in it; whoever resumes a run may change that
    records: list[Record]
    kept: float  # what was meant for updates beyond this version was lost; inf: nothing was
    end: float  # the time of its last update; of its beginning if it made none

    def is_lost(self, gradient: Gradient) -> bool:
        """Whether it was accepted for an update that does not stand, or was never made."""
        if self.kept == inf or gradient.fate is not Fate.ACCEPTED:
            return False
        return gradient.version + gradient.staleness + 1 > self.kept

    def is_vain(self, gradient: Gradient) -> bool:
        """Whether it came to nothing; what was under way at the end is nobody's waste."""
        if gradient.fate is Fate.ACCEPTED:
            return self.is_lost(gradient)
        return gradient.t < self.end


def outcomes(summary: Summary | WorkerSummary) -> Counter[str]:
    """How many gradients had each fate; what was lost is not called accepted."""
    fates = Counter({str(fate): count for fate, count in summary.fates.items()})
    lost = summary.lost_gradients
    return fates - Counter(accepted=lost) + Counter(lost=lost)


def split(trace: Trace) -> list[Stretch]:
    """The stretches of a trace; a `Restored` begins a new one."""
    begins = [i for i, record in enumerate(trace.records) if type(record) is Restored]
    stretches: list[Stretch] = []
    kept, stop = inf, len(trace.records)
    for begin in reversed([0, *begins]):
        records = trace.records[begin:stop]
        begin_s = records[0].t if records else 0.0
        end = max((r.t for r in records if type(r) is Update), default=begin_s)
        # What was accepted for an update that the end came before is in none.
        kept = min([kept, *(r.version for r in records if type(r) is Ended)])
        first = records[0] if records else None
        if isinstance(first, Restored):
            stretches.append(Stretch(first.header, records, kept, end))
            kept = min(kept, first.version)
        else:
            stretches.append(Stretch(trace.header, records, kept, end))
        stop = begin
    return stretches[::-1]


def standing_updates(stretches: list[Stretch]) -> list[Update]:
    """The updates that were not lost, in order."""
    return [
        record
        for stretch in stretches
        for record in stretch.records
        if type(record) is Update and record.update <= stretch.kept
    ]


def without_lost(trace: Trace) -> Trace:
    """The trace without the updates that were lost, and without what went into them."""
    records = [
        record
        for stretch in split(trace)
        for record in stretch.records
        if not (isinstance(record, Update) and record.update > stretch.kept)
        and not (isinstance(record, Gradient) and stretch.is_lost(record))
    ]
    return Trace(trace.header, records)


def restorations(trace: Trace) -> list[Restoration]:
    """How often the server was restored, and what was lost each time."""
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


def how_it_ended(trace: Trace) -> str:
    """The reason that the end has; a run that goes on after its end has not ended."""
    last = next((r for r in reversed(trace.records) if isinstance(r, Ended | Restored)), None)
    if isinstance(last, Ended):
        return last.reason
    return RUNNING if trace.is_growing else BREAKS_OFF


def summarize(trace: Trace) -> Summary:
    """The numbers of a run that made at least one update; raises `TraceError` otherwise."""
    stretches = split(trace)
    updates = standing_updates(stretches)
    if not updates:
        raise TraceError("the run made no update, so there is nothing to sum up")
    gradients = list(trace.gradients())
    accepted = [g for g in without_lost(trace).gradients() if g.fate is Fate.ACCEPTED]
    vain = [g for s in stretches for g in s.records if type(g) is Gradient and s.is_vain(g)]
    times = [began(trace), *(u.t for u in trace.updates())]
    seconds = times[-1] - times[0]
    by_worker = _by_worker(stretches)
    lost_s = sum(w.lost_s for w in by_worker)
    computed_s = sum(g.compute_s for g in gradients) + lost_s
    wasted_s = sum(g.compute_s for g in vain) + lost_s
    restored = restorations(trace)
    return Summary(
        policy=stretches[-1].header.policy,
        workers=stretches[-1].header.workers,
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
        acceptance=_acceptance(gradients, vain),
        idle_share=float(np.mean([w.idle_share for w in by_worker])),
        wasted_share=wasted_s / computed_s if computed_s else 0.0,
        sent_bytes_per_update=_bytes(gradients) / len(updates),
        vain_bytes_per_update=_bytes(vain) / len(updates),
        by_worker=by_worker,
        pauses=sum(isinstance(r, Paused) for r in trace.records),
        ended=how_it_ended(trace),
        lost_updates=sum(r.lost for r in restored),
        restorations=restored,
    )


def began(trace: Trace) -> float:
    """When the run began, which is some time after its server did."""
    return next((r.t for r in trace.records if isinstance(r, Resumed)), 0.0)


def _bytes(gradients: list[Gradient]) -> float:
    return sum(g.pulled_bytes + g.pushed_bytes for g in gradients)


def _acceptance(gradients: list[Gradient], vain: list[Gradient]) -> float:
    """The share of accepted ones; what was under way at the end does not count."""
    accepted = sum(g.fate is Fate.ACCEPTED for g in gradients)
    dropped = sum(g.fate is not Fate.ACCEPTED for g in vain)
    return accepted / max(1, accepted + dropped)


@dataclass(slots=True)
class _Deeds:
    """What a worker did, and for how long, until the last update of each stretch."""

    gradients: list[Gradient]
    vain: list[Gradient]
    here_s: float = 0.0
    busy_s: float = 0.0
    lost_s: float = 0.0  # of work that died with it


def _by_worker(stretches: list[Stretch]) -> list[WorkerSummary]:
    deeds: dict[int, _Deeds] = defaultdict(lambda: _Deeds([], []))
    for stretch in stretches:
        _add_stretch(stretch, deeds)
    return [_worker(worker, deeds[worker]) for worker in sorted(deeds)]


def _add_stretch(stretch: Stretch, deeds: dict[int, _Deeds]) -> None:
    """Add what each worker did in one life of the server; nobody survives it."""
    end = stretch.end
    since: dict[int, float] = {}
    for record in stretch.records:
        match record:
            case Joined():
                since[record.worker] = min(record.t, end)
            case Left() if record.worker in since:
                own = deeds[record.worker]
                own.here_s += min(record.t, end) - since.pop(record.worker)
                if record.working_since is not None:
                    worked_s = min(record.t, end) - min(record.working_since, end)
                    own.lost_s += worked_s
                    own.busy_s += worked_s
            case Gradient():
                own = deeds[record.worker]
                own.gradients.append(record)
                own.busy_s += min(record.t, end) - min(record.asked_at, end)
                if stretch.is_vain(record):
                    own.vain.append(record)
            case _:
                pass
    for worker, joined_at in since.items():
        deeds[worker].here_s += end - joined_at


def _worker(worker: int, deeds: _Deeds) -> WorkerSummary:
    lost = [g for g in deeds.vain if g.fate is Fate.ACCEPTED]
    accepted = [g for g in deeds.gradients if g.fate is Fate.ACCEPTED]
    computed_s = sum(g.compute_s for g in deeds.gradients) + deeds.lost_s
    wasted_s = sum(g.compute_s for g in deeds.vain) + deeds.lost_s
    whole = [g.compute_s for g in deeds.gradients if g.fate is not Fate.CANCELLED]
    return WorkerSummary(
        worker=worker,
        fates=dict(Counter(g.fate for g in deeds.gradients)),
        lost_gradients=len(lost),
        samples=sum(g.samples for g in accepted) - sum(g.samples for g in lost),
        compute_s=Spread.of(whole) if whole else None,
        idle_share=max(0.0, 1 - deeds.busy_s / deeds.here_s) if deeds.here_s else 0.0,
        lost_s=deeds.lost_s,
        wasted_share=wasted_s / computed_s if computed_s else 0.0,
        acceptance=_acceptance(deeds.gradients, deeds.vain),
    )
