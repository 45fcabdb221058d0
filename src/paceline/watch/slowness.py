# SPDX-License-Identifier: BSD-3-Clause
"""Who was slow, and how: always, sometimes, or once.

Each worker is measured by its typical time, the median. Work that was cancelled has only a lower
bound of its time: it took at least as long as it was let. So the median is that of Kaplan and
Meier, which a worker that mostly is cut short still has if it is sometimes let finish; where it has
none, the median of times and bounds together is a bound of it. From a bound nobody is called slow:
that such a worker is mostly too late is all that is known.

The first gradient of a worker warms up (caches, kernels, memory), and is no sign of anything.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby
from statistics import median, median_low

from paceline.core.events import Fate
from paceline.trace.schema import Gradient, Joined, Trace
from paceline.watch.summary import began

__all__ = ["Answer", "Pace", "Slowness", "find_slow", "measure_paces"]

ENOUGH = 5
"""Gradients of a worker that say anything; and how many must be left to carry a median."""

ALWAYS = 1.25
"""So many times the others' typical time is slow; machines of one kind differ by less."""

SOMETIMES = 2.0
"""So many times its own typical time is slow; noise of a shared machine mostly stays below."""

WORTH_TELLING = 0.01
"""Slow gradients that cost a worker less than this share of its time are not worth a word."""

ONCE = 10.0
"""A single slow gradient is worth a word if it took so many times the typical time."""

SHUT_OUT = 0.5
"""Accepted so many times as often as the others, a worker whose time is unknown is too late."""


@dataclass(frozen=True, slots=True)
class Answer:
    """How long one gradient took."""

    t: float  # when it arrived, or was given up; seconds from the beginning of the run
    took_s: float
    is_whole: bool  # otherwise it took at least as long


@dataclass(frozen=True, slots=True)
class Pace:
    """How long the gradients of one worker take; all but its first since it joined."""

    worker: int
    answers: list[Answer]
    typical_s: float
    is_bound: bool  # whether it is only known to take at least as long
    acceptance: float  # the share of its gradients that were accepted

    @property
    def cut(self) -> int:
        """How many were cut short."""
        return sum(not a.is_whole for a in self.answers)

    def slow_answers(self) -> list[Answer]:
        """Those that took much longer than is typical of this worker."""
        limit = SOMETIMES * self.typical_s
        return [a for a in self.answers if a.took_s >= limit > 0]


@dataclass(frozen=True, slots=True)
class Slowness:
    """Who was slow."""

    judged: int  # how many workers could be judged
    cut: int  # how many of their gradients were cut short
    always: list[tuple[Pace, float]]  # with the typical time of the others; the slowest first
    too_late: list[tuple[Pace, float | None]]  # cut short mostly; with the others' time, if known
    sometimes: list[tuple[Pace, list[Answer]]]  # with the slow ones; the costliest first
    once: list[tuple[Pace, Answer]]


def measure_paces(trace: Trace) -> dict[int, Pace]:
    """The pace of every worker that has one."""
    gradients: dict[int, list[Gradient]] = defaultdict(list)
    is_new: set[int] = set()
    for record in trace.records:
        if isinstance(record, Joined):
            is_new.add(record.worker)
        elif isinstance(record, Gradient) and record.fate is not Fate.DUPLICATE:
            if record.worker not in is_new:
                gradients[record.worker].append(record)
            is_new.discard(record.worker)
    began_at = began(trace)
    return {worker: _pace(worker, own, began_at) for worker, own in sorted(gradients.items())}


def _pace(worker: int, gradients: list[Gradient], began_at: float) -> Pace:
    answers = [Answer(g.t - began_at, g.compute_s, g.fate is not Fate.CANCELLED) for g in gradients]
    typical_s = _median(answers)
    return Pace(
        worker=worker,
        answers=answers,
        typical_s=median_low(a.took_s for a in answers) if typical_s is None else typical_s,
        is_bound=typical_s is None,
        acceptance=sum(g.fate is Fate.ACCEPTED for g in gradients) / len(gradients),
    )


def _median(answers: Iterable[Answer]) -> float | None:
    """The time that half of the gradients take at most; None: too many were cut short."""
    ordered = sorted(answers, key=lambda a: a.took_s)
    left, share = len(ordered), 1.0  # at risk, and the share that takes longer
    few = min(ENOUGH, (len(ordered) + 1) // 2)
    for _, equal in groupby(ordered, key=lambda a: a.took_s):
        if left < few:
            break
        group = list(equal)
        share *= 1 - sum(a.is_whole for a in group) / left
        left -= len(group)
        if share <= 0.5:
            return group[0].took_s
    return None


def find_slow(paces: dict[int, Pace]) -> Slowness:
    """Who was slow, by these paces."""
    judged = [pace for pace in paces.values() if len(pace.answers) >= ENOUGH]
    always, too_late, sometimes, once = [], [], [], []
    for pace in judged:
        others = [other for other in judged if other is not pace]
        others_s = _typical_s(others)
        if pace.is_bound:  # nothing is known to be longer than its typical time
            if others and _is_shut_out(pace, others):
                too_late.append((pace, others_s))
            continue
        slow = pace.slow_answers()
        if len(slow) == 1 and slow[0].took_s >= ONCE * pace.typical_s:
            once.append((pace, slow[0]))
        if others_s is not None and pace.typical_s >= ALWAYS * others_s > 0:
            always.append((pace, others_s))
        elif len(slow) > 1 and _cost(pace, slow) >= WORTH_TELLING:
            sometimes.append((pace, slow))
    return Slowness(
        judged=len(judged),
        cut=sum(pace.cut for pace in judged),
        always=sorted(always, key=lambda found: -found[0].typical_s),
        too_late=sorted(too_late, key=lambda found: found[0].acceptance),
        sometimes=sorted(sometimes, key=lambda found: -_cost(*found)),
        once=sorted(once, key=lambda found: -found[1].took_s),
    )


def _typical_s(paces: list[Pace]) -> float | None:
    """The median of the times that are known; None: none is."""
    known = [pace.typical_s for pace in paces if not pace.is_bound]
    return median(known) if known else None


def _is_shut_out(pace: Pace, others: list[Pace]) -> bool:
    """Whether it is accepted far less often than the others."""
    return pace.acceptance < SHUT_OUT * median(o.acceptance for o in others)


def _cost(pace: Pace, slow: list[Answer]) -> float:
    """The share of the worker's time that went into slow gradients being slow."""
    return sum(a.took_s - pace.typical_s for a in slow) / sum(a.took_s for a in pace.answers)
