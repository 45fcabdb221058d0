# SPDX-License-Identifier: BSD-3-Clause
"""Which workers the others waited for, and for how long.

A worker waits when it has reported and the policy has no turn for it. Each interval of waiting is
charged to the worker whose report ended it: if three workers report at 1 s, 2 s and 10 s, the
second is charged 1 s and the third 8 s. The time before the first report isn't charged, because no
worker is waiting yet. So the charges add up to the time in which at least one worker waited. This
definition works for every policy:

    sync, backup, deadline       from the first report on a version to the update
    delayed                      only when a worker is k updates ahead and gets no turn
    ssp                          only when a worker is too far ahead; the one that releases it pays
    batchsync, softsync, async   never: a worker gets a new turn as soon as it has reported

Pauses, the time without a server, gaps in the trace, and the time after a server's last update
don't count.

A worker that hangs never reports. If the run waited for it, the trace has `Awaited` records.
"""

from collections import defaultdict
from dataclasses import dataclass
from math import inf

from paceline.core.events import Fate
from paceline.core.policies import Async, BatchSync, SoftSync, Ssp
from paceline.trace.schema import (
    Awaited,
    Gap,
    Gradient,
    Left,
    Paused,
    Record,
    Restored,
    Resumed,
    Timer,
    Trace,
    Update,
)
from paceline.watch.segments import Segment, split

__all__ = ["DEADLINE", "Unanswered", "unanswered", "waited_for", "waits"]

DEADLINE = -1
"""Stands in for a worker where an interval was ended by a deadline and not by a report."""

NEVER_WAIT = (Async.name, SoftSync.name, BatchSync.name)


def waits(policy: str) -> bool:
    """Return whether workers can ever wait under this policy."""
    return _name(policy) not in NEVER_WAIT


def waited_for(trace: Trace) -> dict[int, float]:
    """Return the seconds charged to each worker, and to `DEADLINE`; the largest first."""
    account = _WaitingTime(trace.header.policy)
    for segment in split(trace):
        released = _released(segment)
        for record, until in zip(segment.records, released, strict=True):
            if record.t <= segment.end:
                account.add(record, until)
    return dict(sorted(account.charged.items(), key=lambda item: (-item[1], item[0])))


@dataclass(frozen=True, slots=True)
class Unanswered:
    """A request for a gradient that a worker never answered, although the run waited for it."""

    worker: int
    asked_at: float
    waited_s: float  # until it left; otherwise until the last record that says so


def unanswered(trace: Trace) -> list[Unanswered]:
    """Return the requests that were never answered although the run waited for the answer.

    Whether a request was answered isn't known if the server was killed first, or a gap may hide
    the answer; such a request is left out.
    """
    found: list[Unanswered] = []
    until: dict[tuple[int, float], float] = {}  # by worker and time of the request
    for record in trace.records:
        match record:
            case Awaited():
                until[record.worker, record.asked_at] = record.t
            case Gradient():
                until.pop((record.worker, record.asked_at), None)
            case Left() if record.working_since is not None:
                asked_at = record.working_since
                if until.pop((record.worker, asked_at), None) is not None:
                    found.append(Unanswered(record.worker, asked_at, record.t - asked_at))
            case Restored():
                until.clear()
            case Gap():
                still_open = _requests(record)
                until = {request: record.t for request in until if request in still_open}
            case _:
                pass
    return found + [Unanswered(worker, asked, t - asked) for (worker, asked), t in until.items()]


def _requests(gap: Gap) -> set[tuple[int, float]]:
    """Return the requests that were open at the end of a gap."""
    members = {} if gap.ledger is None else gap.ledger.members
    return {(w, member.asked_at) for w, member in members.items() if member.work is not None}


def _name(policy: str) -> str:
    return policy.partition(":")[0]


def _has_barrier(policy: str) -> bool:
    """Return whether waiting workers wait for the next update."""
    return _name(policy) != Ssp.name


def _released(segment: Segment) -> list[float]:
    """Return when each reporting worker got a new turn or left; inf: never; -inf: not a report.

    If the segment doesn't say so, because the worker hung or the trace ends, the next update
    released it.
    """
    asked: dict[int, float] = {}
    updated_at = inf
    released: list[float] = []
    for record in reversed(segment.records):
        until = -inf
        match record:
            case Update() if _has_barrier(segment.header.policy):
                updated_at = record.t
            case Gradient() if record.fate is not Fate.DUPLICATE:
                # A worker whose gradient was not accepted is asked for another one at once.
                unknown = updated_at if record.fate is Fate.ACCEPTED else -inf
                until = asked.get(record.worker, unknown)
                asked[record.worker] = record.asked_at
            case Left():
                since = record.working_since
                asked[record.worker] = record.t if since is None else since
            case _:
                pass
        released.append(until)
    return released[::-1]


class _WaitingTime:
    """Charges intervals of waiting to workers, record by record."""

    def __init__(self, policy: str) -> None:
        self.charged: dict[int, float] = defaultdict(float)
        self._policy = policy
        self._since: float | None = None  # when the interval began; None: no worker waits
        self._until = -inf  # when the last waiting worker gets a new turn
        self._cause = DEADLINE  # the worker that caused the newest record
        self._version = 0
        self._is_running = False

    def add(self, record: Record, until: float) -> None:
        """Process the next record; `until`: when its worker got a new turn."""
        self._process(record)
        if self._until <= record.t:
            self._charge(record.t)
            self._since = None
        self._until = max(self._until, until)
        is_waiting = self._until > record.t and self._is_running and waits(self._policy)
        if is_waiting and self._since is None:
            self._since = record.t

    def _process(self, record: Record) -> None:
        """Remember which worker caused the record; charge the interval if the record ends it."""
        match record:
            case Gradient():
                self._cause = record.worker
                if self._is_awaited(record):
                    self._charge(record.t)
            case Left():
                self._cause = record.worker
            case Timer():
                self._cause = DEADLINE
            case Update():
                self._version = record.update
                if _has_barrier(self._policy):
                    self._charge(record.t)
            case Resumed():
                self._is_running = True
            case Paused():
                self._charge(record.t)
                self._stop()
            case Restored():
                self._version = record.version
                self._policy = record.header.policy
                self._forget()
            case Gap():
                self._version = record.version
                self._forget()
                self._is_running = record.ledger is not None and not record.ledger.paused
            case _:
                pass

    def _is_awaited(self, record: Gradient) -> bool:
        """Return whether it ends an interval, because it counts for the next update."""
        if not _has_barrier(self._policy):
            return False
        if record.fate is Fate.NON_FINITE:
            return record.version == self._version
        is_next = record.version + record.staleness == self._version
        return record.fate is Fate.ACCEPTED and is_next

    def _charge(self, now: float) -> None:
        """Charge the interval until now to the cause."""
        if self._since is not None:
            if now > self._since:
                self.charged[self._cause] += now - self._since
            self._since = now

    def _forget(self) -> None:
        """Forget which workers wait: there is a new server, or nothing is known."""
        self._stop()
        self._until = -inf

    def _stop(self) -> None:
        self._since, self._is_running = None, False
