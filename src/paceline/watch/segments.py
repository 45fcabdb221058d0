# SPDX-License-Identifier: BSD-3-Clause
"""Split a trace into segments: which updates were kept, and how long they took.

There is a segment for each server process, and a gap in the trace begins a new one, too. A server
that is killed loses its last updates, and the run makes them again.
"""

from dataclasses import dataclass
from math import inf
from typing import NamedTuple

from paceline.core.events import Fate
from paceline.trace.schema import (
    Ended,
    Gap,
    Gradient,
    Header,
    Record,
    Restored,
    Resumed,
    Trace,
    Update,
)

__all__ = [
    "Segment",
    "TimedUpdate",
    "kept_updates",
    "split",
    "start_time",
    "step_times",
    "without_lost",
]


@dataclass(frozen=True, slots=True)
class Segment:
    """The records of one server process, up to a gap or from a gap on."""

    header: Header  # of this segment; resuming a run may change it
    records: list[Record]
    kept: float  # updates beyond this version were lost; inf: none was
    end: float  # time of its last update; of its beginning if it made none

    def is_lost(self, gradient: Gradient) -> bool:
        """Return whether it was accepted for an update that was lost or never made."""
        if self.kept == inf or gradient.fate is not Fate.ACCEPTED:
            return False
        return gradient.version + gradient.staleness + 1 > self.kept

    def is_wasted(self, gradient: Gradient) -> bool:
        """Return whether its computation was wasted; work under way at the end isn't waste."""
        if gradient.fate is Fate.ACCEPTED:
            return self.is_lost(gradient)
        return gradient.t < self.end


class TimedUpdate(NamedTuple):
    """An update, and how long it took."""

    lasted_s: float  # since the update before it
    is_kept: bool  # whether the update was not lost


def split(trace: Trace) -> list[Segment]:
    """Split a trace into segments; each `Restored` and each `Gap` begins a new one."""
    begins = [i for i, r in enumerate(trace.records) if type(r) is Restored or type(r) is Gap]
    headers = _headers(trace, begins)
    segments: list[Segment] = []
    kept, stop = inf, len(trace.records)
    for begin in reversed([0, *begins]):
        records = trace.records[begin:stop]
        begin_s = records[0].t if records else 0.0
        end = max((r.t for r in records if type(r) is Update), default=begin_s)
        # Gradients accepted for an update that was not made before the end are lost.
        kept = min([kept, *(r.version for r in records if type(r) is Ended)])
        first = records[0] if records else None
        segments.append(Segment(headers.pop(), records, kept, end))
        if isinstance(first, Restored):
            kept = min(kept, first.version)
        stop = begin
    return segments[::-1]


def _headers(trace: Trace, begins: list[int]) -> list[Header]:
    """Return the header of each segment."""
    headers = [trace.header]
    for begin in begins:
        first = trace.records[begin]
        headers.append(first.header if isinstance(first, Restored) else headers[-1])
    return headers


def kept_updates(segments: list[Segment]) -> list[Update]:
    """Return the updates that were not lost, in order."""
    return [
        record
        for segment in segments
        for record in segment.records
        if type(record) is Update and record.update <= segment.kept
    ]


def without_lost(trace: Trace) -> Trace:
    """Return the trace without lost updates and the gradients in them."""
    records = [
        record
        for segment in split(trace)
        for record in segment.records
        if not (isinstance(record, Update) and record.update > segment.kept)
        and not (isinstance(record, Gradient) and segment.is_lost(record))
    ]
    return Trace(trace.header, records)


def start_time(trace: Trace) -> float:
    """Return when the run began, which is some time after its server started.

    If a gap hides the beginning, return when the server started.
    """
    for record in trace.records:
        if isinstance(record, Resumed):
            return record.t
        if isinstance(record, Update) or (isinstance(record, Gap) and _may_have_begun(record)):
            break
    return 0.0


def _may_have_begun(gap: Gap) -> bool:
    """Return whether the run may have begun before the end of a gap."""
    return gap.ledger is None or gap.ledger.begun


def step_times(trace: Trace, since: float | None = None) -> list[TimedUpdate]:
    """Return how long updates took, except for the first one after each gap.

    `since`: when the run began; None: leave out the first update, too.
    """
    steps: list[TimedUpdate] = []
    before = since
    for segment in split(trace):
        for record in segment.records:
            if type(record) is Gap:
                before = None
            elif type(record) is Update:
                if before is not None:
                    steps.append(TimedUpdate(record.t - before, record.update <= segment.kept))
                before = record.t
    return steps
