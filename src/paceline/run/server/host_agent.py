# SPDX-License-Identifier: BSD-3-Clause
"""The agent of a host: one exchange with the servers for all workers on the host.

Theory of operation
    To its workers, the agent looks like a server on their host: they share memory with it, and
    nothing in a worker differs. What they say is passed on to the head, message by message and in
    order, over a control connection for each worker; what the head says is passed on to them. So
    the head knows each worker, decides about each gradient, and notices each death.

    Versions and gradients go another way. A version arrives once and is kept in memory that all
    workers map; an assignment is passed on when its version is here. A gradient stays in its slot,
    until the head asks for the sum of those that count.

    The agent decides nothing. If it loses the head, it closes the connections of its workers, which
    connect again until there is a head. If the agent itself dies, its launcher starts another one.
"""

from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import msgspec

from paceline.core.events import Fate
from paceline.errors import PeerLost, ProtocolError
from paceline.run.net.channel import Channel
from paceline.run.net.messages import (
    Assignment,
    FromServer,
    Join,
    LeaveRun,
    Refused,
    RunEnded,
    StateReply,
    StateUpload,
    Welcome,
)
from paceline.run.net.shared_memory import SharedMemoryPeer, SharedMemoryStore
from paceline.run.net.transport import ServerConnections
from paceline.run.server.host_uplink import HostedClient, HostUplink
from paceline.run.tensors.layout import Views, difference
from paceline.run.tensors.state_spec import StateSpec

__all__ = ["HostAgent", "LocalWorker", "Servers"]

TICK_S = 0.5


class Servers(Protocol):
    """The way to the servers of the run."""

    def join(
        self, spec: StateSpec, store: SharedMemoryStore, slot_of: Callable[[int], Views | None]
    ) -> HostUplink:
        """Open a session; raises PeerLost if there is no head, ProtocolError if it refuses."""

    def connect_worker(self, store: SharedMemoryStore) -> HostedClient:
        """Connect to the head for one worker; raises PeerLost if the session is over."""

    def say_goodbye(self, message: LeaveRun) -> FromServer:
        """Tell the head that a worker leaves; return the answer. Raises as `join` does."""

    def watch(self, uplink: HostUplink | None, clients: list[HostedClient]) -> bool:
        """Have the listener wake up when one of these connections has something to do.

        Returns whether one of them holds bytes that the OS doesn't know about.
        """


class LocalWorker:
    """A worker of this host."""

    def __init__(self, channel: Channel[Any]) -> None:
        self.channel = channel
        self.number = -1  # once it has joined
        self.peer: SharedMemoryPeer | None = None  # not None iff it has joined
        self.head: HostedClient | None = None  # likewise
        self.slot: Views | None = None  # not None iff it was welcomed
        self.waiting: deque[Any] = deque()  # messages from the head; the first needs its version
        self.pid = channel.peer_pid


class HostAgent:
    """The agent of one host."""

    def __init__(self, connections: ServerConnections, servers: Servers) -> None:
        """`connections`: to the workers of this host. `servers`: the way to the servers."""
        self._connections = connections
        self._monotonic = connections.system.monotonic
        self._servers = servers
        self._spec: StateSpec | None = None  # of the script; not None iff there is an uplink
        self._store: SharedMemoryStore | None = None  # likewise
        self._uplink: HostUplink | None = None
        self._joined: dict[LocalWorker, HostedClient] = {}
        self._welcomed: dict[int, LocalWorker] = {}  # by number

    def serve(self) -> None:
        """Serve the workers of this host until a signal asks to stop."""
        while not self._connections.stop_wanted:
            self.step(TICK_S)
        self.close()

    def close(self) -> None:
        """Close all connections."""
        self._end_session()
        self._connections.shut_down()

    def step(self, timeout_s: float) -> None:
        """Wait for news, or for this long, and act on them."""
        holds_bytes = self._servers.watch(self._uplink, list(self._joined.values()))
        if holds_bytes or (self._uplink is not None and self._uplink.compute()):
            timeout_s = 0.0
        for local in self._connections.wait(timeout_s):
            self._receive(local)
        self._move()

    def _move(self) -> None:
        """Exchange what can be exchanged with the servers now."""
        if self._uplink is not None:
            try:
                self._uplink.move()
            except (PeerLost, ProtocolError):  # the workers tell that they have lost the server
                self._end_session()
        for local, head in list(self._joined.items()):
            is_lost = self._receive_for(local, head)
            try:
                self._pass_on(local)
            except PeerLost:
                is_lost = True
            except ProtocolError as error:  # the head refuses the worker
                self._lose(local, str(error))
            if is_lost:
                self._lose(local)

    def _receive_for(self, local: LocalWorker, head: HostedClient) -> bool:
        """Receive what the head has sent to a worker; return whether the connection is lost."""
        try:
            while head.wait_readable(0.0):
                message = head.receive()
                state = head.receive_state(message) if isinstance(message, StateReply) else None
                local.waiting.append((message, state))
        except (PeerLost, ProtocolError):
            return True
        return False

    # --------------------------------------------------------------------------- from workers

    def _receive(self, local: LocalWorker) -> None:
        try:
            for message in local.channel.receive_nowait():
                self._handle(local, message)
        except ProtocolError as error:
            self._lose(local, str(error))
        except PeerLost:
            self._lose(local)

    def _handle(self, local: LocalWorker, message: Any) -> None:
        head = local.head
        if isinstance(message, Join):
            self._join(local, message)
        elif isinstance(message, LeaveRun):  # over a connection of its own
            local.channel.send(self._servers.say_goodbye(message))
        elif head is None or local.peer is None:
            raise ProtocolError("a worker must join before anything else")
        elif isinstance(message, StateUpload):
            state = local.peer.receive_state(message)
            head.send_state(message.optimizer, state, message.has_begun)
        else:
            head.send(message)

    def _join(self, local: LocalWorker, join: Join) -> None:
        if local.peer is not None:
            raise ProtocolError(f"worker {local.number} has joined already")
        if self._spec is not None and (mismatch := difference(join.spec, self._spec)):
            raise ProtocolError(f"another worker of this host has another script: {mismatch}")
        if self._uplink is None or self._store is None:
            self._store = SharedMemoryStore(join.spec)
            try:
                self._uplink = self._servers.join(join.spec, self._store, self._slot_of)
            except BaseException:
                self._store.close()
                raise
            self._spec = join.spec
        try:
            local.head = self._joined[local] = self._servers.connect_worker(self._store)
        except PeerLost:  # the head is gone, or is the next one, which doesn't know the session
            self._end_session()
            raise
        local.peer = SharedMemoryPeer(local.channel, self._store)
        local.number = join.worker
        local.head.send(join)

    def _slot_of(self, worker: int) -> Views | None:
        local = self._welcomed.get(worker)
        return None if local is None else local.slot

    # ------------------------------------------------------------------------------ to workers

    def _pass_on(self, local: LocalWorker) -> None:
        """Pass on what the head has sent, as far as its versions have arrived."""
        while local.waiting and self._pass_on_one(local, *local.waiting[0]):
            local.waiting.popleft()

    def _pass_on_one(self, local: LocalWorker, message: Any, state: Any) -> bool:
        """Pass on a message; return False if its version hasn't arrived."""
        assert local.peer is not None
        if isinstance(message, Assignment | RunEnded):
            return self._publish(local, local.peer, message)
        if isinstance(message, Refused):
            raise ProtocolError(message.reason)
        if isinstance(message, Welcome):
            local.slot = local.peer.open_slot(message)
            self._welcomed[local.number] = local
        elif isinstance(message, StateReply) and message.tree_bytes:
            local.peer.send_state(state, "state")
        else:
            local.channel.send(message)
        return True

    def _publish(
        self, local: LocalWorker, peer: SharedMemoryPeer, message: Assignment | RunEnded
    ) -> bool:
        assert self._uplink is not None
        buffer = self._uplink.versions.find(local.number, message)
        if buffer is None:
            return False
        if message.notice is not None:
            self._uplink.settle(local.number, message.notice.fate is Fate.ACCEPTED)
        if isinstance(message, Assignment):  # the head's clock isn't that of this host
            message = msgspec.structs.replace(message, asked_at=self._monotonic())
        peer.publish(msgspec.structs.replace(message, buffer=buffer.number), buffer)
        return True

    # ----------------------------------------------------------------------------------- losses

    def _lose(self, local: LocalWorker, reason: str = "") -> None:
        """Close the connections of a worker; if there is a reason, tell it."""
        if self._welcomed.get(local.number) is local:
            del self._welcomed[local.number]
            if self._uplink is not None:
                self._uplink.versions.forget(local.number)
        head, local.head, local.slot = local.head, None, None
        self._joined.pop(local, None)
        if head is not None:
            head.close()
        self._connections.close(local, reason)

    def _end_session(self) -> None:
        """Close everything but the listener; workers connect again, and begin another session."""
        for local in list(self._joined):
            self._lose(local)
        if self._uplink is not None:
            self._uplink.close()
        self._uplink = self._store = self._spec = None
