# SPDX-License-Identifier: BSD-3-Clause
"""The connections of simulated servers that aren't the head: to the head, and from workers."""

from __future__ import annotations

from typing import Any, NamedTuple

from paceline.errors import PeerLost
from paceline.run.net.data_peer import PartPeer
from paceline.run.net.in_process import InProcessStore
from paceline.run.net.tcp_client import TcpClient
from paceline.run.system import System
from paceline.run.tensors.partition import Part
from storm.network import Kernel
from storm.streams import VirtualStream, WorkerQueues, connected_streams
from storm.world import Process

__all__ = ["PartNetwork", "StormPartHost"]


class _DataConnection(NamedTuple):
    """A worker's data connection: both ends, and whose it is."""

    process: Process
    session: bytes
    ours: VirtualStream
    theirs: VirtualStream

    def close(self) -> None:
        """Close both ends; what was sent before still arrives."""
        self.ours.close()


class _StormPartPeer:
    """A peer and its stream."""

    def __init__(self, peer: PartPeer, stream: VirtualStream) -> None:
        self.peer = peer
        self.stream = stream

    def can_move_data(self) -> bool:
        """Return whether the data connection can send or receive something."""
        wants = self.peer.is_receiving and self.stream.has_news
        return wants or (self.peer.has_unsent and self.stream.can_send)


class PartNetwork:
    """All connections of one server."""

    def __init__(self, kernel: Kernel, process: Process) -> None:
        self._kernel = kernel
        self._world = kernel.world
        self._process = process
        self.address = f"{process.name} of {len(kernel.parts)}"
        to_head, to_us, ours = kernel.connect(process)
        self._control = WorkerQueues(to_us, to_head, self._world)
        self.head = TcpClient(self._control, ours, kernel.system)
        self._stream = ours
        self._attached: dict[PartPeer, _StormPartPeer] = {}
        self._expected: dict[bytes, PartPeer] = {}
        self._waiting: dict[bytes, _DataConnection] = {}  # the head hasn't named their sessions yet
        self.accepted: list[_DataConnection] = []
        kernel.parts[self.address] = self
        process.on_exit.append(self.close)

    # ------------------------------------------------------------------------ called by workers

    def dial(self, process: Process, session: bytes) -> VirtualStream:
        """Open a worker's data connection; return its end when the server has attached it."""
        ours, theirs = connected_streams(self._world, self._kernel.delay_max_s)
        connection = _DataConnection(process, session, ours, theirs)
        process.on_exit.append(connection.close)
        self.accepted.append(connection)
        self._waiting[session] = connection
        self._attach_expected()

        def is_over() -> bool:
            return session not in self._waiting or ours.is_closed

        self._world.wait_for(is_over, 30.0)
        if session in self._waiting or ours.is_closed:
            self._waiting.pop(session, None)
            connection.close()
            raise PeerLost("the data connection was closed")
        return theirs

    def cut(self, process: Process, is_losing: bool) -> int:
        """Cut the connections of a process; return how many there were."""
        found = [c for c in self.accepted if c.process is process and not c.ours.is_closed]
        for connection in found:
            if is_losing:
                connection.ours.lose()
            connection.close()
            self._world.note(f"a data connection of {process.name} is cut")
        return len(found)

    # --------------------------------------------------------------------- called by the server

    def expect(self, session: bytes, peer: PartPeer) -> None:
        """Attach the data connection of this session to the peer, when it is there."""
        self._expected[session] = peer
        self._attach_expected()

    def _attach_expected(self) -> None:
        for session in self._expected.keys() & self._waiting.keys():
            peer, connection = self._expected.pop(session), self._waiting.pop(session)
            peer.attach(connection.ours)
            self._attached[peer] = _StormPartPeer(peer, connection.ours)

    def wait(self, timeout_s: float) -> list[PartPeer]:
        """Wait until the head or a peer has news, or for this long; return those peers."""

        def is_met() -> bool:
            can_move = any(one.can_move_data() for one in self._attached.values())
            has_arrived = any(peer.has_arrived for peer in self._attached)
            return can_move or has_arrived or self._has_head_news()

        self._world.wait_for(is_met, timeout_s)
        for one in list(self._attached.values()):
            if one.can_move_data():
                one.peer.send_data()
                if one.peer.is_receiving:
                    one.peer.receive_data()
        return [peer for peer in self._attached if peer.has_arrived]

    def _has_head_news(self) -> bool:
        wishes = self.head.wishes
        return (
            (wishes.message and self._control.inbox.has_news())
            or (bool(wishes.to_receive) and self._stream.has_news)
            or (bool(wishes.to_send) and self._stream.can_send)
        )

    def close_peer(self, peer: PartPeer) -> None:
        """Close the data connection of a peer."""
        self._expected = {s: one for s, one in self._expected.items() if one is not peer}
        self._attached.pop(peer, None)
        peer.close()

    def close(self) -> None:
        """Close everything."""
        for connection in self.accepted:
            connection.close()
        self._attached.clear()
        self._kernel.parts.pop(self.address, None)
        self.head.close()


class StormPartHost:
    """Where a server runs that isn't the head."""

    def __init__(self, kernel: Kernel, process: Process) -> None:
        self._kernel = kernel
        self._process = process
        self.system: System = kernel.system

    def new_store(self, part: Part) -> InProcessStore:
        """Return plain memory."""
        return InProcessStore(part.spec, part.layout)

    def connect(self) -> Any:
        """Connect to the head, or wait for the next one; raises PeerLost before the first."""
        return PartNetwork(self._kernel, self._process)
