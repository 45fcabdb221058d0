# SPDX-License-Identifier: BSD-3-Clause
"""Whom a run waited for, and for how long.

Somebody waits while a worker has reported and the rule has nothing for it to do. Before the first
report nobody is ready, so that time is nobody's fault. After it each stretch is charged to the
worker whose report ended it: of three reports at 1 s, 2 s and 10 s the second worker is charged
1 s and the third 8 s. So the sum is the time in which anybody waited at all, and one rule serves
every policy:

    sync, backup, deadline   from the first report on a version to the update
    delayed                  only where somebody is k updates ahead, and has nothing more to do
    ssp                      only where somebody is too far ahead; whoever lets it go on is charged
    batchsync, softsync, async   never: who has reported is asked again at once

Pauses, and the time in which there was no server, are not waiting for anybody's work. After the
last update of a run, or of a life of its server, nobody waits for anything.
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

__all__ = ["IN_VAIN", "waited_for", "waits"]

IN_VAIN = -1
"""Stands for those who had not come when the time of an update was up."""

NEVER_WAIT = (Async.name, SoftSync.name, BatchSync.name)


def waits(policy: str) -> bool:
    """Whether a worker can have nothing to do under this policy."""
    return _name(policy) not in NEVER_WAIT


def waited_for(trace: Trace) -> dict[int, float]:
    """Seconds for each worker that was waited for, the most first; and for `IN_VAIN`."""
    account = _Account(trace.header.policy)
    for stretch in split(trace):
        released = _released(stretch.records)
        for record, until in zip(stretch.records, released, strict=True):
            if record.t <= stretch.end:
                account.book(record, until)
    return dict(sorted(account.charged.items(), key=lambda item: (-item[1], item[0])))


def _name(policy: str) -> str:
    return policy.partition(":")[0]


def _released(records: list[Record]) -> list[float]:
    """For each report, when its worker was asked again or gone; inf: never. For others, -inf."""
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


class _Account:
    """Who is charged, record by record."""

    def __init__(self, policy: str) -> None:
        self.charged: dict[int, float] = defaultdict(float)
        self._policy = policy
        self._since: float | None = None  # when the stretch began; None: nobody waits
        self._until = -inf  # when the last of those who wait now is asked again
        self._cause = IN_VAIN  # who made the newest thing happen
        self._version = 0
        self._runs = False

    def book(self, record: Record, until: float) -> None:
        """Take in the next record; `until`: when its worker was asked again."""
        self._heed(record)
        if self._until <= record.t:
            self._charge(record.t)
            self._since = None
        self._until = max(self._until, until)
        if self._until > record.t and self._since is None and self._runs and waits(self._policy):
            self._since = record.t

    def _heed(self, record: Record) -> None:
        """Note who made it happen, and end the stretch if it does."""
        match record:
            case Gradient():
                self._cause = record.worker
                if self._is_awaited(record):
                    self._charge(record.t)
            case Left():
                self._cause = record.worker
            case Timer():
                self._cause = IN_VAIN
            case Update():
                self._version = record.update
                if self._has_barrier():
                    self._charge(record.t)
            case Resumed():
                self._runs = True
            case Paused():
                self._charge(record.t)
                self._halt()
            case Restored():
                self._version = record.version
                self._policy = record.header.policy
                self._halt()
            case _:
                pass

    def _is_awaited(self, record: Gradient) -> bool:
        """Whether it ends a stretch by itself, being for the update that is made next."""
        if not self._has_barrier():
            return False
        if record.fate is Fate.NON_FINITE:
            return record.version == self._version
        is_next = record.version + record.staleness == self._version
        return record.fate is Fate.ACCEPTED and is_next

    def _has_barrier(self) -> bool:
        """Whether those who wait, wait for the next update."""
        return _name(self._policy) != Ssp.name

    def _charge(self, now: float) -> None:
        """The stretch until now is at the cause's expense."""
        if self._since is not None:
            if now > self._since:
                self.charged[self._cause] += now - self._since
            self._since = now

    def _halt(self) -> None:
        self._since, self._runs = None, False
