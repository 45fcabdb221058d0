# SPDX-License-Identifier: BSD-3-Clause
"""A run in plain words, from its trace alone: how it went, who was slow, who was waited for.

What there is nothing to say about is not mentioned. The lines are plain text for any terminal or
file; what the numbers in them mean is said in `summary`, `slowness` and `waiting`.
"""

from collections import Counter
from dataclasses import dataclass
from statistics import median_low

from paceline.core.events import Fate
from paceline.trace.schema import Header, Trace
from paceline.watch.narrative import NAMED, WORTH_TELLING, course, goings
from paceline.watch.slowness import Answer, Pace, Slowness, find_slow, measure_paces
from paceline.watch.summary import (
    RUNNING,
    Summary,
    began,
    how_it_ended,
    outcomes,
    split,
    standing_updates,
    summarize,
)
from paceline.watch.waiting import IN_VAIN, waited_for, waits
from paceline.watch.words import human_seconds, named_workers, percent, plural

__all__ = ["report"]

ROWS = 16  # workers in the table; of more, those that were waited for or dropped most

STANDS_OUT = 1.5  # times an even part of the waiting; whoever has less is not named
UNEVEN = 0.5  # of an even share in what was learnt; less is told


@dataclass(frozen=True, slots=True)
class _Told:
    """What a run is told from."""

    header: Header  # what was run in the end
    summary: Summary
    waited: dict[int, float]
    paces: dict[int, Pace]


def report(trace: Trace) -> list[str]:
    """The lines of the report; for a run without any update only why there is none."""
    stretches = split(trace)
    if not standing_updates(stretches):
        return [_nothing(how_it_ended(trace)), *goings(stretches, began(trace))]
    summary, waited, paces = summarize(trace), waited_for(trace), measure_paces(trace)
    told = _Told(stretches[-1].header, summary, waited, paces)
    return [
        *course(trace, stretches, summary),
        *goings(stretches, began(trace)),
        "",
        *_table(told),
        "",
        *_slowness(find_slow(paces)),
        *_waiting(told),
        *_shares({w.worker: w.samples for w in summary.by_worker}),
    ]


def _nothing(ended: str) -> str:
    if ended == RUNNING:
        return f"The run has made no update yet; {RUNNING}."
    return f"The run made no update; it ended: {ended}."


# ------------------------------------------------------------------------------------- the table


def _table(told: _Told) -> list[str]:
    """The fates of every worker's gradients, its typical time, and how long it was waited for."""
    waited, paces = told.waited, told.paces
    counts = {own.worker: outcomes(own) for own in told.summary.by_worker}
    seen = Counter(fate for own in counts.values() for fate in own)
    fates = ["accepted", *(f for f in (*Fate, "lost") if f != "accepted" and f in seen)]
    shown = _worst_first(counts, waited)
    shown, rest = (shown, []) if len(shown) <= ROWS else (shown[:ROWS], shown[ROWS:])

    def row(name: str, workers: list[int]) -> list[str]:
        own = [paces[w] for w in workers if w in paces]
        typical = median_low(p.typical_s for p in own) if own else None
        least = ">" if any(p.is_bound for p in own) else ""
        return [
            name,
            *(f"{sum(counts[w][fate] for w in workers):,}" for fate in fates),
            "-" if typical is None else f"{least}{human_seconds(typical)}",
            *([_seconds(sum(waited.get(w, 0.0) for w in workers))] if waited else []),
        ]

    heading = ["worker", *map(str, fates), "median", *(["waited for"] if waited else [])]
    rows = [row(f"{worker}", [worker]) for worker in sorted(shown)]
    if rest:
        rows.append(row(f"{len(rest)} others", rest))
    return _aligned([heading, *rows])


def _worst_first(counts: dict[int, Counter[str]], waited: dict[int, float]) -> list[int]:
    """By the share that each has in the waiting and in what was dropped."""
    dropped = {w: own.total() - own["accepted"] for w, own in counts.items()}
    all_waited, all_dropped = sum(waited.values()) or 1.0, sum(dropped.values()) or 1

    def fault(worker: int) -> float:
        return waited.get(worker, 0.0) / all_waited + dropped[worker] / all_dropped

    return sorted(counts, key=lambda worker: (-fault(worker), worker))


def _seconds(seconds: float) -> str:
    return human_seconds(seconds) if seconds else "-"


def _aligned(rows: list[list[str]]) -> list[str]:
    """The first column to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for first, *others in rows:
        cells = [c.rjust(width) for c, width in zip(others, widths[1:], strict=True)]
        lines.append("  ".join([first.ljust(widths[0]), *cells]))
    return lines


# ------------------------------------------------------------------------------------ who was slow


def _slowness(slow: Slowness) -> list[str]:
    if not slow.judged:
        return ["Too few gradients to tell who was slow."]
    lines = [_always(pace, others_s) for pace, others_s in slow.always[:NAMED]]
    if len(slow.always) > NAMED:
        lines.append(f"So are {len(slow.always) - NAMED} other workers, but less.")
    lines += [_too_late(pace, others_s) for pace, others_s in slow.too_late[:NAMED]]
    if len(slow.too_late) > NAMED:
        lines.append(f"So are {len(slow.too_late) - NAMED} other workers.")
    if len(slow.sometimes) > max(2, slow.judged // 2):
        lines.append(_everybody(slow))
    else:
        lines += [_sometimes(pace, answers) for pace, answers in slow.sometimes[:NAMED]]
        if len(slow.sometimes) > NAMED:
            lines.append(f"So are {len(slow.sometimes) - NAMED} other workers, but less.")
    lines += [
        f"Worker {pace.worker} was slow once: {_took([answer])} instead of "
        f"{human_seconds(pace.typical_s)}, at {human_seconds(answer.t)}."
        for pace, answer in slow.once[:NAMED]
    ]
    if lines:
        return lines
    if slow.cut:
        cut = plural(slow.cut, "gradient")
        return [f"Nobody was slow, as far as can be seen; {cut} could not show, being cut short."]
    return ["Nobody was slow."]


def _always(pace: Pace, others_s: float) -> str:
    own, others = human_seconds(pace.typical_s), human_seconds(others_s)
    ratio = f"{pace.typical_s / others_s:.1f} times as long as the others ({others})"
    return f"Worker {pace.worker} is always slow: a gradient takes it {own}, {ratio}."


def _too_late(pace: Pace, others_s: float | None) -> str:
    others = "" if others_s is None else f", those of the others {human_seconds(others_s)}"
    return (
        f"Worker {pace.worker} is mostly too late: {pace.cut:,} of its {len(pace.answers):,} "
        f"gradients were cut short; they take at least {human_seconds(pace.typical_s)}{others}."
    )


def _took(answers: list[Answer]) -> str:
    """The typical time of these answers."""
    typical = sorted(answers, key=lambda a: a.took_s)[(len(answers) - 1) // 2]
    return f"{'' if typical.is_whole else 'at least '}{human_seconds(typical.took_s)}"


def _sometimes(pace: Pace, answers: list[Answer]) -> str:
    worst = max(answers, key=lambda a: a.took_s)
    return (
        f"Worker {pace.worker} is sometimes slow: {len(answers):,} of its {len(pace.answers):,} "
        f"gradients took {_took(answers)} in the median instead of "
        f"{human_seconds(pace.typical_s)}, {human_seconds(worst.took_s)} at worst."
    )


def _everybody(slow: Slowness) -> str:
    """One line for a slowness that most workers share; one that has far more of it is named."""
    answers = [answer for _, own in slow.sometimes for answer in own]
    total = sum(len(pace.answers) for pace, _ in slow.sometimes)
    share = len(answers) / total
    who = "All" if len(slow.sometimes) == slow.judged else f"{len(slow.sometimes)} of"
    worst = max(answers, key=lambda a: a.took_s)
    pace, own = max(slow.sometimes, key=lambda found: len(found[1]) / len(found[0].answers))
    often = ""
    if len(own) / len(pace.answers) >= 2 * share:
        often = f"; most often worker {pace.worker}, {len(own):,} of {len(pace.answers):,}"
    return (
        f"{who} {slow.judged} workers are sometimes slow: {percent(share)} of their gradients "
        f"({len(answers):,} of {total:,}) took {_took(answers)} in the median, "
        f"{human_seconds(worst.took_s)} at worst{often}."
    )


# ------------------------------------------------------------------------------ who was waited for


def _waiting(told: _Told) -> list[str]:
    header, waited = told.header, told.waited
    if not waited and not waits(header.policy):
        return [f"Nobody waits under {header.policy}: who has reported goes on at once."]
    total = sum(waited.values())
    seconds = told.summary.seconds
    if not seconds or total / seconds < WORTH_TELLING:
        return ["Hardly any time went into waiting."]

    def amount(spent_s: float) -> str:
        return f"{human_seconds(spent_s)} ({percent(spent_s / seconds)})"

    workers = {w: s for w, s in waited.items() if w != IN_VAIN}
    even_s = sum(workers.values()) / max(1, header.workers, len(workers))
    named = [w for w, s in workers.items() if s >= STANDS_OUT * even_s][:NAMED]
    parts = [f"for worker {w} {amount(workers.pop(w))}" for w in named]
    if workers:
        who = plural(len(workers), "other" if named else "worker")
        parts.append(f"for {who} {amount(sum(workers.values()))}")
    if in_vain := waited.get(IN_VAIN):
        parts.append(f"in vain, until the time was up, {amount(in_vain)}")
    share = f"{human_seconds(total)} ({percent(total / seconds)} of the time)"
    return [f"{share} went into waiting: {', '.join(parts)}."]


# -------------------------------------------------------------------------------- what was learnt


def _shares(learnt: dict[int, int]) -> list[str]:
    """Whose data came short; nothing where everybody's came in evenly enough."""
    total = sum(learnt.values())
    if not total or len(learnt) == 1:
        return []
    even = 1 / len(learnt)
    short = sorted((n / total, w) for w, n in learnt.items() if n / total < UNEVEN * even)
    nothing = sorted(w for share, w in short if not share)
    lines = [f"Nothing of {named_workers(nothing, NAMED).lower()} was learnt."] if nothing else []
    some = [(share, w) for share, w in short if share]
    if len(some) > NAMED:
        together = percent(sum(share for share, _ in some))
        lines.append(
            f"{len(some)} workers gave only {together} of what was learnt; "
            f"an even share of each is {percent(even)}."
        )
        return lines
    return lines + [
        f"Worker {w} gave {percent(share)} of what was learnt; an even share is {percent(even)}."
        for share, w in some
    ]
