# SPDX-License-Identifier: BSD-3-Clause
"""The first lines of a run's report: how far and how fast it went, interruptions, departures."""

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from itertools import pairwise
from math import isfinite

from paceline.trace.schema import (
    FINISHED,
    STOPPED,
    Ended,
    Gap,
    Joined,
    Left,
    Paused,
    Record,
    Restored,
    Resumed,
    Stopped,
    Trace,
    Update,
)
from paceline.watch.gaps import MissingPart, name_updates
from paceline.watch.segments import Segment, kept_updates
from paceline.watch.summary import BREAKS_OFF, RUNNING, Restoration, Summary
from paceline.watch.traffic import traffic_line
from paceline.watch.words import (
    human_seconds,
    join_words,
    named_workers,
    percent,
    plural,
    three_digits,
    times,
)

__all__ = ["NAMED", "WORTH_MENTIONING", "departures", "gap_lines", "narrate"]

NAMED = 5  # workers, or losses, that are listed one by one
WORTH_MENTIONING = 0.01  # share of the time or of the work below which nothing is said
STALE = 0.05  # updates; less would be rounded to 0.0


def narrate(trace: Trace, segments: list[Segment], summary: Summary) -> list[str]:
    """Return lines on how a run went; it must have made at least one update."""
    per_s = summary.updates_per_s
    rate = f" ({three_digits(per_s)}/s)" if per_s is not None and isfinite(per_s) else ""
    lines = [
        f"{summary.policy} with {plural(summary.workers, 'worker')}: "
        f"{_count(segments, summary)} in {human_seconds(summary.seconds)}{rate}, "
        f"{plural(summary.samples, 'sample')}; {_ending(segments, summary)}."
    ]
    if summary.skipped_updates:
        lines.append(_skipped(summary))
    if logged := _logged(segments):
        lines.append(f"Last logged: {', '.join(logged)}.")
    if summary.staleness_mean >= STALE:
        lines.append(f"Gradients were {summary.staleness_mean:.1f} updates stale on average.")
    if summary.wasted_share >= WORTH_MENTIONING:
        share = percent(summary.wasted_share)
        lines.append(f"{share} of the computation was wasted: dropped, cancelled or lost.")
    if summary.traffic:
        lines.append(traffic_line(summary.traffic, summary.traffic_per_update))
    lines += _restorations(summary, _last_version(segments))
    for before, after in pairwise(segments):
        if before.header.policy != after.header.policy:
            lines.append(f"The rule was {before.header.policy} until update {before.kept:,}.")
    return [*lines, *gap_lines(summary.missing), *_pauses(trace)]


def _count(segments: list[Segment], summary: Summary) -> str:
    """Return how many updates the trace has: "63 of 480 updates (the trace has gaps)"."""
    if not any(part.updates for part in summary.missing):
        return plural(summary.updates, "update")
    total = plural(_last_version(segments), "update")
    return f"{summary.updates:,} of {total} (the trace has gaps)"


def _last_version(segments: list[Segment]) -> int:
    """Return the newest version that the trace names."""
    for record in reversed([record for segment in segments for record in segment.records]):
        if isinstance(record, Update):
            return record.update
        if isinstance(record, Gap | Restored | Ended):
            return record.version
    return 0


def gap_lines(missing: list[MissingPart]) -> list[str]:
    """Return lines on what is missing from the trace."""
    lines = [f"The trace has a gap: {name_updates(part)}." for part in missing[:NAMED]]
    if len(missing) > NAMED:
        lines.append(f"The trace has {plural(len(missing) - NAMED, 'more gap')}.")
    return lines


def _ending(segments: list[Segment], summary: Summary) -> str:
    """Return how a run ended, and where: "stopped at update 10 of 1,000"."""
    if summary.ended == FINISHED:
        return FINISHED
    steps = segments[-1].header.steps
    of = "" if steps is None else f" of {steps:,}"
    where = f" at update {_last_version(segments):,}{of}"
    if summary.ended == STOPPED:
        return f"{STOPPED}{where}{_why_stopped(segments[-1])}"
    if summary.ended in (BREAKS_OFF, RUNNING):
        return f"{summary.ended}{where}"
    return f"failed{where}: {summary.ended}"


def _skipped(summary: Summary) -> str:
    """Return how many updates did not change the parameters."""
    count, total = summary.skipped_updates, summary.updates
    if count == total:
        return "No update changed the parameters: the averaged gradients were not finite."
    return (
        f"{count:,} of {plural(total, 'update')} did not change the parameters: the averaged "
        f"{'gradient was' if count == 1 else 'gradients were'} not finite."
    )


def _why_stopped(segment: Segment) -> str:
    """Return why the run was stopped before its goal, if the trace says so."""
    here: set[int] = set()
    for record in segment.records:
        match record:
            case Gap():
                here = set(record.members)
            case Joined():
                here.add(record.worker)
            case Left():
                here.discard(record.worker)
            case Stopped():
                if record.at_once:
                    return ": the script of worker 0 had ended"
                return "" if here else ": all workers had left"
            case _:
                pass
    return ""


def _logged(segments: list[Segment]) -> list[str]:
    """Return the last value of everything that the scripts logged."""
    last: dict[str, float | None] = {}
    for update in kept_updates(segments):
        last |= update.scalars
    return [f"{name} {'not finite' if v is None else f'{v:.4g}'}" for name, v in last.items()]


def _restorations(summary: Summary, last: int) -> list[str]:
    """Return lines on how often the run was resumed, and its server was killed and restored.

    `last`: the newest version.
    """
    lines = []
    if resumed := [r for r in summary.restorations if r.resumed]:
        in_total = " in total" if len(resumed) > 1 else ""
        after = f", after {human_seconds(_down_s(resumed))}{in_total}" if _down_s(resumed) else ""
        lines.append(f"The run was resumed {times(len(resumed))}{after}{_lost(resumed, last)}")
    if restored := [r for r in summary.restorations if not r.resumed]:
        down = f" ({human_seconds(_down_s(restored))} down)" if _down_s(restored) else ""
        count = times(len(restored))
        lines.append(f"The server was restored {count}{down}{_lost(restored, last)}")
    return lines


def _down_s(found: list[Restoration]) -> float:
    return sum(r.down_s for r in found)


def _lost(found: list[Restoration], last: int) -> str:
    """Return the end of the sentence: which updates were lost, and whether they were made again."""
    lost = [r for r in found if r.lost]
    if not lost:
        return "; no update was lost."
    which = [
        f"{r.version + 1} to {r.version + r.lost}" if r.lost > 1 else f"{r.version + 1}"
        for r in lost[:NAMED]
    ]
    if len(lost) > NAMED:
        which.append("others")
    is_redone = last >= max(r.version + r.lost for r in lost)
    redone = " and redone" if is_redone else ""
    count = sum(r.lost for r in lost)
    be = "was" if count == 1 else "were"
    return f": {plural(count, 'update')} ({join_words(which)}) {be} lost{redone}."


def _pauses(trace: Trace) -> list[str]:
    pauses = [record for record in trace.records if isinstance(record, Paused)]
    if not pauses:
        return []
    lasted, is_paused = _pause_times(trace)
    if not lasted:
        never = " and never resumed" if is_paused else ""  # otherwise a gap hides the end
        return [f"Paused {times(len(pauses))}{never}: {pauses[-1].reason}."]
    longest_s, reason = max(lasted)
    total = f"for {human_seconds(sum(s for s, _ in lasted))}"
    if len(lasted) > 1:
        total += f" in total, at most {human_seconds(longest_s)} at a time"
    return [f"Paused {times(len(pauses))} {total}: {reason}."]


def _pause_times(trace: Trace) -> tuple[list[tuple[float, str]], bool]:
    """Return how long each pause lasted and why, and whether the last one goes on.

    A pause whose end is in a gap is left out.
    """
    lasted: list[tuple[float, str]] = []
    pause: Paused | None = None
    for record in trace.records:
        if isinstance(record, Paused | Resumed):
            if pause is not None:
                lasted.append((record.t - pause.t, pause.reason))
            pause = record if isinstance(record, Paused) else None
        elif isinstance(record, Gap) and record.ledger is not None and not record.ledger.paused:
            pause = None
    return lasted, pause is not None


# --------------------------------------------------------------------------------- departures


@dataclass(slots=True)
class _Presence:
    """How often a worker left and came back."""

    left: list[Left] = field(default_factory=list)
    returned: int = 0


def departures(segments: list[Segment], start: float) -> list[str]:
    """Return lines on workers that never joined, left or came back; the run began at `start`."""
    found: dict[int, _Presence] = defaultdict(_Presence)
    joined: set[int] = set()
    for segment in segments:
        _add_departures(segment.records, found, joined)
    lines = []
    if missing := sorted(set(range(segments[-1].header.workers)) - joined):
        lines.append(f"{named_workers(missing, NAMED)} never joined.")
    gone = {worker: presence for worker, presence in sorted(found.items()) if presence.left}
    if len(gone) > NAMED:
        left, returned = (sum(c) for c in zip(*(_counts(p) for p in gone.values()), strict=True))
        [(reason, _)] = Counter(e.reason for p in gone.values() for e in p.left).most_common(1)
        back = f"came back {times(returned)}" if returned else "did not come back"
        why = f"; most common reason: {reason}" if reason else ""
        return [*lines, f"{len(gone)} workers left {left} times in total and {back}{why}."]
    return [*lines, *(_departure(worker, presence, start) for worker, presence in gone.items())]


def _add_departures(records: list[Record], found: dict[int, _Presence], joined: set[int]) -> None:
    """Add the workers that left in this segment; leaving after the end is normal, and ignored."""
    ends = [r.t for r in records if isinstance(r, Ended)]
    for record in records:
        if isinstance(record, Gap):
            joined.update(record.members, record.ledger.turns if record.ledger else ())
            for worker in record.members:
                _note_presence(found[worker])
        elif isinstance(record, Restored):
            joined |= set(record.turns)
        elif isinstance(record, Joined):
            joined.add(record.worker)
            _note_presence(found[record.worker])
        elif isinstance(record, Left) and not (ends and record.t > ends[-1]):
            found[record.worker].left.append(record)


def _note_presence(presence: _Presence) -> None:
    """Note that a worker is here: it has come back if it had left."""
    left, returned = _counts(presence)
    presence.returned += left > returned


def _counts(presence: _Presence) -> tuple[int, int]:
    return len(presence.left), presence.returned


def _departure(worker: int, presence: _Presence, start: float) -> str:
    left, returned = _counts(presence)
    reasons = join_words(list(dict.fromkeys(e.reason for e in presence.left if e.reason)))
    why = f" ({reasons})" if reasons else ""
    left_at = presence.left[0].t - start
    when = f"at {human_seconds(left_at)}" if left_at >= 0 else "before the run began"
    if left > 1:
        when = times(left)
    if left == returned:
        back = "and came back" if left == 1 else "and came back each time"
    else:
        back = f"and came back {times(returned)}" if returned else "and did not come back"
    return f"Worker {worker} left {when}{why} {back}."
