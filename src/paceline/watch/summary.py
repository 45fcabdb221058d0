# SPDX-License-Identifier: BSD-3-Clause
"""The numbers in a trace: how fast, how stale, how much was wasted, and who was slow."""

from collections import Counter, defaultdict
from dataclasses import dataclass

import msgspec
import numpy as np

from paceline.core.events import Fate
from paceline.errors import TraceError
from paceline.watch.trace import Ended, Gradient, Joined, Left, Paused, Resumed, Trace

__all__ = ["Spread", "Summary", "WorkerSummary", "summarize"]


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


class WorkerSummary(msgspec.Struct, frozen=True):
    """What one worker did."""

    worker: int
    fates: dict[Fate, int]
    compute_s: Spread | None  # of whole gradients; None: it finished none
    idle_share: float  # of the time that it was here, up to the last update
    lost_s: float  # work that died with it
    wasted_share: float  # of the time that it computed, what came to nothing
    acceptance: float  # the share of its gradients that were accepted, of those before the end


class Summary(msgspec.Struct, frozen=True):
    """What a run did."""

    policy: str
    workers: int
    updates: int
    updates_per_s: float
    seconds: float  # from the beginning of the run to its last update
    step_s: Spread  # between updates
    contributions: float  # to an update, on average
    staleness_mean: float  # of the gradients that were accepted
    staleness: dict[int, int]  # how many of them were that stale
    fates: dict[Fate, int]
    acceptance: float  # the share of gradients that were accepted, of those before the end
    idle_share: float
    wasted_share: float
    sent_bytes_per_update: float  # both ways
    vain_bytes_per_update: float  # of these, for gradients that were not accepted
    by_worker: list[WorkerSummary]
    pauses: int
    ended: str


def summarize(trace: Trace) -> Summary:
    """The numbers of a run that made at least one update; raises `TraceError` otherwise."""
    updates = list(trace.updates())
    gradients = list(trace.gradients())
    if not updates:
        raise TraceError("the run made no update, so there is nothing to sum up")
    begun = next((r.t for r in trace.records if isinstance(r, Resumed)), 0.0)
    times = [begun, *(u.t for u in updates)]
    seconds = times[-1] - begun
    accepted = [g for g in gradients if g.fate is Fate.ACCEPTED]
    vain = [g for g in gradients if _is_vain(g, times[-1])]
    by_worker = _by_worker(trace, gradients)
    lost_s = sum(w.lost_s for w in by_worker)
    computed_s = sum(g.compute_s for g in gradients) + lost_s
    wasted_s = sum(g.compute_s for g in vain) + lost_s
    ended = next((r for r in reversed(trace.records) if isinstance(r, Ended)), None)
    return Summary(
        policy=trace.header.policy,
        workers=trace.header.workers,
        updates=len(updates),
        updates_per_s=len(updates) / seconds if seconds else float("inf"),
        seconds=seconds,
        step_s=Spread.of(np.diff(times).tolist()),
        contributions=float(np.mean([len(u.contributors) for u in updates])),
        staleness_mean=float(np.mean([g.staleness for g in accepted])),
        staleness=dict(sorted(Counter(g.staleness for g in accepted).items())),
        fates=dict(Counter(g.fate for g in gradients)),
        acceptance=_acceptance(gradients, times[-1]),
        idle_share=float(np.mean([w.idle_share for w in by_worker])),
        wasted_share=wasted_s / computed_s if computed_s else 0.0,
        sent_bytes_per_update=_bytes(gradients) / len(updates),
        vain_bytes_per_update=_bytes(vain) / len(updates),
        by_worker=by_worker,
        pauses=sum(isinstance(r, Paused) for r in trace.records),
        ended=ended.reason if ended else "the trace breaks off",
    )


def _bytes(gradients: list[Gradient]) -> float:
    return sum(g.pulled_bytes + g.pushed_bytes for g in gradients)


@dataclass(slots=True)
class _Presence:
    """How long a worker was here, and how much of that died with it."""

    here_s: float = 0.0
    lost_s: float = 0.0


def _by_worker(trace: Trace, gradients: list[Gradient]) -> list[WorkerSummary]:
    own: dict[int, list[Gradient]] = defaultdict(list)
    for gradient in gradients:
        own[gradient.worker].append(gradient)
    end = max(update.t for update in trace.updates())
    presence = _presence(trace, end)
    return [_worker(worker, presence[worker], own[worker], end) for worker in sorted(presence)]


def _is_vain(gradient: Gradient, end: float) -> bool:
    """Whether it came to nothing; what was under way when the run ended is nobody's waste."""
    return gradient.fate is not Fate.ACCEPTED and gradient.t < end


def _worker(
    worker: int, presence: _Presence, gradients: list[Gradient], end: float
) -> WorkerSummary:
    busy_s = sum(min(g.t, end) - min(g.asked_at, end) for g in gradients) + presence.lost_s
    computed_s = sum(g.compute_s for g in gradients) + presence.lost_s
    wasted_s = sum(g.compute_s for g in gradients if _is_vain(g, end)) + presence.lost_s
    whole = [g.compute_s for g in gradients if g.fate is not Fate.CANCELLED]
    return WorkerSummary(
        worker=worker,
        fates=dict(Counter(g.fate for g in gradients)),
        compute_s=Spread.of(whole) if whole else None,
        idle_share=max(0.0, 1 - busy_s / presence.here_s) if presence.here_s else 0.0,
        lost_s=presence.lost_s,
        wasted_share=wasted_s / computed_s if computed_s else 0.0,
        acceptance=_acceptance(gradients, end),
    )


def _acceptance(gradients: list[Gradient], end: float) -> float:
    accepted = sum(g.fate is Fate.ACCEPTED for g in gradients)
    return accepted / max(1, accepted + sum(_is_vain(g, end) for g in gradients))


def _presence(trace: Trace, end: float) -> dict[int, _Presence]:
    """Of every worker, until the end of the run."""
    presence: dict[int, _Presence] = defaultdict(_Presence)
    since: dict[int, float] = {}
    for record in trace.records:
        if isinstance(record, Joined):
            since[record.worker] = record.t
        elif isinstance(record, Left) and record.worker in since:
            own = presence[record.worker]
            own.here_s += record.t - since.pop(record.worker)
            if record.working_since is not None:
                own.lost_s += record.t - record.working_since
    for worker, joined_at in since.items():
        presence[worker].here_s += max(0.0, end - joined_at)
    return dict(presence)
