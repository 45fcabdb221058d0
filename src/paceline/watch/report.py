# SPDX-License-Identifier: BSD-3-Clause
"""Report a run in words, from its trace alone: how it went, and which workers were slow.

What is unremarkable is left out. The lines are plain text for any terminal or file. `summary`,
`slowness` and `waiting` define the numbers in them.
"""

from collections import Counter
from dataclasses import dataclass
from statistics import median_low

from paceline.core.events import Fate
from paceline.trace.schema import Header, Trace
from paceline.watch.gaps import missing_parts
from paceline.watch.narrative import NAMED, WORTH_MENTIONING, departures, gap_lines, narrate
from paceline.watch.segments import kept_updates, split, start_time
from paceline.watch.slowness import Pace, Slowness, Timing, find_slow, measure_paces
from paceline.watch.summary import BREAKS_OFF, RUNNING, Summary, end_reason, outcomes, summarize
from paceline.watch.traffic import Traffic, traffic_cells
from paceline.watch.unfinished import Unfinished, unfinished
from paceline.watch.waiting import DEADLINE, unanswered, waited_for, waits
from paceline.watch.words import human_seconds, named_workers, percent, plural

__all__ = ["report"]

ROWS = 16  # workers in the table; if there are more, the ones that cost most time and work

STANDS_OUT = 1.5  # a worker is named if it was waited for this many times an even share
TRAFFIC = ["pulled", "pushed", "unused"]  # columns of the table, if anything was moved
UNEVEN = 0.5  # a worker is named if it contributed less than this many times an even share


@dataclass(frozen=True, slots=True)
class _Findings:
    """What the report is made from."""

    header: Header  # of the last segment
    summary: Summary
    waited: dict[int, float]
    paces: dict[int, Pace]


def report(trace: Trace) -> list[str]:
    """Return the lines of the report."""
    segments, start = split(trace), start_time(trace)
    hung = _unanswered(trace, start)
    if not kept_updates(segments):
        return [*_without_updates(trace), *departures(segments, start), *hung]
    summary, waited, paces = summarize(trace), waited_for(trace), measure_paces(trace)
    findings = _Findings(segments[-1].header, summary, waited, paces)
    return [
        *narrate(trace, segments, summary),
        *departures(segments, start),
        "",
        *_table(findings),
        "",
        *hung,
        *_slowness(find_slow(paces), is_any_hung=bool(hung)),
        *_waiting(findings),
        *_shares({w.worker: w.samples for w in summary.by_worker}),
    ]


def _without_updates(trace: Trace) -> list[str]:
    reason, missing = end_reason(trace), missing_parts(trace)
    if any(part.updates for part in missing):
        first = f"The trace has none of the run's updates ({reason})."
    elif reason == RUNNING:
        first = f"The run is {RUNNING} and has made no updates yet."
    else:
        first = f"The run made no updates ({reason})."
    return [first, *gap_lines(missing)]


# ------------------------------------------------------------------------------------- the table


def _table(findings: _Findings) -> list[str]:
    """Return a row per worker: fates of its gradients, typical time, time it was waited for."""
    waited, paces, has_moved = findings.waited, findings.paces, bool(findings.summary.traffic)
    counts = {own.worker: outcomes(own) for own in findings.summary.by_worker}
    moved = {own.worker: own.traffic for own in findings.summary.by_worker}
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
            *(traffic_cells(Traffic.total(moved[w] for w in workers)) if has_moved else []),
        ]

    heading = ["worker", *map(str, fates), "median", *(["waited for"] if waited else [])]
    heading += TRAFFIC if has_moved else []
    rows = [row(f"{worker}", [worker]) for worker in sorted(shown)]
    if rest:
        rows.append(row(f"{len(rest)} others", rest))
    return _aligned([heading, *rows])


def _worst_first(counts: dict[int, Counter[str]], waited: dict[int, float]) -> list[int]:
    """Sort workers by their share in the waiting and in the dropped gradients."""
    dropped = {w: own.total() - own["accepted"] for w, own in counts.items()}
    all_waited, all_dropped = sum(waited.values()) or 1.0, sum(dropped.values()) or 1

    def cost(worker: int) -> float:
        return waited.get(worker, 0.0) / all_waited + dropped[worker] / all_dropped

    return sorted(counts, key=lambda worker: (-cost(worker), worker))


def _seconds(seconds: float) -> str:
    return human_seconds(seconds) if seconds else "-"


def _aligned(rows: list[list[str]]) -> list[str]:
    """Align the first column to the left and the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for first, *others in rows:
        cells = [c.rjust(width) for c, width in zip(others, widths[1:], strict=True)]
        lines.append("  ".join([first.ljust(widths[0]), *cells]))
    return lines


# ------------------------------------------------------------------------------------ slow workers


def _unanswered(trace: Trace, start: float) -> list[str]:
    """Name workers whose gradients never came; those that the run waited for have hung."""
    found = unanswered(trace)
    hung = {one.worker for one in found}
    others = [one for one in unfinished(trace) if one.worker not in hung]
    lines = [
        f"Worker {one.worker} hung: it was asked for a gradient at "
        f"{human_seconds(one.asked_at - start)} and still had not sent it "
        f"{human_seconds(one.waited_s)} later."
        for one in found[:NAMED]
    ]
    if len(found) > NAMED:
        lines.append(f"{plural(len(found) - NAMED, 'more gradient')} never arrived.")
    reason = end_reason(trace)
    lines += [_unfinished(one, start, reason) for one in others[:NAMED]]
    if len(others) > NAMED:
        lines.append(f"{plural(len(others) - NAMED, 'more gradient')} took unusually long.")
    return lines


def _unfinished(one: Unfinished, start: float, reason: str) -> str:
    """Name a worker that may have hung: the run didn't wait for it; `reason`: of the end."""
    ends = {RUNNING: "", BREAKS_OFF: "when the trace broke off, "}
    when = "when it left, " if one.has_left else ends.get(reason, "when the run ended, ")
    has = "had" if when else "has"
    return (
        f"Worker {one.worker} was asked for a gradient at {human_seconds(one.asked_at - start)} "
        f"and {has} not sent it {when}{human_seconds(one.lasted_s)} later; its others took at most "
        f"{human_seconds(one.longest_s)}. It may have hung, or was busy with something else, such "
        "as evaluating."
    )


def _slowness(slow: Slowness, *, is_any_hung: bool) -> list[str]:
    if not slow.judged:
        return ["Too few gradients to tell which workers were slow."]
    lines = [_always(pace, others_s) for pace, others_s in slow.always[:NAMED]]
    if len(slow.always) > NAMED:
        lines.append(f"{len(slow.always) - NAMED} other workers are always slow too, but less so.")
    lines += [_too_late(pace, others_s) for pace, others_s in slow.too_late[:NAMED]]
    if len(slow.too_late) > NAMED:
        lines.append(f"{len(slow.too_late) - NAMED} other workers are usually too late, too.")
    if len(slow.sometimes) > max(2, slow.judged // 2):
        lines.append(_most_workers(slow))
    else:
        lines += [_sometimes(pace, timings) for pace, timings in slow.sometimes[:NAMED]]
        if len(slow.sometimes) > NAMED:
            rest = len(slow.sometimes) - NAMED
            lines.append(f"{rest} other workers are sometimes slow too, but less so.")
    lines += [
        f"Worker {pace.worker} was slow once: {_took([timing])} instead of "
        f"{human_seconds(pace.typical_s)}, at {human_seconds(timing.t)}."
        for pace, timing in slow.once[:NAMED]
    ]
    if lines or is_any_hung:
        return lines
    if slow.cancelled:
        was = "was" if slow.cancelled == 1 else "were"
        cancelled = f"{plural(slow.cancelled, 'gradient')} {was} cancelled"
        return [f"No worker was visibly slow, but {cancelled}, so their full times are unknown."]
    return ["No worker was slow."]


def _always(pace: Pace, others_s: float) -> str:
    own, others = human_seconds(pace.typical_s), human_seconds(others_s)
    ratio = f"{pace.typical_s / others_s:.1f} times as long as the others' ({others})"
    return f"Worker {pace.worker} is always slow: its gradients take {own}, {ratio}."


def _too_late(pace: Pace, others_s: float | None) -> str:
    others = "" if others_s is None else f", the others' {human_seconds(others_s)}"
    return (
        f"Worker {pace.worker} is usually too late: {pace.cancelled:,} of its "
        f"{len(pace.timings):,} gradients were cancelled; they take at least "
        f"{human_seconds(pace.typical_s)}{others}."
    )


def _took(timings: list[Timing]) -> str:
    """Return the median of these times."""
    typical = sorted(timings, key=lambda t: t.took_s)[(len(timings) - 1) // 2]
    return f"{'' if typical.is_complete else 'at least '}{human_seconds(typical.took_s)}"


def _sometimes(pace: Pace, timings: list[Timing]) -> str:
    worst = max(timings, key=lambda t: t.took_s)
    return (
        f"Worker {pace.worker} is sometimes slow: {len(timings):,} of its {len(pace.timings):,} "
        f"gradients took {_took(timings)} (median) instead of "
        f"{human_seconds(pace.typical_s)}, and up to {human_seconds(worst.took_s)}."
    )


def _most_workers(slow: Slowness) -> str:
    """Describe a slowness that most workers share; name a worker that has far more of it."""
    timings = [timing for _, own in slow.sometimes for timing in own]
    total = sum(len(pace.timings) for pace, _ in slow.sometimes)
    share = len(timings) / total
    who = "All" if len(slow.sometimes) == slow.judged else f"{len(slow.sometimes)} of"
    worst = max(timings, key=lambda t: t.took_s)
    pace, own = max(slow.sometimes, key=lambda found: len(found[1]) / len(found[0].timings))
    often = ""
    if len(own) / len(pace.timings) >= 2 * share:
        often = f"; most often worker {pace.worker} ({len(own):,} of {len(pace.timings):,})"
    return (
        f"{who} {slow.judged} workers are sometimes slow: {percent(share)} of their gradients "
        f"({len(timings):,} of {total:,}) took {_took(timings)} (median), and up to "
        f"{human_seconds(worst.took_s)}{often}."
    )


# ------------------------------------------------------------------------------------------ waiting


def _waiting(findings: _Findings) -> list[str]:
    header, waited = findings.header, findings.waited
    if not waited and not waits(header.policy):
        return [f"Workers never wait under {header.policy}."]
    total = sum(waited.values())
    seconds = findings.summary.seconds
    if not seconds or total / seconds < WORTH_MENTIONING:
        return ["Almost no time was spent waiting."]

    def amount(spent_s: float) -> str:
        return f"{human_seconds(spent_s)} ({percent(spent_s / seconds)})"

    workers = {w: s for w, s in waited.items() if w != DEADLINE}
    even_s = sum(workers.values()) / max(1, header.workers, len(workers))
    named = [w for w, s in workers.items() if s >= STANDS_OUT * even_s][:NAMED]
    parts = [f"{amount(workers.pop(w))} for worker {w}" for w in named]
    if workers:
        who = plural(len(workers), "other" if named else "worker")
        parts.append(f"{amount(sum(workers.values()))} for {who}")
    if until_deadline := waited.get(DEADLINE):
        parts.append(f"{amount(until_deadline)} until a deadline passed")
    share = f"{human_seconds(total)} ({percent(total / seconds)} of the time)"
    return [f"{share} was spent waiting: {', '.join(parts)}."]


# ---------------------------------------------------------------------------- who contributed


def _shares(samples: dict[int, int]) -> list[str]:
    """Name workers that contributed far fewer samples than an even share."""
    total = sum(samples.values())
    if not total or len(samples) == 1:
        return []
    even = 1 / len(samples)
    short = sorted((n / total, w) for w, n in samples.items() if n / total < UNEVEN * even)
    none = sorted(w for share, w in short if not share)
    lines = [f"{named_workers(none, NAMED)} contributed no samples."] if none else []
    some = [(share, w) for share, w in short if share]
    if len(some) > NAMED:
        together = percent(sum(share for share, _ in some))
        lines.append(
            f"{len(some)} workers contributed only {together} of the samples together; "
            f"an even share is {percent(even)} each."
        )
        return lines
    return lines + [
        f"Worker {w} contributed {percent(share)} of the samples; an even share is {percent(even)}."
        for share, w in some
    ]
