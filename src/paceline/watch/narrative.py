# SPDX-License-Identifier: BSD-3-Clause
"""How a run went, in plain words: how far, how fast, what came between, who left and came back.

These are the first lines of its report.
"""

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from itertools import pairwise

from paceline.trace.schema import (
    FINISHED,
    STOPPED,
    Ended,
    Joined,
    Left,
    Paused,
    Record,
    Resumed,
    Stopped,
    Trace,
)
from paceline.watch.summary import (
    BREAKS_OFF,
    RUNNING,
    Restoration,
    Stretch,
    Summary,
    standing_updates,
)
from paceline.watch.words import (
    human_seconds,
    join_words,
    named_workers,
    percent,
    plural,
    three_digits,
    times,
)

__all__ = ["NAMED", "WORTH_TELLING", "course", "goings"]

NAMED = 5  # workers, or losses, that are named one by one
WORTH_TELLING = 0.01  # of the time or of the work; less is not worth a word
OLD = 0.05  # updates; less is rounded to nothing


def course(trace: Trace, stretches: list[Stretch], summary: Summary) -> list[str]:
    """How a run went that made at least one update."""
    rate = f"{three_digits(summary.updates_per_s)} a second, " if summary.seconds else ""
    lines = [
        f"{summary.policy} with {plural(summary.workers, 'worker')}: "
        f"{plural(summary.updates, 'update')} in {human_seconds(summary.seconds)}, {rate}"
        f"{plural(summary.samples, 'sample')}; {_ending(stretches, summary)}."
    ]
    if logged := _logged(stretches):
        lines.append(f"Logged last: {', '.join(logged)}.")
    if summary.staleness_mean >= OLD:
        lines.append(f"Gradients were {summary.staleness_mean:.1f} updates old on average.")
    if summary.wasted_share >= WORTH_TELLING:
        lines.append(
            f"{percent(summary.wasted_share)} of the computing came to nothing: dropped, cut short "
            "or lost."
        )
    lines += _restorations(summary)
    for before, after in pairwise(stretches):
        if before.header.policy != after.header.policy:
            lines.append(f"Until update {before.kept:,} the policy was {before.header.policy}.")
    return lines + _pauses(trace)


def _ending(stretches: list[Stretch], summary: Summary) -> str:
    """Finished; or how far it came: stopped at update 10 of 1,000."""
    if summary.ended == FINISHED:
        return FINISHED
    steps = stretches[-1].header.steps
    of = "" if steps is None else f" of {steps:,}"
    where = f" at update {standing_updates(stretches)[-1].update:,}{of}"
    if summary.ended == STOPPED:
        why = ": all workers had left" if _is_deserted(stretches[-1]) else ""
        return f"{STOPPED}{where}{why}"
    if summary.ended in (BREAKS_OFF, RUNNING):
        return f"{summary.ended}{where}"
    return f"failed{where}: {summary.ended}"


def _is_deserted(stretch: Stretch) -> bool:
    """Whether nobody was here any more when the run was told to stop."""
    here: set[int] = set()
    for record in stretch.records:
        match record:
            case Joined():
                here.add(record.worker)
            case Left():
                here.discard(record.worker)
            case Stopped():
                return not here
            case _:
                pass
    return False


def _logged(stretches: list[Stretch]) -> list[str]:
    """What the scripts logged, each in its last value."""
    last: dict[str, float | None] = {}
    for update in standing_updates(stretches):
        last |= update.scalars
    return [f"{name} {'not finite' if v is None else f'{v:.4g}'}" for name, v in last.items()]


def _restorations(summary: Summary) -> list[str]:
    """What somebody resumed, and what was restored because a server was killed."""
    lines = []
    if resumed := [r for r in summary.restorations if r.resumed]:
        in_all = " in all" if len(resumed) > 1 else ""
        after = f", after {human_seconds(_down_s(resumed))}{in_all}" if _down_s(resumed) else ""
        lines.append(f"The run was resumed {times(len(resumed))}{after}{_lost(resumed, summary)}")
    if restored := [r for r in summary.restorations if not r.resumed]:
        without = f", {human_seconds(_down_s(restored))} without one" if _down_s(restored) else ""
        count = times(len(restored))
        lines.append(f"The server was restored {count}{without}{_lost(restored, summary)}")
    return lines


def _down_s(found: list[Restoration]) -> float:
    return sum(r.down_s for r in found)


def _lost(found: list[Restoration], summary: Summary) -> str:
    """The end of the sentence: which updates it cost."""
    lost = [r for r in found if r.lost]
    if not lost:
        return "; no update was lost."
    which = [
        f"{r.version + 1} to {r.version + r.lost}" if r.lost > 1 else f"{r.version + 1}"
        for r in lost[:NAMED]
    ]
    if len(lost) > NAMED:
        which.append("others")
    made_again = summary.updates >= max(r.version + r.lost for r in lost)
    again = " and made again" if made_again else ""
    count = sum(r.lost for r in lost)
    be = "was" if count == 1 else "were"
    return f": {plural(count, 'update')} ({join_words(which)}) {be} lost{again}."


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


# ----------------------------------------------------------------------------- who left and came


@dataclass(slots=True)
class _Going:
    """What is known of the comings and goings of a worker."""

    left: list[Left] = field(default_factory=list)
    returned: int = 0


def goings(stretches: list[Stretch], began_at: float) -> list[str]:
    """Who never joined, who left, and who came back, in a run that began at this time."""
    found: dict[int, _Going] = defaultdict(_Going)
    joined: set[int] = set()
    for stretch in stretches:
        _add_goings(stretch.records, found, joined)
    lines = []
    if missing := sorted(set(range(stretches[-1].header.workers)) - joined):
        lines.append(f"{named_workers(missing, NAMED)} never joined.")
    gone = {worker: going for worker, going in sorted(found.items()) if going.left}
    if len(gone) > NAMED:
        left, returned = (sum(c) for c in zip(*(_counts(g) for g in gone.values()), strict=True))
        [(reason, _)] = Counter(e.reason for g in gone.values() for e in g.left).most_common(1)
        why = f", mostly: {reason}" if reason else ""
        return [
            *lines,
            f"{len(gone)} workers left, {left} times in all, and came back {returned} times{why}.",
        ]
    return [*lines, *(_going(worker, going, began_at) for worker, going in gone.items())]


def _add_goings(records: list[Record], found: dict[int, _Going], joined: set[int]) -> None:
    """Who left before the end of this life of the server; to leave after it is no news."""
    ends = [r.t for r in records if isinstance(r, Ended)]
    for record in records:
        if isinstance(record, Joined):
            joined.add(record.worker)
            left, returned = _counts(found[record.worker])
            found[record.worker].returned += left > returned
        elif isinstance(record, Left) and not (ends and record.t > ends[-1]):
            found[record.worker].left.append(record)


def _counts(going: _Going) -> tuple[int, int]:
    return len(going.left), going.returned


def _going(worker: int, going: _Going, began_at: float) -> str:
    left, returned = _counts(going)
    reasons = join_words(list(dict.fromkeys(e.reason for e in going.left if e.reason)))
    why = f" ({reasons})" if reasons else ""
    left_at = going.left[0].t - began_at
    when = f"at {human_seconds(left_at)}" if left_at >= 0 else "before the run began"
    if left > 1:
        when = times(left)
    if left == returned:
        back = "and came back" if left == 1 else "and came back each time"
    else:
        back = f"and came back {times(returned)}" if returned else "and did not come back"
    return f"Worker {worker} left {when}{why}, {back}."
