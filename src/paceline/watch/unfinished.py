# SPDX-License-Identifier: BSD-3-Clause
"""Which workers had been busy with their last gradient for unusually long.

A worker that hangs never reports. `waiting.unanswered` finds it if the run waited for it. Under
rules that go on without it, the trace has only its last gradient, or that it left. So a worker is
listed if the turn that it had not finished, when it left or the run ended, had lasted for much
longer than any of its others. The trace can't tell what it did in that time: it may have hung, but
also evaluated, say. A worker that reports later, or ends its script, has finished its turn.

The trace has the begin of such a turn only if the worker left. Otherwise it is taken from when
workers get turns under the run's rule (see `waiting`). If that isn't known, nothing is listed.
"""

from dataclasses import dataclass

from paceline.core.events import Fate
from paceline.core.policies import Backup, Deadline, Delayed, Sync
from paceline.trace.schema import (
    WITH_NOTICE,
    Ended,
    Gradient,
    Joined,
    Left,
    Paused,
    Record,
    Stopped,
    Trace,
    Update,
)
from paceline.watch.segments import Segment, split
from paceline.watch.waiting import waits

__all__ = ["Unfinished", "unfinished"]

LONG_S = 5.0
"""A turn that lasts for less is never listed."""

UNUSUAL = 3.0
"""A turn is listed at this multiple of the worker's longest other turn."""

ASKED_AT_UPDATES = (Sync.name, Backup.name, Deadline.name, Delayed.name)
"""Rules under which a worker that waits gets its next turn with the next update."""


@dataclass(frozen=True, slots=True)
class Unfinished:
    """A gradient that a worker had been asked for unusually long ago, and had not sent."""

    worker: int
    asked_at: float
    lasted_s: float  # until the worker left or the run ended
    longest_s: float  # that another of its turns took
    has_left: bool  # False: it was still there at the end


def unfinished(trace: Trace) -> list[Unfinished]:
    """Return the unusually long turns that were never finished, in order."""
    turns = _Turns()
    for segment in split(trace):
        turns.begin(segment)
        for record in segment.records:
            turns.add(record)
    return [*turns.found, *turns.open()]


class _Turns:
    """The open turn of each worker, record by record."""

    def __init__(self) -> None:
        self.found: list[Unfinished] = []
        self._policy = ""
        self._end = 0.0  # of the segment; no turn begins after it
        self._longest_s: dict[int, float] = {}  # of the turns that were finished
        self._asked_at: dict[int, float] = {}  # when the open turn began, if that is known
        self._waiting: set[int] = set()  # workers that get a turn with the next update

    def begin(self, segment: Segment) -> None:
        """Begin a segment: nothing is known about turns that began before it."""
        records = segment.records
        ends = [record.t for record in records if isinstance(record, Stopped | Ended)]
        self._end = min(ends) if ends else max((record.t for record in records), default=0.0)
        self._policy = segment.header.policy
        self._forget_all()

    def add(self, record: Record) -> None:
        """Process the next record."""
        match record:
            case Gradient() if record.fate is not Fate.DUPLICATE:
                self._finish(record)
            case Update():
                self._asked_at |= dict.fromkeys(self._waiting, record.t)
                self._waiting.clear()
            case Joined():
                self._forget(record.worker)
            case Left():
                self._forget(record.worker)
                if record.working_since is not None and record.reason != WITH_NOTICE:
                    since, is_early = record.working_since, record.t <= self._end
                    self.found += self._judge(record.worker, since, record.t, has_left=is_early)
            case Paused():
                self._forget_all()
            case _:
                pass

    def open(self) -> list[Unfinished]:
        """Return the unusually long turns that are open at the end."""
        pairs = sorted(self._asked_at.items())
        return [one for w, at in pairs for one in self._judge(w, at, self._end, has_left=False)]

    def _finish(self, gradient: Gradient) -> None:
        """Note that a worker has finished a turn, and when its next one begins."""
        worker, took_s = gradient.worker, gradient.t - gradient.asked_at
        self._longest_s[worker] = max(took_s, self._longest_s.get(worker, 0.0))
        self._forget(worker)
        if gradient.fate is not Fate.ACCEPTED or not waits(self._policy):
            self._asked_at[worker] = gradient.t
        elif self._policy.partition(":")[0] in ASKED_AT_UPDATES:
            self._waiting.add(worker)

    def _forget(self, worker: int) -> None:
        self._asked_at.pop(worker, None)
        self._waiting.discard(worker)

    def _forget_all(self) -> None:
        self._asked_at.clear()
        self._waiting.clear()

    def _judge(
        self, worker: int, asked_at: float, until: float, *, has_left: bool
    ) -> list[Unfinished]:
        """Return the turn if it was unusually long."""
        lasted_s, longest_s = min(until, self._end) - asked_at, self._longest_s.get(worker)
        if longest_s is None or lasted_s < max(LONG_S, UNUSUAL * longest_s):
            return []
        return [Unfinished(worker, asked_at, lasted_s, longest_s, has_left)]
