# SPDX-License-Identifier: BSD-3-Clause
"""The facts behind the report of a run, for programs: `paceline trace show --json`.

The names of the fields are part of the interface: docs/python-api.md lists them. A field may be
added, but none is renamed or removed without a note in the changelog.
"""

from typing import Literal

import msgspec

from paceline.trace.schema import Trace
from paceline.watch.segments import kept_updates, split
from paceline.watch.slowness import Pace, find_slow, measure_paces
from paceline.watch.summary import Summary, end_reason, summarize
from paceline.watch.waiting import DEADLINE, waited_for

__all__ = ["RunFacts", "SlowWorker", "WorkerPace", "gather_facts"]

When = Literal["always", "sometimes", "once", "too late"]


class WorkerPace(msgspec.Struct, frozen=True):
    """How long the gradients of one worker take, and how long others waited for it."""

    worker: int
    typical_s: float | None  # the median time of a gradient; None: it made too few
    is_bound: bool  # whether `typical_s` is only a lower bound, because most were cancelled
    waited_for_s: float


class SlowWorker(msgspec.Struct, frozen=True):
    """A worker that the report calls slow."""

    worker: int
    when: When
    typical_s: float
    others_s: float | None  # the typical time of the others, if the worker is compared with them
    slow_s: list[float]  # the times of the slow gradients, if only some are


class RunFacts(msgspec.Struct, frozen=True):
    """All facts of the report."""

    source: Literal["sim", "run"]
    ended: str  # how: "finished", "stopped", "still running", or why the run failed
    summary: Summary | None  # None: the run made no update, or a gap hides them all
    logged: dict[str, float | None]  # the last value of each name; None: not finite
    workers: list[WorkerPace]
    deadline_s: float  # time that ended with a deadline and not with a worker
    slow: list[SlowWorker]
    text: list[str]  # the lines of the report


def gather_facts(trace: Trace, text: list[str]) -> RunFacts:
    """Return the facts of a run; `text` has the lines of its report."""
    updates = kept_updates(split(trace))
    logged: dict[str, float | None] = {}
    for update in updates:
        logged |= update.scalars
    waited, paces = waited_for(trace), measure_paces(trace)
    found = []
    for worker in sorted({*paces, *waited} - {DEADLINE}):
        pace = paces.get(worker)
        typical_s, is_bound = (pace.typical_s, pace.is_bound) if pace else (None, False)
        found.append(WorkerPace(worker, typical_s, is_bound, waited.get(worker, 0.0)))
    return RunFacts(
        source=trace.header.source,
        ended=end_reason(trace),
        summary=summarize(trace) if updates else None,
        logged=logged,
        workers=found,
        deadline_s=waited.get(DEADLINE, 0.0),
        slow=_slow(paces),
        text=text,
    )


def _slow(paces: dict[int, Pace]) -> list[SlowWorker]:
    """Return the slow workers in the order of the report."""
    slow = find_slow(paces)
    return [
        *(SlowWorker(p.worker, "always", p.typical_s, others, []) for p, others in slow.always),
        *(SlowWorker(p.worker, "too late", p.typical_s, others, []) for p, others in slow.too_late),
        *(
            SlowWorker(p.worker, "sometimes", p.typical_s, None, [t.took_s for t in timings])
            for p, timings in slow.sometimes
        ),
        *(SlowWorker(p.worker, "once", p.typical_s, None, [t.took_s]) for p, t in slow.once),
    ]
