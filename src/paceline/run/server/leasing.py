# SPDX-License-Identifier: BSD-3-Clause
"""Answer workers that ask for batches or return them; the book decides which ones they get."""

from collections.abc import Callable
from typing import Any

from paceline.core.decider import Decider
from paceline.leases import LeaseBook
from paceline.run.net import messages
from paceline.run.net.transport import PeerEnd
from paceline.run.server.recorder import Recorder
from paceline.run.server.roster import Roster
from paceline.run.server.timers import RunClock
from paceline.trace.schema import Skipped

__all__ = ["Leasing", "epoch_shares"]


def epoch_shares(decider: Decider) -> int:
    """Return how many of the gradients that all workers compute at the same time count."""
    policy, workers = decider.policy, decider.ledger.spec.workers
    if policy.repeats or policy.keeps_all:
        return workers
    return max(1, min(workers, policy.needed(decider.ledger)))


class Leasing:
    """The server's side of the leases, apart from those that come with a turn."""

    def __init__(
        self,
        book: LeaseBook,
        roster: Roster,
        clock: RunClock,
        recorder: Recorder,
        has_ended: Callable[[], bool],
    ) -> None:
        """`has_ended`: whether the last update has been made, so that nothing counts any more."""
        self._has_ended = has_ended
        self._book = book
        self._roster = roster
        self._clock = clock
        self._recorder = recorder
        self.handlers: dict[type, Callable[[PeerEnd, Any], None]] = {
            messages.LeaseRequest: self.on_request,
            messages.BatchesReturned: self.on_returned,
        }

    def on_request(self, end: PeerEnd, message: messages.LeaseRequest) -> None:
        """Lease one batch of the stream."""
        peer = self._roster.member(end)
        lease = self._book.lease(peer.worker, message.stream)
        self._roster.send(peer, messages.LeaseReply(lease, self._book.done))

    def on_returned(self, end: PeerEnd, message: messages.BatchesReturned) -> None:
        """End the leases of these batches."""
        worker = self._roster.member(end).worker
        if not message.skipped or self._has_ended():
            self._book.give_back(worker, message.use)
            return
        skipped = self._book.skip(worker, message.use)
        if skipped.numbers:
            self._recorder.write([Skipped(self._clock.now(), worker, skipped)])
