# SPDX-License-Identifier: BSD-3-Clause
"""A run in plain words, from its trace alone: how it went, who was slow, who was waited for.

What there is nothing to say about is not mentioned. The lines are plain text for any terminal or
file; what the numbers in them mean is said in `summary`, `slowness` and `waiting`.
"""

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median_low

from paceline.core.events import Fate
from paceline.watch.slowness import Answer, Pace, Slowness, find_slow, measure_paces
from paceline.watch.summary import (
    Restoration,
    Stretch,
    Summary,
    how_it_ended,
    split,
    standing_updates,
    summarize,
    without_lost,
)
from paceline.watch.trace import Ended, Header, Joined, Left, Paused, Record, Resumed, Trace
from paceline.watch.waiting import IN_VAIN, waited_for, waits
from paceline.watch.words import human_seconds, join_words, percent, plural, three_digits, times

__all__ = ["report"]

ROWS = 16  # workers in the table; of more, those that were waited for or dropped most
NAMED = 5  # workers that are named one by one

WORTH_TELLING = 0.01  # of the time or of the work; less is not worth a word
STANDS_OUT = 1.5  # times an even part of the waiting; whoever has less is not named
UNEVEN = 0.5  # of an even share in what was learnt; less is told


@dataclass(frozen=True, slots=True)
class _Told:
    """What a run is told from."""

    trace: Trace
    stretches: list[Stretch]
    summary: Summary
    learnt: dict[int, int]  # samples of each worker that came into updates that stand
    waited: dict[int, float]
    paces: dict[int, Pace]

    @property
    def header(self) -> Header:
        """What was run in the end."""
        return self.stretches[-1].header


def report(trace: Trace) -> list[str]:
    """The lines of the report; for a run without any update only why there is none."""
    stretches = split(trace)
    if not standing_updates(stretches):
        return [f"The run made no update; it ended: {how_it_ended(trace)}.", *_goings(stretches)]
    learnt = {record.worker: 0 for record in trace.records if type(record) is Joined}
    for g in without_lost(trace).gradients():
        if g.fate is Fate.ACCEPTED:
            learnt[g.worker] = learnt.get(g.worker, 0) + g.samples
    summary, waited, paces = summarize(trace), waited_for(trace), measure_paces(trace)
    told = _Told(trace, stretches, summary, learnt, waited, paces)
    return [
        *_course(told),
        *_goings(stretches),
        "",
        *_table(told),
        "",
        *_slowness(find_slow(paces)),
        *_waiting(told),
        *_shares(learnt),
    ]


# ----------------------------------------------------------------------------------- how it went


def _course(told: _Told) -> list[str]:
    summary, steps, samples = told.summary, told.header.steps, sum(told.learnt.values())
    of = "" if steps is None or steps == summary.updates else f" of {steps:,}"
    ended = "finished" if summary.ended == "finished" else f"it ended: {summary.ended}"
    rate = f"{three_digits(summary.updates_per_s)} a second, " if summary.seconds else ""
    lines = [
        f"{summary.policy} with {plural(summary.workers, 'worker')}: {summary.updates:,}{of} "
        f"updates in {human_seconds(summary.seconds)}, {rate}{plural(samples, 'sample')}; {ended}."
    ]
    if logged := _logged(told.stretches):
        lines.append(f"Logged last: {', '.join(logged)}.")
    if summary.staleness_mean > 0:
        lines.append(f"Gradients were {summary.staleness_mean:.1f} updates old on average.")
    if summary.wasted_share >= WORTH_TELLING:
        lines.append(
            f"{percent(summary.wasted_share)} of the computing came to nothing: dropped, cut short "
            "or lost."
        )
    if summary.restorations:
        lines.append(_restored(summary.restorations, summary.updates))
    for before, after in pairwise(told.stretches):
        if before.header.policy != after.header.policy:
            lines.append(f"Until update {before.kept:,} the policy was {before.header.policy}.")
    return lines + _pauses(told.trace)


def _logged(stretches: list[Stretch]) -> list[str]:
    """What the scripts logged, each in its last value."""
    last: dict[str, float | None] = {}
    for update in standing_updates(stretches):
        last |= update.scalars
    return [f"{name} {'not finite' if v is None else f'{v:.4g}'}" for name, v in last.items()]


def _restored(found: list[Restoration], updates: int) -> str:
    down_s = sum(r.down_s for r in found)
    without = f", {human_seconds(down_s)} without one" if down_s else ""
    lost = [r for r in found if r.lost]
    if not lost:
        return f"The server was restored {times(len(found))}{without}; no update was lost."
    which = [
        f"{r.version + 1} to {r.version + r.lost}" if r.lost > 1 else f"{r.version + 1}"
        for r in lost[:NAMED]
    ]
    if len(lost) > NAMED:
        which.append("others")
    again = " and made again" if updates >= max(r.version + r.lost for r in lost) else ""
    count = sum(r.lost for r in lost)
    be = "was" if count == 1 else "were"
    return (
        f"The server was restored {times(len(found))}{without}: {plural(count, 'update')} "
        f"({join_words(which)}) {be} lost{again}."
    )


def _pauses(trace: Trace) -> list[str]:
    marks = [r for r in trace.records if isinstance(r, Paused | Resumed)]
    pauses = [mark for mark in marks if isinstance(mark, Paused)]
    if not pauses:
        return []
    lasted = [(b.t - a.t, a.reason) for a, b in pairwise(marks) if isinstance(a, Paused)]
    if not lasted:
        return [f"Paused {times(len(pauses))}, and did not go on: {pauses[-1].reason}."]
    longest_s, reason = max(lasted)
    total = f"for {human_seconds(sum(s for s, _ in lasted))}"
    if len(lasted) > 1:
        total += f" in all, the longest for {human_seconds(longest_s)}"
    return [f"Paused {times(len(pauses))} {total}: {reason}."]


@dataclass(slots=True)
class _Going:
    """What is known of the comings and goings of a worker."""

    left: list[Left] = field(default_factory=list)
    returned: int = 0


def _goings(stretches: list[Stretch]) -> list[str]:
    goings: dict[int, _Going] = defaultdict(_Going)
    joined: set[int] = set()
    for stretch in stretches:
        _add_goings(stretch.records, goings, joined)
    lines = []
    if missing := sorted(set(range(stretches[-1].header.workers)) - joined):
        lines.append(f"{_workers(missing)} never joined.")
    gone = {worker: going for worker, going in sorted(goings.items()) if going.left}
    if len(gone) > NAMED:
        left, returned = (sum(c) for c in zip(*(_counts(g) for g in gone.values()), strict=True))
        [(reason, _)] = Counter(e.reason for g in gone.values() for e in g.left).most_common(1)
        why = f", mostly: {reason}" if reason else ""
        return [
            *lines,
            f"{len(gone)} workers left, {left} times in all, and came back {returned} times{why}.",
        ]
    return [*lines, *(_going(worker, going) for worker, going in gone.items())]


def _add_goings(records: list[Record], goings: dict[int, _Going], joined: set[int]) -> None:
    """Who left before the end of this life of the server; to leave after it is no news."""
    ends = [r.t for r in records if isinstance(r, Ended)]
    for record in records:
        if isinstance(record, Joined):
            joined.add(record.worker)
            left, returned = _counts(goings[record.worker])
            goings[record.worker].returned += left > returned
        elif isinstance(record, Left) and not (ends and record.t > ends[-1]):
            goings[record.worker].left.append(record)


def _counts(going: _Going) -> tuple[int, int]:
    return len(going.left), going.returned


def _going(worker: int, going: _Going) -> str:
    left, returned = _counts(going)
    reasons = join_words(list(dict.fromkeys(e.reason for e in going.left if e.reason)))
    why = f" ({reasons})" if reasons else ""
    when = f" at {human_seconds(going.left[0].t)}" if left == 1 else f" {times(left)}"
    if left == returned:
        back = "and came back" if left == 1 else "and came back each time"
    else:
        back = f"and came back {times(returned)}" if returned else "and did not come back"
    return f"Worker {worker} left{when}{why}, {back}."


def _workers(workers: list[int]) -> str:
    """Worker 3; Workers 3 and 5; 12 workers."""
    if len(workers) > NAMED:
        return f"{len(workers)} workers"
    if len(workers) == 1:
        return f"Worker {workers[0]}"
    return f"Workers {join_words([str(w) for w in workers])}"


# ------------------------------------------------------------------------------------- the table


def _table(told: _Told) -> list[str]:
    """The fates of every worker's gradients, its typical time, and how long it was waited for."""
    waited, paces = told.waited, told.paces
    counts = {w.worker: Counter[str]() for w in told.summary.by_worker}
    for stretch in told.stretches:
        for g in Trace(stretch.header, stretch.records).gradients():
            fate = "lost" if stretch.is_lost(g) else g.fate
            counts[g.worker][fate] += 1
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
    who = f"Worker {pace.worker} is always slow: "
    others, own = human_seconds(others_s), human_seconds(pace.typical_s)
    if pace.is_bound:
        return (
            f"{who}{pace.cut:,} of its {len(pace.answers):,} gradients were cut short; they take "
            f"at least {own}, those of the others {others}."
        )
    ratio = f", {pace.typical_s / others_s:.1f} times as long as the others ({others})"
    return f"{who}a gradient takes it {own}{ratio}."


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
    lines = [f"Nothing of {_workers(nothing).lower()} was learnt."] if nothing else []
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
