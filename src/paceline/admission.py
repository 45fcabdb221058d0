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

    The workers of one host may form a *pool*: their gradients are added up on the host and travel
    as one sum. A pool waits until all of its workers that are still computing have announced their
    gradients, or until those that were announced are all that the update needs. So a pool sends
    one sum for each update, and the rule decides what it consists of before it travels. Under rules
    that don't wait for a certain number of gradients, a pool sends what there is. A sum that can't
    be used as a whole, because a worker has left, or others were faster, is asked for anew.

    The usual time is the median of recent transfers. Before the first transfer has arrived no time
    is usual, so no transfer holds a place and all that count are admitted at once: the first may be
    stalled, and any guess could be too short for a large model and too long for a small one. This
    costs at most one gradient of each worker, once.

Rules for this module
    As in the decider: no clock, no random numbers, no sockets. The shell says what happened, calls
    `admit` after every event, and again at `next_at`.
"""

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from math import inf
from statistics import median

from paceline.core.decider import Decider
from paceline.errors import InternalError
from paceline.forecast import Forecast, room_for

__all__ = ["TRANSFERS", "AdmissionQueue"]

TRANSFERS = 2  # at a time for each server and host; bench/admission.py measures others

RECENT = 32  # transfers that the usual time is learned from
PATIENCE = 2.0  # times the usual time, then a transfer gives up its place


@dataclass(eq=False)
class _Transfer:
    """One gradient, or a sum of several, that may be sent."""

    workers: tuple[int, ...]  # several if it is a sum
    host: str
    began: float
    has_arrived: bool = False


class AdmissionQueue:
    """Decides which of the workers that announced a gradient may send it."""

    def __init__(
        self,
        decider: Decider,
        servers: int = 1,
        transfers: int = TRANSFERS,
        pool_of: Callable[[int], Collection[int]] = lambda _: (),
    ) -> None:
        """`transfers`: how many hold a place at a time, for each server and for each host.

        `pool_of`: returns all workers in the pool of a worker; none if it has no pool.
        """
        if servers < 1 or transfers < 1:
            raise InternalError(
                f"{transfers} transfers at a time to {servers} servers make no sense"
            )
        self._decider = decider
        self.servers = servers
        self._transfers = transfers
        self._pool_of = pool_of
        self._hosts: dict[int, str] = {}  # of those that wait or hold a place
        # Ordered sets. In a plain dict, finding the first entry takes longer with each one that was
        # removed before it.
        self._waiting: OrderedDict[int, None] = OrderedDict()  # announced, not admitted
        self._placed: OrderedDict[_Transfer, None] = OrderedDict()  # holding a place, oldest first
        self._under_way: dict[int, _Transfer] = {}  # by worker
        self._kinds: dict[int, int] = {}  # of announced gradients; only like ones are added up
        self._slow: set[int] = set()  # workers whose last transfer took too long for a place
        self._took_s: deque[float] = deque(maxlen=RECENT)
        self._patience_s = 0.0  # how long a transfer holds its place; 0: not known yet

    def __contains__(self, worker: int) -> bool:
        """Return whether this worker waits for admission or was admitted."""
        return worker in self._waiting or worker in self._under_way

    def is_admitted(self, worker: int) -> bool:
        """Return whether this worker was admitted and its gradient hasn't arrived yet."""
        return worker in self._under_way

    @property
    def placed(self) -> tuple[int, ...]:
        """The workers whose transfers hold a place, in the order of their admission."""
        return tuple([worker for transfer in self._placed for worker in transfer.workers])

    def together_with(self, worker: int) -> tuple[int, ...]:
        """Return the workers whose gradients travel with this one's, which was admitted."""
        return self._under_way[worker].workers

    def announce(self, worker: int, host: str = "", kind: int = 0) -> None:
        """Record that the worker has computed its gradient and waits to send it.

        `host`: where it runs; empty if it shares its link with no other worker. `kind`: only
        gradients of one kind can be added up.
        """
        self.withdraw(worker)
        self._waiting[worker] = None
        self._hosts[worker], self._kinds[worker] = host, kind

    def arrived(self, worker: int, now: float) -> None:
        """Record that the last byte of the worker's gradient has arrived."""
        transfer = self._under_way.get(worker)
        if transfer is not None and not transfer.has_arrived:
            transfer.has_arrived = True
            took_s = now - transfer.began
            if took_s <= self._patience_s:
                self._slow.difference_update(transfer.workers)
            self._took_s.append(took_s)
            self._patience_s = PATIENCE * median(self._took_s)
        self.withdraw(worker)

    def withdraw(self, worker: int) -> None:
        """Forget the worker's gradient: it was cancelled, or the worker left.

        If it is part of a sum that hasn't arrived, the other parts wait for admission again.
        """
        self._waiting.pop(worker, None)
        self._hosts.pop(worker, None)
        self._kinds.pop(worker, None)
        transfer = self._under_way.pop(worker, None)
        if transfer is not None:
            self._placed.pop(transfer, None)
            if not transfer.has_arrived:
                self.wait_again([other for other in transfer.workers if other != worker])

    def wait_again(self, workers: Sequence[int]) -> None:
        """Let gradients that were admitted wait again, before all others."""
        for worker in reversed(workers):
            transfer = self._under_way.pop(worker, None)
            if transfer is not None:
                self._placed.pop(transfer, None)
                self._waiting[worker] = None
                self._waiting.move_to_end(worker, last=False)

    def admit(self, now: float) -> list[int]:
        """Return the workers that may send from now on, in the order of their announcement.

        Those of a pool are next to each other; see `together_with`.
        """
        while self._placed and now >= self._gives_up_at(oldest := next(iter(self._placed))):
            del self._placed[oldest]
            self._slow.update(oldest.workers)
        admitted: list[int] = []
        if not self._can_admit():
            return admitted
        forecast = Forecast(self._decider.policy, self._decider.ledger, self.placed)
        taken = Counter(transfer.host for transfer in self._placed)
        for worker in self._waiting:
            takes_place = worker not in self._slow and len(self._took_s) > 0
            host = self._hosts[worker]
            is_full = self._is_full or (host != "" and taken[host] >= self._transfers)
            if (takes_place and is_full) or not forecast.accepts(worker):
                continue
            pool = self._pool_of(worker)
            workers = self._sum_with(worker, pool) if pool else (worker,)
            if not workers:
                continue
            transfer = _Transfer(workers, host, now)
            self._under_way.update(dict.fromkeys(workers, transfer))
            admitted += workers
            if takes_place:
                self._placed[transfer] = None
                taken[host] += 1
                for one in workers:
                    forecast.suppose_arrival(one)
            if not self._can_admit():
                break
        for worker in admitted:
            del self._waiting[worker]
        return admitted

    # ------------------------------------------------------------------------------------- pools

    def _sum_with(self, worker: int, pool: Collection[int]) -> tuple[int, ...]:
        """Return the workers whose gradients travel in a sum with this one's; none: it waits."""
        if any(other in self._under_way for other in pool) or not self._is_complete(pool):
            return ()
        alike = [other for other in self._waiting if other in pool]
        alike = [other for other in alike if self._kinds[other] == self._kinds[worker]]
        return self._of_one_update(alike[alike.index(worker) :], self.placed)

    def is_usable(self, workers: Sequence[int]) -> bool:
        """Return whether all gradients of a sum that has arrived count, for one update."""
        return len(self._of_one_update(workers, ())) == len(workers)

    def _of_one_update(self, workers: Sequence[int], ahead: Sequence[int]) -> tuple[int, ...]:
        """Return those whose gradients can be added up, if all `ahead` and then they arrive.

        They are of the version of the first one, and count for the same update.
        """
        members, first = self._decider.ledger.members, workers[0]
        forecast = Forecast(self._decider.policy, self._decider.ledger, ahead)
        update, found = forecast.destination(first), []
        for worker in workers:
            is_like_first = members[worker].work == members[first].work
            if is_like_first and update is not None and forecast.destination(worker) == update:
                forecast.suppose_arrival(worker)
                found.append(worker)
        return tuple(found)

    def _is_complete(self, pool: Collection[int]) -> bool:
        """Return whether a pool has no reason to wait for more of its workers."""
        count = self._decider.would_accept
        room = room_for(self._decider.policy, self._decider.ledger)
        if room is None or not any(count(other) for other in pool if other not in self):
            return True
        return sum(map(count, {*self._waiting, *self._under_way})) >= room

    # ------------------------------------------------------------------------------------ places

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
            return any(w in self._waiting and w not in self._under_way for w in self._slow)
        return len(self._waiting) > 0

    def _gives_up_at(self, transfer: _Transfer) -> float:
        return transfer.began + self._patience_s
