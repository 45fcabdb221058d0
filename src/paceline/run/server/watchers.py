# SPDX-License-Identifier: BSD-3-Clause
"""Report the progress of the run to its watchers: in practice, the launcher.

A watcher sends `Watch` and gets one `RunProgress` for it, either immediately or once there is news.
So a watcher that stops reading has at most one unread report. News that the launcher acts on (a
worker joined or left, the run is over) is reported immediately; the rest is collected for a moment,
and until the server is idle. That the result is being written, and the end of the run, is reported
to every watcher, asked for or not.
"""

from collections import Counter
from contextlib import suppress
from math import inf

from paceline.core.events import (
    Accept,
    Action,
    Event,
    GradientArrived,
    StopRequested,
    WorkerJoined,
    WorkerLeft,
)
from paceline.core.ledger import Ledger
from paceline.errors import PeerLost
from paceline.run.net.messages import RunProgress, Watch
from paceline.run.net.transport import PeerEnd
from paceline.trace.schema import Ended

__all__ = ["Watchers"]

COLLECT_S = 0.1  # how long news that isn't urgent is collected


class Watchers:
    """The connections that watch the run, and the news for them."""

    def __init__(self, ledger: Ledger, reached: int = 0) -> None:
        """`reached` is the highest version of earlier servers, which may be lost since."""
        self.is_awaited = False  # whether the launcher hasn't connected yet
        self.computing: dict[int, float] = {}  # see `RunProgress`
        self._is_saving = self._is_told = False
        self._ledger = ledger
        self._reached = reached
        self._ends: dict[PeerEnd, Watch | None] = {}  # None: it has no open request
        self._accepted: Counter[int] = Counter()  # gradients, by worker
        self._left: dict[int, int] = {}  # version at which each worker left
        self._have_scripts_ended = False
        self._waiting_s: dict[int, float] = {}  # by worker that the run waits for
        self._version = ledger.version  # at the last noted event
        self._was_over = False  # likewise
        self._due_at = inf  # when to report the news; inf: there is none
        self._is_urgent = False  # whether some of it is
        self._reported_at = -inf

    def add(self, end: PeerEnd, watch: Watch) -> None:
        """Answer a request, immediately or when there is news."""
        self.is_awaited = False
        self._ends[end] = watch
        if not watch.waits:
            self._send(end, None)

    def remove(self, end: PeerEnd) -> None:
        """Forget a connection that is gone."""
        self._ends.pop(end, None)

    def note(self, event: Event, actions: list[Action], now: float) -> None:
        """Note an event and the decisions on it; `now` is on the clock of `report`."""
        if actions and type(actions[0]) is Accept:
            self._accepted[actions[0].worker] += 1
        if type(event) is GradientArrived and self._ledger.version == self._version:
            if self._due_at == inf:
                self._due_at = max(now, self._reported_at + COLLECT_S)
            return
        is_over = self._is_over
        is_urgent = is_over and not self._was_over
        match event:
            case WorkerJoined():
                self._left.pop(event.worker, None)
                is_urgent = True
            case WorkerLeft():
                if not self._was_over:
                    self._left[event.worker] = self._version
                is_urgent = True
            case StopRequested():
                self._have_scripts_ended = event.at_once or not self._ledger.members
            case _:
                pass
        self._version, self._was_over = self._ledger.version, is_over
        self._is_urgent |= is_urgent
        due_at = now if is_urgent else max(now, self._reported_at + COLLECT_S)
        self._due_at = min(self._due_at, due_at)

    def note_waiting(self, waiting_s: dict[int, float], now: float) -> None:
        """Note for which workers the run waits, and for how long; report a change at once."""
        if waiting_s.keys() != self._waiting_s.keys():
            self._is_urgent, self._due_at = True, now
        self._waiting_s = waiting_s

    def due_at(self, is_busy: bool = False) -> float:
        """Return when to call `report`; inf: there is nothing that this server would report."""
        waits = (is_busy and not self._is_urgent) or not any(self._ends.values())
        return inf if waits else self._due_at

    def report(self, now: float, is_busy: bool = False) -> None:
        """Report the news that is due to the watchers that wait for it.

        A server that is busy reports only urgent news: workers wait for it.
        """
        if now < self.due_at(is_busy):
            return
        self._due_at, self._reported_at, self._is_urgent = inf, now, False
        for end, watch in list(self._ends.items()):
            if watch is not None:
                self._send(end, None)

    def report_saving(self, is_saving: bool) -> None:
        """Report that the server begins to write the result, or has written it and told workers.

        In between, it doesn't answer.
        """
        self._is_saving, self._is_told = is_saving, self._is_told or not is_saving
        self._report_to_all()

    def report_end(self, ended: Ended) -> None:
        """Report the end of the run; call it when everything is written."""
        self._is_saving = False
        self._report_to_all(ended)

    def _report_to_all(self, ended: Ended | None = None) -> None:
        for end in list(self._ends):
            self._send(end, ended)

    @property
    def _is_over(self) -> bool:
        ledger = self._ledger
        is_last = ledger.last is not None and ledger.version >= ledger.last
        return ledger.finished or ledger.stopping or is_last

    def _send(self, end: PeerEnd, ended: Ended | None) -> None:
        watch = self._ends[end]
        self._ends[end] = None
        progress = RunProgress(
            request=0 if watch is None else watch.request,
            version=max(self._reached, self._ledger.version),
            accepted=dict(self._accepted),
            here=tuple(self._ledger.members),
            left=dict(self._left),
            is_over=self._is_over,
            have_scripts_ended=self._have_scripts_ended,
            ended_at=None if ended is None else ended.version,
            end_reason="" if ended is None else ended.reason,
            is_saving=self._is_saving,
            is_told=self._is_told,
            computing=self.computing,
            waiting_s=self._waiting_s,
        )
        with suppress(PeerLost):  # the next receive reports it
            end.send(progress)
