# SPDX-License-Identifier: BSD-3-Clause
"""Name the workers that a run waits for, when it waits longer than usual.

A worker that hangs sends nothing, and its connection stays open. So the server looks at the clock:
if no update was made for several seconds, and for several times as long as updates usually take,
the run waits for the workers whose gradients would still count, or, if there is none, for all that
compute. The trace has a record of that while it lasts, at growing intervals, so that a run that is
killed meanwhile is explained, too.

Before the run begins, it waits for the workers that haven't joined.
"""

from collections import deque
from statistics import median

from paceline.core.decider import Decider
from paceline.run.server.recorder import Recorder
from paceline.run.server.timers import ASLEEP_S
from paceline.trace.schema import Awaited

__all__ = ["WaitingFor"]

LONG_S = 5.0  # don't report shorter waits,
USUAL = 3.0  # nor waits shorter than this many usual updates
RECENT = 9  # the usual time is the median of this many, so one long interruption doesn't count
FIRST_S = 30.0  # the start and the first update may take long: data is read, caches are empty


class WaitingFor:
    """The workers that a run is waiting for."""

    def __init__(self, decider: Decider, recorder: Recorder) -> None:
        self._decider = decider
        self._recorder = recorder
        self._last: tuple[int, float] | None = None  # a version, and when the next was begun
        self._checked_at = 0.0
        self._first_at: float | None = None  # when it was first checked
        self._asleep_s = 0.0  # how long the machine was suspended since then
        self._took_s: deque[float] = deque(maxlen=RECENT)  # recent updates
        self._record_at: dict[int, float] = {}  # by worker: when to record that it is waited for

    def check(self, now: float) -> dict[int, float]:
        """Return the workers that the run waits for now, and since when."""
        ledger = self._decider.ledger
        if self._first_at is None:
            self._first_at = now
        if not ledger.begun and not ledger.stopping and now - self._first_at >= FIRST_S:
            missing = set(range(ledger.spec.workers)) - ledger.joined
            return dict.fromkeys(sorted(missing), self._first_at)
        if ledger.paused or ledger.finished:
            self._last, self._checked_at, self._asleep_s = None, now, 0.0
            return {}
        passed_s, self._checked_at = now - self._checked_at, now
        self._asleep_s += passed_s if passed_s > ASLEEP_S else 0.0
        self._measure()
        long_s = self._long_s()
        found = {}
        if now - ledger.opened_at >= long_s:
            late = {
                worker: member.asked_at
                for worker, member in ledger.members.items()
                if member.work is not None and now - member.asked_at >= long_s
            }
            would_accept = self._decider.would_accept
            found = {worker: at for worker, at in late.items() if would_accept(worker)} or late
        self._record(found, now)
        return found

    def _measure(self) -> None:
        """Note how long the updates since the last call took, on average."""
        ledger = self._decider.ledger
        if self._last is not None and ledger.version > self._last[0]:
            version, began = self._last
            took_s = ledger.opened_at - began
            # A suspension that is longer than the update isn't over when the update is made.
            asleep_s = min(took_s, self._asleep_s)
            self._asleep_s -= asleep_s
            self._took_s.append((took_s - asleep_s) / (ledger.version - version))
        self._last = (ledger.version, ledger.opened_at)

    def _long_s(self) -> float:
        """Return how long a wait must be to be unusual."""
        if self._took_s:
            return max(LONG_S, USUAL * median(self._took_s))
        is_first = self._decider.ledger.version == self._decider.ledger.oldest
        return FIRST_S if is_first else LONG_S

    def _record(self, found: dict[int, float], now: float) -> None:
        for worker in self._record_at.keys() - found.keys():
            del self._record_at[worker]
        for worker, asked_at in found.items():
            if now >= self._record_at.get(worker, now):
                self._record_at[worker] = now + (now - asked_at)
                self._recorder.write([Awaited(now, worker, asked_at)])
