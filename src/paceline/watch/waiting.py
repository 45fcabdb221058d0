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

Pauses, the time without a server, and the time after a server's last update don't count.
"""

from collections import defaultdict
from math import inf

from paceline.core.events import Fate
from paceline.core.policies import Async, BatchSync, SoftSync, Ssp
from paceline.trace.schema import (
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
from paceline.watch.summary import split

__all__ = ["DEADLINE", "waited_for", "waits"]

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
        released = _released(segment.records)
        for record, until in zip(segment.records, released, strict=True):
            if record.t <= segment.end:
                account.add(record, until)
    return dict(sorted(account.charged.items(), key=lambda item: (-item[1], item[0])))


def _name(policy: str) -> str:
    return policy.partition(":")[0]


def _released(records: list[Record]) -> list[float]:
    """Return when each reporting worker got a new turn or left; inf: never; -inf: not a report."""
    asked: dict[int, float] = {}
    released: list[float] = []
    for record in reversed(records):
        until = -inf
        match record:
            case Gradient() if record.fate is not Fate.DUPLICATE:
                until = asked.get(record.worker, inf)
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
                if self._has_barrier():
                    self._charge(record.t)
            case Resumed():
                self._is_running = True
            case Paused():
                self._charge(record.t)
                self._stop()
            case Restored():
                self._version = record.version
                self._policy = record.header.policy
                self._stop()
            case _:
                pass

    def _is_awaited(self, record: Gradient) -> bool:
        """Return whether it ends an interval, because it counts for the next update."""
        if not self._has_barrier():
            return False
        if record.fate is Fate.NON_FINITE:
            return record.version == self._version
        is_next = record.version + record.staleness == self._version
        return record.fate is Fate.ACCEPTED and is_next

    def _has_barrier(self) -> bool:
        """Return whether waiting workers wait for the next update."""
        return _name(self._policy) != Ssp.name

    def _charge(self, now: float) -> None:
        """Charge the interval until now to the cause."""
        if self._since is not None:
            if now > self._since:
                self.charged[self._cause] += now - self._since
            self._since = now

    def _stop(self) -> None:
        self._since, self._is_running = None, False
