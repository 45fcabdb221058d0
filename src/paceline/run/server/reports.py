# SPDX-License-Identifier: BSD-3-Clause
"""Turn what workers report about their turns into events.

A report ends a turn: with a gradient, or with the news that it was abandoned. Between hosts a
gradient is announced first. Its report follows when it has arrived, unless it won't count: then its
turn ends at once, and nothing is sent.
"""

from collections.abc import Callable
from typing import Any

from paceline.core.events import Event, GradientArrived, WorkAbandoned
from paceline.errors import ProtocolError
from paceline.run.net import messages
from paceline.run.net.transport import Announcement, PeerEnd
from paceline.run.server.executor import RunParts
from paceline.run.server.gradient_checks import OptimizerPhases, check_gradient
from paceline.run.server.roster import Peer
from paceline.run.server.script_settings import ScriptSettings
from paceline.run.server.transfers import Transfers
from paceline.trace.event_records import Measured

__all__ = ["Report", "Reports"]

Report = messages.GradientReport | messages.AbandonReport


class Reports:
    """Receives the reports of all workers."""

    def __init__(
        self,
        parts: RunParts,
        script_settings: ScriptSettings,
        transfers: Transfers,
        handle: Callable[[Event, Measured, Report], None],
        rejoin: Callable[[Peer], None],
    ) -> None:
        """`handle`: decides on an event. `rejoin`: lets a worker that was parked join again."""
        self._decider = parts.decider
        self._shard = parts.shard
        self._roster = parts.roster
        self._clock = parts.clock
        self._script_settings = script_settings
        self._transfers = transfers
        self._phases = OptimizerPhases(parts.decider, parts.shard)
        self._handle = handle
        self._rejoin = rejoin
        self.handlers: dict[type, Callable[[PeerEnd, Any], None]] = {
            Announcement: self.on_announcement,
            messages.GradientReport: self.on_gradient,
            messages.AbandonReport: self.on_abandoned,
        }

    def on_announcement(self, end: PeerEnd, announcement: Announcement) -> None:
        """Have a gradient sent when it is its turn."""
        report = announcement.report
        peer = self._reporting_peer(end, report)
        if peer is None:
            announcement.withdraw()
            return
        check_gradient(self._decider, self._shard, peer.worker, report)
        if report.sq_norm is None:  # it isn't finite: it won't count
            announcement.withdraw()
            self.on_gradient(end, report)
        else:
            self._transfers.announce(peer, announcement)

    def on_gradient(self, end: PeerEnd, report: messages.GradientReport) -> None:
        """Handle a gradient that has arrived."""
        peer = self._reporting_peer(end, report)
        if peer is None:
            return
        worker = peer.worker
        check_gradient(self._decider, self._shard, worker, report)
        uses = self._decider.leases.check(worker, report.uses)
        now = self._clock.now()
        self._transfers.arrived(worker, now)
        measured = peer.measured(report, now, report.sq_norm, uses)
        event: GradientArrived | WorkAbandoned
        if self._phases.is_out_of_step(worker, report):
            event = WorkAbandoned(now, worker, report.turn)
        else:
            is_finite = report.cancelled or report.sq_norm is not None
            event = GradientArrived(
                now,
                worker,
                report.turn,
                report.version,
                report.samples,
                is_finite,
                report.sq_norm,
                report.new_samples,
            )
        self._end_turn(peer, event, measured, report)

    def can_use(self, peer: Peer, report: messages.GradientReport) -> bool:
        """Return whether nothing but the rule decides if this gradient is accepted."""
        if self._phases.is_at_another(peer.worker, report):
            return False
        try:
            check_gradient(self._decider, self._shard, peer.worker, report)
            self._decider.leases.check(peer.worker, report.uses)
        except ProtocolError:
            return False
        return True

    def on_abandoned(self, end: PeerEnd, report: messages.AbandonReport) -> None:
        """Handle the news that a gradient was abandoned."""
        peer = self._reporting_peer(end, report)
        if peer is not None:
            now = self._clock.now()
            measured = peer.measured(report, now)
            self._end_turn(peer, WorkAbandoned(now, peer.worker, report.turn), measured, report)

    def _reporting_peer(self, end: PeerEnd, report: Report) -> Peer | None:
        """Return the peer that reports; None if it was parked: it rejoins, the report is void."""
        peer = self._roster.member(end)
        self._script_settings.check(report)
        if not peer.is_parked:
            if peer.asked_at is None or report.turn != self._decider.ledger.turns[peer.worker]:
                raise ProtocolError(f"no report is due for turn {report.turn}")
            return peer
        self._shard.remove_reader(peer.worker)
        self._script_settings.take(peer.worker, report)
        self._rejoin(peer)
        return None

    def _end_turn(
        self,
        peer: Peer,
        event: GradientArrived | WorkAbandoned,
        measured: Measured,
        report: Report,
    ) -> None:
        optimizer = report.optimizer if isinstance(report, messages.GradientReport) else None
        self._roster.end_turn(peer, event.time, optimizer)
        self._roster.want_more(peer, report.pulled)
        self._shard.remove_reader(peer.worker, optimizer)
        try:
            self._handle(event, measured, report)
        except ProtocolError:
            self._roster.reopen_turn(peer, measured.asked_at)  # the trace says when it began
            raise
