# SPDX-License-Identifier: BSD-3-Clause
"""The agents of hosts, as the server sees them: they send sums, and are lost."""

from collections.abc import Callable, Iterable
from typing import Any

from paceline.errors import ProtocolError
from paceline.run.net.host_messages import SumSpoiled
from paceline.run.net.host_peer import HostPeer, HostSum
from paceline.run.net.transport import PeerEnd
from paceline.run.server.executor import RunParts
from paceline.run.server.reports import Reports
from paceline.run.server.transfers import Transfers
from paceline.run.server.version_maker import NOT_AS_REPORTED

__all__ = ["Hosts"]


class Hosts:
    """All agents of hosts."""

    def __init__(
        self,
        parts: RunParts,
        transfers: Transfers,
        reports: Reports,
        receive: Callable[[PeerEnd, Iterable[object]], None],
    ) -> None:
        """`receive`: handles messages of a worker."""
        self._roster = parts.roster
        self._transfers = transfers
        self._reports = reports
        self._receive = receive
        self.handlers: dict[type, Callable[[PeerEnd, Any], None]] = {
            HostSum: self._on_sum,
            SumSpoiled: self._on_spoiled,
        }

    def _on_sum(self, end: PeerEnd, arrived: HostSum) -> None:
        """Handle the gradients of a sum, one after the other, if all of them count."""
        del end
        if not self._transfers.is_wanted(arrived):
            return
        odd = [worker for worker in arrived.workers if self._is_odd(arrived, worker)]
        for worker in odd:  # its turn ends without the sum; the others are asked for again
            self._transfers.forget(worker)
            self._receive(self._roster[worker].end, [arrived.report_of(worker)])
        for peer, report in [] if odd else self._transfers.take_sum(arrived):
            self._receive(peer.end, [report])

    def _is_odd(self, arrived: HostSum, worker: int) -> bool:
        """Return whether a gradient won't be accepted for another reason than being late."""
        return not self._reports.can_use(self._roster[worker], arrived.report_of(worker))

    def _on_spoiled(self, end: PeerEnd, message: SumSpoiled) -> None:
        """Refuse workers that have sent NaN or infinity, although they reported a finite norm."""
        if not isinstance(end, HostPeer):
            raise ProtocolError("only the agent of a host may send this")
        for worker in end.spoilers(message):
            peer = self._roster.get(worker)
            if peer is not None:
                self._roster.refuse(peer, NOT_AS_REPORTED)

    def lost(self, end: PeerEnd, reason: str) -> None:
        """Lose the workers of a host whose agent is gone."""
        if isinstance(end, HostPeer):
            for hosted in list(end.hosted):
                self._roster.lose(hosted, f"the agent of its host is gone: {reason}")
