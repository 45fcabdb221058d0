# SPDX-License-Identifier: BSD-3-Clause
"""Which worker may send its gradient, and when: only gradients that count travel.

Theory of operation
    A worker announces a gradient that it has computed and sends it when it is admitted. Gradients
    are admitted in the order of their announcement. A few transfers at a time hold a *place*, so
    the first ones get the whole link instead of all being slow together. A gradient is admitted
    only if it would still count after all transfers that hold a place have arrived. So under a rule
    with a barrier no more gradients are sent than the update still needs; under a rule without one,
    all of them are sent, in turn.

    There are as many places for each server, whose link the transfers share. No more are taken by
    the workers of one host, which share its link: otherwise those of the host that is ready first
    could take all places, while the links of others are idle.

    A transfer that takes longer than twice the usual time gives up its place. It goes on, but
    nothing waits for it any more: the next worker is admitted as if this transfer didn't exist. So
    a link that is slow or stalled never blocks a rule that can do without its worker. The next
    gradient of that worker needs no place: it is admitted as soon as it counts, because its own
    link limits it and leaves the rest to the others. This ends when one of its transfers is as fast
    as usual.

    The usual time is the median of recent transfers. Before the first transfer has arrived no time
    is usual, so no transfer holds a place and all that count are admitted at once: the first may be
    stalled, and any guess could be too short for a large model and too long for a small one. This
    costs at most one gradient of each worker, once.

Rules for this module
    As in the decider: no clock, no random numbers, no sockets. The shell says what happened, calls
    `admit` after every event, and again at `next_at`.
"""

from collections import Counter, OrderedDict, deque
from math import inf
from statistics import median

from paceline.core.decider import Decider
from paceline.core.verdicts import Forecast
from paceline.errors import InternalError

__all__ = ["TRANSFERS", "AdmissionQueue"]

TRANSFERS = 2  # at a time for each server and host; bench/admission.py measures others

RECENT = 32  # transfers that the usual time is learned from
PATIENCE = 2.0  # times the usual time, then a transfer gives up its place


class AdmissionQueue:
    """Decides which of the workers that announced a gradient may send it."""

    def __init__(self, decider: Decider, servers: int = 1, transfers: int = TRANSFERS) -> None:
        """`transfers`: how many hold a place at a time, for each server and for each host."""
        if servers < 1 or transfers < 1:
            raise InternalError(
                f"{transfers} transfers at a time to {servers} servers make no sense"
            )
        self._decider = decider
        self.servers = servers
        self._transfers = transfers
        self._hosts: dict[int, str] = {}  # of those that wait or hold a place
        # Ordered sets. In a plain dict, finding the first entry takes longer with each one that was
        # removed before it.
        self._waiting: OrderedDict[int, None] = OrderedDict()  # announced, not admitted
        self._placed: OrderedDict[int, None] = OrderedDict()  # holding a place, oldest first
        self._began: dict[int, float] = {}  # when each transfer in progress was admitted
        self._slow: set[int] = set()  # workers whose last transfer took too long for a place
        self._took_s: deque[float] = deque(maxlen=RECENT)
        self._patience_s = 0.0  # how long a transfer holds its place; 0: not known yet

    def __contains__(self, worker: int) -> bool:
        """Return whether this worker waits for admission or was admitted."""
        return worker in self._waiting or worker in self._began

    def is_admitted(self, worker: int) -> bool:
        """Return whether this worker was admitted and its gradient hasn't arrived yet."""
        return worker in self._began

    @property
    def placed(self) -> tuple[int, ...]:
        """The workers whose transfers hold a place, in the order of their admission."""
        return tuple(self._placed)

    def announce(self, worker: int, host: str = "") -> None:
        """Record that the worker has computed its gradient and waits to send it.

        `host`: where it runs; empty if it shares its link with no other worker.
        """
        self.withdraw(worker)
        self._waiting[worker] = None
        self._hosts[worker] = host

    def arrived(self, worker: int, now: float) -> None:
        """Record that the last byte of the worker's gradient has arrived."""
        began = self._began.get(worker)
        if began is not None:
            took_s = now - began
            if took_s <= self._patience_s:
                self._slow.discard(worker)
            self._took_s.append(took_s)
            self._patience_s = PATIENCE * median(self._took_s)
        self.withdraw(worker)

    def withdraw(self, worker: int) -> None:
        """Forget the worker's gradient: it was cancelled, or the worker left."""
        self._waiting.pop(worker, None)
        self._hosts.pop(worker, None)
        self._placed.pop(worker, None)
        self._began.pop(worker, None)

    def admit(self, now: float) -> list[int]:
        """Return the workers that may send from now on, in the order of their announcement."""
        while self._placed and now >= self._gives_up_at(oldest := next(iter(self._placed))):
            del self._placed[oldest]
            self._slow.add(oldest)
        admitted: list[int] = []
        if not self._can_admit():
            return admitted
        forecast = Forecast(self._decider.policy, self._decider.ledger, self._placed)
        taken = Counter(self._hosts[worker] for worker in self._placed)
        for worker in self._waiting:
            takes_place = worker not in self._slow and len(self._took_s) > 0
            host = self._hosts[worker]
            is_full = self._is_full or (host != "" and taken[host] >= self._transfers)
            if (takes_place and is_full) or not forecast.accepts(worker):
                continue
            self._began[worker] = now
            admitted.append(worker)
            if takes_place:
                self._placed[worker] = None
                taken[host] += 1
                forecast.suppose_arrival(worker)
            if not self._can_admit():
                break
        for worker in admitted:
            del self._waiting[worker]
        return admitted

    @property
    def next_at(self) -> float:
        """When to call `admit` again even if nothing happens until then; inf: never."""
        if not self._waiting or not self._placed:
            return inf
        return self._gives_up_at(next(iter(self._placed)))

    @property
    def _is_full(self) -> bool:
        return len(self._placed) >= self.servers * self._transfers

    def _can_admit(self) -> bool:
        """Return whether there is a place, or a worker that needs none."""
        if self._is_full:
            return any(w in self._waiting and w not in self._began for w in self._slow)
        return len(self._waiting) > 0

    def _gives_up_at(self, worker: int) -> float:
        return self._began[worker] + self._patience_s
