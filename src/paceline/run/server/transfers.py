# SPDX-License-Identifier: BSD-3-Clause
"""Gradients that workers have announced and not sent yet: admit them, or end their turns.

The core decides which worker may send, and when (`AdmissionQueue`). This module passes its
decisions on to the transport. A gradient that would no longer count is withdrawn, and its turn ends
without a transfer. Where memory is shared, nothing is ever announced.
"""

from math import inf

import msgspec

from paceline.admission import AdmissionQueue
from paceline.core.decider import Decider
from paceline.errors import ProtocolError
from paceline.run.net.messages import GradientReport
from paceline.run.net.transport import Announcement
from paceline.run.server.roster import Peer, Roster

__all__ = ["Transfers"]


class Transfers:
    """The transfers of gradients to the servers."""

    def __init__(self, decider: Decider, roster: Roster) -> None:
        self._decider = decider
        self._roster = roster
        self._queue = AdmissionQueue(decider)
        self._announced: dict[int, Announcement] = {}  # by worker

    def __bool__(self) -> bool:
        """Return whether any gradient was announced that hasn't arrived."""
        return bool(self._announced)

    def announce(self, peer: Peer, announcement: Announcement) -> None:
        """Note a gradient that a worker has computed."""
        if peer.worker in self._announced:
            raise ProtocolError(f"worker {peer.worker} has announced a gradient already")
        self._announced[peer.worker] = announcement
        self._queue.announce(peer.worker, announcement.host)

    def arrived(self, worker: int, now: float) -> None:
        """Note that all of a worker's gradient has arrived."""
        if self._announced.pop(worker, None) is not None:
            self._queue.arrived(worker, now)

    def forget(self, worker: int) -> None:
        """Note that a worker is gone."""
        if self._announced.pop(worker, None) is not None:
            self._queue.withdraw(worker)

    def take_worthless(self) -> list[tuple[Peer, GradientReport]]:
        """Withdraw the gradients that would no longer count; return reports that end their turns.

        Each report is what the worker would have sent if it had known before its announcement.
        """
        found = []
        for worker in [w for w in self._announced if not self._decider.would_accept(w)]:
            announcement, peer = self._announced.pop(worker), self._roster[worker]
            self._queue.withdraw(worker)
            self._roster.attempt(peer, announcement.withdraw)
            found.append((peer, _as_cancelled(announcement.report)))
        return found

    def admit(self, now: float) -> None:
        """Let the workers send that may."""
        for worker in self._queue.admit(now):
            self._roster.attempt(self._roster[worker], self._announced[worker].admit)

    def set_servers(self, servers: int) -> None:
        """Note how many servers there are, and how many transfers may so be under way."""
        self._queue.servers = servers

    @property
    def next_at(self) -> float:
        """When to call `admit` even if nothing happens until then; inf: never."""
        return self._queue.next_at if self._announced else inf


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
