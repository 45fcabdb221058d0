# SPDX-License-Identifier: BSD-3-Clause
"""Let workers, agents of hosts, and the other servers join the run.

Workers join when all servers are there; until then, the server remembers who has come. If another
connection has the worker's number, the worker is let in only if that connection turns out to be
closed, or belongs to the same process, which has connected again.
"""

from collections.abc import Callable, Iterable
from typing import Any

from paceline.core.events import Event, WorkerJoined
from paceline.errors import ProtocolError, SpecError
from paceline.release import RELEASE
from paceline.run.net import messages
from paceline.run.net.host_messages import HostWelcome, JoinAsHost
from paceline.run.net.host_peer import HostPeer
from paceline.run.net.server_messages import JoinAsServer
from paceline.run.net.transport import PeerEnd
from paceline.run.server.executor import Executor, RunParts
from paceline.run.server.numbers import Numbers
from paceline.run.server.other_servers import OtherServers
from paceline.run.tensors.layout import difference

__all__ = ["Joining"]


class Joining:
    """Handles the messages of those who join."""

    def __init__(
        self,
        parts: RunParts,
        executor: Executor,
        others: OtherServers,
        handle: Callable[[Event], None],
        lose: Callable[[PeerEnd, str], None],
        take: Callable[[PeerEnd, Iterable[object] | None], None],
    ) -> None:
        """`lose`: closes a connection. `take`: handles messages; None: those that have arrived."""
        self._parts = parts
        self._executor = executor
        self.others = others
        self._handle = handle
        self._lose = lose
        self._take = take
        self.early: list[tuple[PeerEnd, object]] = []  # before all servers were here
        self.numbers = Numbers(
            parts.settings, parts.roster, parts.clock, lambda end: take(end, None)
        )
        self.handlers: dict[type, Callable[[PeerEnd, Any], None]] = {
            messages.Join: self._on_join,
            JoinAsServer: self._on_join_as_server,
            JoinAsHost: self._on_join_as_host,
            **self.numbers.handlers,
        }

    def _on_join_as_server(self, end: PeerEnd, message: JoinAsServer) -> None:
        self.others.admit(end, message)
        if not self.others.missing:
            self._parts.shard.send_parts()
            early, self.early = self.early, []
            for peer, join in early:
                self._take(peer, [join])

    def _on_join_as_host(self, end: PeerEnd, join: JoinAsHost) -> None:
        if self.others.missing:
            self.early.append((end, join))
            return
        if not isinstance(end, HostPeer) or not end.is_attached:
            raise ProtocolError("only the agent of a host, with a data connection, may send this")
        if join.release != RELEASE:
            raise ProtocolError(f"expected Paceline {RELEASE} in an agent, got {join.release}")
        mismatch = difference(join.spec, self._parts.shard.whole.spec)
        if mismatch:
            raise ProtocolError(f"the worker's script differs from the server's: {mismatch}")
        settings = self._parts.settings
        try:
            end.welcome(HostWelcome(settings.wire, settings.wire_parameters))
        except SpecError as error:  # no memory for a slot
            raise ProtocolError(str(error)) from None

    def _on_join(self, end: PeerEnd, message: messages.Join) -> None:
        if self.others.missing:
            self.early.append((end, message))
            return
        roster, checkpointer = self._parts.roster, self._parts.checkpointer
        self.numbers.check(message)
        earlier = roster.get(message.worker)
        if earlier is not None and earlier.end is not end:
            if roster.is_same_process(earlier, message):
                self._lose(earlier.end, "connected again")
            else:
                self._take(earlier.end, None)  # its process may have died, which isn't known yet
        position = checkpointer.position_of(message.worker)
        peer = roster.admit(end, message, checkpointer.is_on, position)
        had_ended = self._parts.decider.ledger.finished  # workers that were here then were told
        self._handle(WorkerJoined(self._parts.clock.now(), peer.worker))
        if had_ended:
            self._executor.send_end(peer)
