# SPDX-License-Identifier: BSD-3-Clause
"""The server's connections, and which of them have news.

The listener returns only authenticated connections, as transport ends. Until a client has proved
that it knows the token, it is one of the strangers, which the module `strangers` deals with. They
are served only if no member has sent anything, or after those that have.

A data connection proves which session it belongs to and is handed to the peer of that session. From
then on the listener only tells the peer when it can send or receive.
"""

import selectors
import signal
import socket
import ssl
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import FrameType
from typing import Any, Protocol

from paceline.errors import PeerLost, ProtocolError
from paceline.run.net.channel import Channel, wait_ready
from paceline.run.net.data_peer import DataPeer
from paceline.run.net.data_socket import DataSocket
from paceline.run.net.host_peer import HostPeer
from paceline.run.net.messages import DataAttached, Refused, decode_worker
from paceline.run.net.tcp import TcpPeer
from paceline.run.net.transport import PeerEnd
from paceline.run.server.data_connections import DataConnections, DataKey
from paceline.run.server.refusals import Refusals
from paceline.run.server.stranger_watch import StrangerWatch
from paceline.run.server.strangers import Authenticated, Strangers
from paceline.run.system import SYSTEM, System

__all__ = ["Listener"]

_READ, _WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE
_WAKES_UP = "wakes up"


class HasFileno(Protocol):
    """Something that a selector can watch."""

    def fileno(self) -> int:
        """Return a descriptor."""


@dataclass(eq=False)
class _Connection:
    """One authenticated connection of the server."""

    channel: Channel[Any]
    session: bytes
    peer: PeerEnd | None = None  # None: it was closed


OpenHost = Callable[[Channel[Any], HostPeer | None], PeerEnd]


def _no_agents(channel: Channel[Any], host: HostPeer | None) -> PeerEnd:
    del channel, host
    raise ProtocolError("this server serves no agents of hosts")


class Listener:
    """All connections of the server."""

    def __init__(
        self,
        listening: Sequence[socket.socket],
        token: str,
        open_peer: Callable[[Channel[Any]], Any],
        report: Callable[[str], None] = print,
        system: System = SYSTEM,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """`open_peer`: makes the transport end of an authenticated connection.

        `tls`: for TCP connections; None: they aren't encrypted.
        """
        self.system = system
        self._open_peer = open_peer
        self.open_host: OpenHost = _no_agents
        """As `open_peer`, for the agent of a host or, with its end, for a worker that it serves."""
        self._refusals = Refusals(report)
        self._selector = selectors.DefaultSelector()
        self._strangers = Strangers(listening, token, self._refusals, self._now, tls)
        self._watch = StrangerWatch(self._selector, self._strangers)
        self._connections: dict[PeerEnd, _Connection] = {}
        self._sessions: dict[bytes, _Connection] = {}  # that may have a data connection
        self._blocked: set[_Connection] = set()  # their outboxes aren't empty
        self._data = DataConnections(self._selector)
        self._arrived: list[PeerEnd] = []  # of which `wait` has reported news, see below
        self.stop_wanted = False
        self._waker, self._woken = socket.socketpair()
        self._waker.setblocking(False)
        self._selector.register(self._woken, _READ)

    def _now(self) -> float:
        return self.system.monotonic()

    def stop_on(self, *signals: int) -> None:
        """Let these signals set `stop_wanted` and wake up `wait`."""

        def on_signal(number: int, frame: FrameType | None) -> None:
            del number, frame
            self.stop_wanted = True

        for number in signals:
            signal.signal(number, on_signal)
        signal.set_wakeup_fd(self._waker.fileno(), warn_on_full_buffer=False)

    def wake_up_for(self, connections: HasFileno) -> None:
        """Let `wait` return when this is readable, too."""
        self._selector.register(connections, _READ, _WAKES_UP)

    def wait(self, timeout_s: float | None) -> list[PeerEnd]:
        """Wait until a peer has news, or for this long; return the peers that do."""
        self._watch_blocked()
        # The selector reports a message until it is read, but data only when it arrives. So this
        # also looks at the peers that it has reported before, in case they have not been read.
        ready = self._arrived = [peer for peer in self._arrived if _has_arrived(peer)]
        for data_peer in [*self._data.update(), *self._data.move_unread()]:
            _add_arrived(ready, data_peer)
        are_strangers_ready = False
        timeout_s = self._watch.timeout_s(timeout_s)
        if ready or self._data.has_unread:
            timeout_s = 0
        for key, events in self._selector.select(timeout_s):
            if isinstance(key.data, _Connection):
                is_broken = bool(events & _WRITE) and not self._flush(key.data)
                peer = key.data.peer
                if (events & _READ or is_broken) and peer is not None and peer not in ready:
                    ready.append(peer)
            elif isinstance(key.data, DataKey):
                _add_arrived(ready, self._data.move(key.data, events))
            elif key.fileobj is self._woken:
                self._woken.recv(4096)
            elif key.data != _WAKES_UP:
                are_strangers_ready = True
        if are_strangers_ready or self._watch.is_due():
            self._serve_strangers(ready)
        return list(ready)

    def wait_among(self, peers: Sequence[TcpPeer], timeout_s: float) -> None:
        """Wait until one of these has news, or for this long; only their data is moved."""
        channels = [self._connections[peer].channel for peer in peers]
        reads = [channel.fileno() for channel in channels]
        writes = []
        for channel in channels:
            with suppress(PeerLost):  # receiving tells why
                writes += [] if channel.flush() else [channel.fileno()]
        for peer in peers:
            data = self._data.descriptor(peer)
            reads.append(data)
            writes += [data] * peer.has_unsent
        wait_ready(reads, writes, timeout_s)
        for peer in peers:
            peer.send_data()
            peer.receive_data()

    def close(self, peer: PeerEnd, reason: str = "") -> None:
        """Close a connection; if there is a reason, send it first."""
        connection = self._connections.pop(peer, None)
        if connection is not None:
            self._close(connection, reason)

    def shut_down(self) -> None:
        """Close everything."""
        self._refusals.report_rest()
        signal.set_wakeup_fd(-1)
        for connection in self._connections.values():
            self._close(connection)
        self._connections.clear()
        self._selector.close()
        self._strangers.close()
        for sock in (self._waker, self._woken):
            sock.close()

    # ---------------------------------------------------------------------------------- writing

    def _watch_blocked(self) -> None:
        """Have the selector report when a blocked connection becomes writable."""
        for connection in self._blocked:
            with suppress(KeyError, ValueError):  # it was closed meanwhile
                self._selector.modify(connection.channel, _READ | _WRITE, connection)
        self._blocked.clear()

    def _flush(self, connection: _Connection) -> bool:
        """Send what was blocked; return False if the connection broke: receiving tells why."""
        try:
            if connection.channel.flush():
                self._selector.modify(connection.channel, _READ, connection)
        except PeerLost:
            return False
        return True

    # ------------------------------------------------------------------------------- strangers

    def _serve_strangers(self, ready: list[PeerEnd]) -> None:
        """Serve strangers; those that are authenticated now may have sent more."""
        for one in self._strangers.serve():
            try:
                if one.kind == "data":
                    self._attach(one.channel, one.of_session)
                else:
                    ready.append(self._admit(one))
            except ProtocolError as error:
                self._strangers.refuse(one.channel, str(error))
            except PeerLost:
                one.channel.close()

    def _admit(self, one: Authenticated) -> PeerEnd:
        """Open the peer of an authenticated control connection."""
        channel, host = one.channel, None
        if one.kind == "hosted":
            host = self._agent(one.of_session)
        channel.trust(decode_worker, one.session)
        connection = _Connection(channel, one.session)
        channel.on_blocked = lambda: self._blocked.add(connection)
        if one.kind == "control":
            peer: PeerEnd = self._open_peer(channel)
        else:
            peer = self.open_host(channel, host)
        connection.peer = peer
        self._connections[peer] = connection
        self._selector.register(channel, _READ, connection)
        if isinstance(peer, TcpPeer):
            self._sessions[one.session] = connection
        return peer

    def _agent(self, session: bytes) -> HostPeer:
        """Return the agent of this session, which serves a worker."""
        owner = self._sessions.get(session)
        if owner is None or not isinstance(owner.peer, HostPeer):
            raise ProtocolError("the session of this worker's agent is unknown")
        return owner.peer

    def _attach(self, channel: Channel[Any], session: bytes) -> None:
        """Hand a data connection to the peer of its session."""
        owner = self._sessions.get(session)
        if owner is None or not isinstance(owner.peer, TcpPeer):
            raise ProtocolError("the session of this data connection is unknown")
        if owner.peer in self._data:
            raise ProtocolError("the session already has a data connection")
        channel.send(DataAttached())
        self._data.add(owner.peer, DataSocket(channel.detach()))

    def _close(self, connection: _Connection, reason: str = "") -> None:
        self._blocked.discard(connection)
        self._sessions.pop(connection.session, None)
        with suppress(KeyError, ValueError):
            self._selector.unregister(connection.channel)
        if reason:  # before the data connection ends, which would tell the worker nothing
            with suppress(PeerLost):
                connection.channel.send(Refused(reason))
        if connection.peer in self._arrived:
            self._arrived.remove(connection.peer)
        if isinstance(connection.peer, TcpPeer):
            self._data.remove(connection.peer)
            connection.peer.close()  # it may have memory for an upload, too
        connection.channel.close()
        # The channel refers to the connection: without this, only the garbage collector would free
        # the worker's slot.
        connection.peer = None


def _has_arrived(peer: PeerEnd) -> bool:
    return isinstance(peer, TcpPeer) and peer.has_arrived


def _add_arrived(ready: list[PeerEnd], peer: DataPeer) -> None:
    if isinstance(peer, TcpPeer) and peer.has_arrived and peer not in ready:
        ready.append(peer)
