# SPDX-License-Identifier: BSD-3-Clause
"""Gradients that workers have announced and not sent yet: admit them, or end their turns.

The core decides which worker may send, and when (`AdmissionQueue`). This module passes its
decisions on to the transport. A gradient that would no longer count is withdrawn, and its turn ends
without a transfer. Where memory is shared, nothing is ever announced.

Gradients of workers that an agent serves travel in sums. A sum counts as a whole or not at all: if
one of its gradients doesn't count, it is stopped, or ignored, and the agent is asked for another.
"""

from collections.abc import Callable
from math import inf

import msgspec

from paceline.admission import AdmissionQueue
from paceline.core.decider import Decider
from paceline.errors import PeerLost, ProtocolError
from paceline.run.net.host_peer import HostedPeer, HostPeer, HostSum
from paceline.run.net.messages import GradientReport
from paceline.run.net.transport import Announcement
from paceline.run.server.roster import Peer, Roster

__all__ = ["Transfers"]


class Transfers:
    """The transfers of gradients to the servers."""

    def __init__(
        self, decider: Decider, roster: Roster, release_slot: Callable[[int], None]
    ) -> None:
        """`release_slot`: adds what is in the slot of a worker to its sum."""
        self._decider = decider
        self._roster = roster
        self._release_slot = release_slot
        self._queue = AdmissionQueue(decider, pool_of=self._pool_of)
        self._announced: dict[int, Announcement] = {}  # by worker
        self._sums: dict[int, HostSum] = {}  # that were asked for, by worker

    def __bool__(self) -> bool:
        """Return whether any gradient was announced that hasn't arrived."""
        return bool(self._announced)

    def announce(self, peer: Peer, announcement: Announcement) -> None:
        """Note a gradient that a worker has computed."""
        if peer.worker in self._announced:
            raise ProtocolError(f"worker {peer.worker} has announced a gradient already")
        self._announced[peer.worker] = announcement
        self._queue.announce(peer.worker, announcement.host, announcement.report.optimizer)

    def arrived(self, worker: int, now: float) -> None:
        """Note that all of a worker's gradient has arrived."""
        if self._announced.pop(worker, None) is not None:
            self._queue.arrived(worker, now)

    def forget(self, worker: int) -> None:
        """Note that a worker is gone, or that its gradient won't count."""
        if self._announced.pop(worker, None) is not None:
            self._withdraw(worker)

    def _withdraw(self, worker: int) -> None:
        """Withdraw a gradient that was announced, and stop the sum that it is part of."""
        asked = self._sums.get(worker)
        if asked is not None:
            self._end_sum(asked)
            asked.host.stop(asked)
        self._queue.withdraw(worker)

    def take_worthless(self) -> list[tuple[Peer, GradientReport]]:
        """Withdraw the gradients that would no longer count; return reports that end their turns.

        Each report is what the worker would have sent if it had known before its announcement.
        """
        found = []
        for worker in [w for w in self._announced if not self._decider.would_accept(w)]:
            announcement, peer = self._announced.pop(worker), self._roster[worker]
            self._withdraw(worker)
            self._roster.attempt(peer, announcement.withdraw)
            found.append((peer, _as_cancelled(announcement.report)))
        return found

    def admit(self, now: float) -> None:
        """Let the workers send that may."""
        for worker in self._queue.admit(now):
            announcement, peer = self._announced[worker], self._roster[worker]
            if not isinstance(peer.end, HostedPeer):
                self._roster.attempt(peer, announcement.admit)
            elif worker not in self._sums:
                self._ask(peer.end.agent, self._queue.together_with(worker))

    def set_servers(self, servers: int) -> None:
        """Note how many servers there are, and how many transfers may so be under way."""
        self._queue.servers = servers

    @property
    def next_at(self) -> float:
        """When to call `admit` even if nothing happens until then; inf: never."""
        return self._queue.next_at if self._announced else inf

    # -------------------------------------------------------------------------------------- sums

    def _pool_of(self, worker: int) -> list[int]:
        """Return the workers whose gradients are added up with this one's."""
        peer = self._roster.get(worker)
        if peer is None or not isinstance(peer.end, HostedPeer):
            return []
        return [hosted.number for hosted in peer.end.agent.hosted]

    def _ask(self, agent: HostPeer, workers: tuple[int, ...]) -> None:
        """Have the sum of these workers' gradients sent."""
        if agent.slot_worker is not None:
            self._release_slot(agent.slot_worker)
        try:
            asked = agent.ask(workers, [self._announced[worker].report for worker in workers])
        except PeerLost as error:
            for worker in workers:
                self._roster.lose(self._roster[worker].end, f"lost the agent of its host: {error}")
        else:
            self._sums.update(dict.fromkeys(workers, asked))

    def _end_sum(self, asked: HostSum) -> None:
        for worker in asked.workers:
            del self._sums[worker]

    def is_wanted(self, arrived: HostSum) -> bool:
        """Return whether a sum that has arrived wasn't stopped meanwhile."""
        return self._sums.get(arrived.workers[0]) is arrived

    def take_sum(self, arrived: HostSum) -> list[tuple[Peer, GradientReport]]:
        """Return the gradients of a sum, with their workers, to be handled in this order.

        If not all of them count any more, returns none, and those that do are asked for again.
        """
        self._end_sum(arrived)
        if not self._queue.is_usable(arrived.workers):
            arrived.host.stop(arrived)
            self._queue.wait_again(arrived.workers)
            return []
        arrived.host.take(arrived)
        pairs = zip(arrived.workers, arrived.reports, strict=True)
        return [(self._roster[worker], report) for worker, report in pairs]


def _as_cancelled(report: GradientReport) -> GradientReport:
    return msgspec.structs.replace(
        report,
        cancelled=True,
        sq_norm=None,
        unused=(),
        scalars={},
        uses=(),
        new_samples=None,
    )
