# SPDX-License-Identifier: BSD-3-Clause
"""Which workers were slow, and how: always, sometimes, or once.

A worker is measured by its typical time, the median. For cancelled work only a lower bound is
known: it would have taken at least as long as it ran. So the median is the Kaplan-Meier estimate,
which exists even for a worker that is mostly cancelled, as long as it finishes sometimes. Where it
doesn't exist, the median of times and bounds together is a lower bound. A worker with only a lower
bound is never called slow: all that is known is that it is usually too late.

The first gradient of a worker after it joins is a warm-up (caches, kernels, memory) and is ignored.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby
from statistics import median, median_low

from paceline.core.events import Fate
from paceline.trace.schema import Gradient, Joined, Trace
from paceline.watch.segments import start_time

__all__ = ["Pace", "Slowness", "Timing", "find_slow", "measure_paces"]

ENOUGH = 5
"""Gradients that are needed to judge a worker, and to estimate a median at its tail."""

ALWAYS = 1.25
"""A worker is slow at this multiple of the others' typical time; equal machines differ by less."""

SOMETIMES = 2.0
"""A gradient is slow at this multiple of its worker's typical time; noise mostly stays below."""

WORTH_MENTIONING = 0.01
"""Slow gradients that cost a worker less than this share of its time are not mentioned."""

ONCE = 10.0
"""A single slow gradient is mentioned at this multiple of the typical time."""

SHUT_OUT = 0.5
"""A worker of unknown typical time is too late if its acceptance is below this multiple of the
others'."""


@dataclass(frozen=True, slots=True)
class Timing:
    """How long one gradient took."""

    t: float  # when it arrived or was abandoned; seconds since the run began
    took_s: float
    is_complete: bool  # False: it was cancelled, so `took_s` is a lower bound


@dataclass(frozen=True, slots=True)
class Pace:
    """How long the gradients of one worker take, without the first after each join."""

    worker: int
    timings: list[Timing]
    typical_s: float
    is_bound: bool  # whether `typical_s` is only a lower bound
    acceptance: float  # the share of its gradients that were accepted

    @property
    def cancelled(self) -> int:
        """How many gradients were cancelled."""
        return sum(not t.is_complete for t in self.timings)

    def slow_timings(self) -> list[Timing]:
        """Return the gradients that took much longer than is typical for this worker."""
        limit = SOMETIMES * self.typical_s
        return [t for t in self.timings if t.took_s >= limit > 0]


@dataclass(frozen=True, slots=True)
class Slowness:
    """The workers that were slow."""

    judged: int  # how many workers have enough gradients to be judged
    cancelled: int  # how many of their gradients were cancelled
    always: list[tuple[Pace, float]]  # with the typical time of the others; the slowest first
    too_late: list[tuple[Pace, float | None]]  # with the others' time, if known
    sometimes: list[tuple[Pace, list[Timing]]]  # with the slow gradients; the costliest first
    once: list[tuple[Pace, Timing]]


def measure_paces(trace: Trace) -> dict[int, Pace]:
    """Return the pace of every worker that has one."""
    gradients: dict[int, list[Gradient]] = defaultdict(list)
    is_new: set[int] = set()
    for record in trace.records:
        if isinstance(record, Joined):
            is_new.add(record.worker)
        elif isinstance(record, Gradient) and record.fate is not Fate.DUPLICATE:
            if record.worker not in is_new:
                gradients[record.worker].append(record)
            is_new.discard(record.worker)
    start = start_time(trace)
    return {worker: _pace(worker, own, start) for worker, own in sorted(gradients.items())}


def _pace(worker: int, gradients: list[Gradient], start: float) -> Pace:
    timings = [Timing(g.t - start, g.compute_s, g.fate is not Fate.CANCELLED) for g in gradients]
    typical_s = _median(timings)
    return Pace(
        worker=worker,
        timings=timings,
        typical_s=median_low(t.took_s for t in timings) if typical_s is None else typical_s,
        is_bound=typical_s is None,
        acceptance=sum(g.fate is Fate.ACCEPTED for g in gradients) / len(gradients),
    )


def _median(timings: Iterable[Timing]) -> float | None:
    """Return the Kaplan-Meier median; None: too many were cancelled."""
    ordered = sorted(timings, key=lambda t: t.took_s)
    left, share = len(ordered), 1.0  # at risk, and the share that takes longer
    few = min(ENOUGH, (len(ordered) + 1) // 2)
    for _, equal in groupby(ordered, key=lambda t: t.took_s):
        if left < few:
            break
        group = list(equal)
        share *= 1 - sum(t.is_complete for t in group) / left
        left -= len(group)
        if share <= 0.5:
            return group[0].took_s
    return None


def find_slow(paces: dict[int, Pace]) -> Slowness:
    """Find the slow workers by their paces."""
    judged = [pace for pace in paces.values() if len(pace.timings) >= ENOUGH]
    always, too_late, sometimes, once = [], [], [], []
    for pace in judged:
        others = [other for other in judged if other is not pace]
        others_s = _typical_s(others)
        if pace.is_bound:  # so none of its gradients is known to be slow
            if others and _is_shut_out(pace, others):
                too_late.append((pace, others_s))
            continue
        slow = pace.slow_timings()
        if len(slow) == 1 and slow[0].took_s >= ONCE * pace.typical_s:
            once.append((pace, slow[0]))
        if others_s is not None and pace.typical_s >= ALWAYS * others_s > 0:
            always.append((pace, others_s))
        elif len(slow) > 1 and _cost(pace, slow) >= WORTH_MENTIONING:
            sometimes.append((pace, slow))
    return Slowness(
        judged=len(judged),
        cancelled=sum(pace.cancelled for pace in judged),
        always=sorted(always, key=lambda found: -found[0].typical_s),
        too_late=sorted(too_late, key=lambda found: found[0].acceptance),
        sometimes=sorted(sometimes, key=lambda found: -_cost(*found)),
        once=sorted(once, key=lambda found: -found[1].took_s),
    )


def _typical_s(paces: list[Pace]) -> float | None:
    """Return the median of the known typical times; None: none is known."""
    known = [pace.typical_s for pace in paces if not pace.is_bound]
    return median(known) if known else None


def _is_shut_out(pace: Pace, others: list[Pace]) -> bool:
    """Return whether it is accepted far less often than the others."""
    return pace.acceptance < SHUT_OUT * median(o.acceptance for o in others)


def _cost(pace: Pace, slow: list[Timing]) -> float:
    """Return the share of the worker's time that its slow gradients cost."""
    return sum(t.took_s - pace.typical_s for t in slow) / sum(t.took_s for t in pace.timings)
