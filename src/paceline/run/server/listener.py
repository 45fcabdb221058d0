# SPDX-License-Identifier: BSD-3-Clause
"""The server's connections: accept them, authenticate them, and report which have news.

The listener returns only authenticated connections, as transport ends. Until a client has proved
that it knows the token, it can occupy a few hundred bytes for a few seconds. A client that breaks
the protocol is refused here, before anything it sent reaches the server.

A data connection proves which session it belongs to and is handed to the peer of that session. From
then on the listener only tells the peer when it can send or receive.
"""

import selectors
import signal
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import FrameType
from typing import Any

from paceline.errors import PeerLost, ProtocolError
from paceline.run.net.address import accept
from paceline.run.net.channel import STRANGER_LIMIT, Channel
from paceline.run.net.data_socket import DataSocket
from paceline.run.net.handshake import Challenger
from paceline.run.net.messages import DataAttached, Hello, Refused, decode_stranger, decode_worker
from paceline.run.net.tcp import TcpPeer
from paceline.run.net.transport import PeerEnd
from paceline.run.server.refusals import Refusals
from paceline.run.system import SYSTEM, System

__all__ = ["STRANGERS_MAX", "STRANGER_TIMEOUT_S", "Listener"]

STRANGER_TIMEOUT_S = 10.0  # to authenticate, which takes a worker milliseconds
STRANGERS_MAX = 256  # unauthenticated connections at a time; the oldest is closed for a new one

_READ, _WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE


@dataclass(eq=False)
class _Connection:
    """One connection of the server."""

    channel: Channel[Any]
    challenger: Challenger
    accepted_at: float
    peer: PeerEnd | None = None  # not None iff it is authenticated
    data: DataSocket | None = None  # the data connection of its session


@dataclass(eq=False)
class _DataKey:
    """What the selector knows about a data connection."""

    owner: _Connection


class Listener:
    """All connections of the server."""

    def __init__(
        self,
        listening: Sequence[socket.socket],
        token: str,
        open_peer: Callable[[Channel[Any]], PeerEnd],
        report: Callable[[str], None] = print,
        system: System = SYSTEM,
    ) -> None:
        """`open_peer`: makes the transport end of an authenticated connection."""
        self.system = system
        self._listening = listening
        self._token = token
        self._open_peer = open_peer
        self._refusals = Refusals(report)
        self._selector = selectors.DefaultSelector()
        for sock in listening:
            self._selector.register(sock, _READ)
        self._strangers: dict[_Connection, None] = {}  # oldest first
        self._connections: dict[PeerEnd, _Connection] = {}
        self._sessions: dict[bytes, _Connection] = {}  # that may have a data connection
        self._blocked: set[_Connection] = set()  # their outboxes aren't empty
        self._sending: set[_Connection] = set()  # their data connections have something to send
        self._arrived: list[_Connection] = []  # of which `wait` has reported news, see below
        self.stop_wanted = False
        self._waker, self._woken = socket.socketpair()
        self._waker.setblocking(False)
        self._selector.register(self._woken, _READ)

    def stop_on(self, *signals: int) -> None:
        """Let these signals set `stop_wanted` and wake up `wait`."""

        def on_signal(number: int, frame: FrameType | None) -> None:
            del number, frame
            self.stop_wanted = True

        for number in signals:
            signal.signal(number, on_signal)
        signal.set_wakeup_fd(self._waker.fileno(), warn_on_full_buffer=False)

    def wait(self, timeout_s: float | None) -> list[PeerEnd]:
        """Wait until a peer has news, or for this long; return the peers that do."""
        self._watch_blocked()
        ready = self._arrived = [c for c in self._arrived if _has_arrived(c)]
        for key, events in self._selector.select(0 if ready else timeout_s):
            if isinstance(key.data, _Connection):
                is_broken = bool(events & _WRITE) and not self._flush(key.data)
                if (events & _READ or is_broken) and key.data not in ready:
                    ready.append(key.data)
            elif isinstance(key.data, _DataKey):
                owner = key.data.owner
                if self._move_data(owner, events) and owner not in ready:
                    ready.append(owner)
            elif key.fileobj is self._woken:
                self._woken.recv(4096)
            else:
                self._accept(key.fileobj)
        for connection in ready:
            if connection.peer is None:
                self._authenticate(connection)
        peers = [connection.peer for connection in ready if connection.peer is not None]
        if self._strangers:
            self._close_slow_strangers(ready)
        return peers

    def close(self, peer: PeerEnd, reason: str = "") -> None:
        """Close a connection; if there is a reason, send it first."""
        connection = self._connections.pop(peer, None)
        if connection is not None:
            self._close(connection, reason)

    def shut_down(self) -> None:
        """Close everything."""
        self._refusals.report_rest()
        signal.set_wakeup_fd(-1)
        for connection in (*self._strangers, *self._connections.values()):
            self._close(connection)
        self._connections.clear()
        self._selector.close()
        for sock in (*self._listening, self._waker, self._woken):
            sock.close()

    # ---------------------------------------------------------------------------------- writing

    def _watch_blocked(self) -> None:
        """Have the selector report when a blocked connection becomes writable."""
        for connection in self._blocked:
            with suppress(KeyError, ValueError):  # it was closed meanwhile
                self._selector.modify(connection.channel, _READ | _WRITE, connection)
        self._blocked.clear()
        for connection in self._sending:
            if connection.data is not None:
                self._selector.modify(connection.data, _READ | _WRITE, _DataKey(connection))
        self._sending.clear()

    def _flush(self, connection: _Connection) -> bool:
        """Send what was blocked; return False if the connection broke: receiving tells why."""
        try:
            if connection.channel.flush():
                self._selector.modify(connection.channel, _READ, connection)
        except PeerLost:
            return False
        return True

    # The selector reports a message until it is read, but data only when it arrives. So `wait` also
    # looks at the connections that it has reported before, in case they have not been read.

    def _move_data(self, owner: _Connection, events: int) -> bool:
        """Let a peer send and receive data; return whether it has news."""
        peer, data = owner.peer, owner.data
        if not isinstance(peer, TcpPeer) or data is None:
            return False
        if events & _WRITE and not peer.send_data():
            self._selector.modify(data, _READ, _DataKey(owner))
        if events & _READ:
            peer.receive_data()
        return peer.has_arrived

    # --------------------------------------------------------------------------- authentication

    def _accept(self, listening: Any) -> None:
        sock = accept(listening)
        if sock is None:
            return
        while len(self._strangers) >= STRANGERS_MAX:
            self._close(next(iter(self._strangers)))
        channel: Channel[Any] = Channel(sock, decode_stranger, STRANGER_LIMIT)
        connection = _Connection(channel, Challenger(self._token), self.system.monotonic())
        channel.on_blocked = lambda: self._blocked.add(connection)
        self._strangers[connection] = None
        self._selector.register(channel, _READ, connection)

    def _authenticate(self, connection: _Connection) -> None:
        """Continue the handshake; once it is complete, the connection has a peer."""
        channel = connection.channel
        try:
            for message in channel.receive_nowait():
                if isinstance(message, Hello):
                    channel.send(connection.challenger.answer(message))
                    continue
                connection.challenger.check(message)
                if message.session:
                    self._attach(connection, message.session)
                else:
                    self._admit(connection)
                return  # the peer receives the rest
        except ProtocolError as error:
            self._refusals.add(str(error), self.system.monotonic())
            self._close(connection, str(error))
        except PeerLost:
            self._close(connection)

    def _admit(self, connection: _Connection) -> None:
        """Open the peer of an authenticated control connection."""
        session = connection.challenger.session
        connection.channel.trust(decode_worker, session)
        del self._strangers[connection]
        peer = connection.peer = self._open_peer(connection.channel)
        self._connections[peer] = connection
        if isinstance(peer, TcpPeer):
            self._sessions[session] = connection
            peer.on_blocked = lambda: self._sending.add(connection)

    def _attach(self, connection: _Connection, session: bytes) -> None:
        """Hand a data connection to the peer of its session."""
        owner = self._sessions.get(session)
        if owner is None or not isinstance(owner.peer, TcpPeer):
            raise ProtocolError("the session of this data connection is unknown")
        if owner.data is not None:
            raise ProtocolError("the session already has a data connection")
        channel = connection.channel
        channel.send(DataAttached())
        data = owner.data = DataSocket(channel.detach())
        owner.peer.attach(data)
        del self._strangers[connection]
        self._blocked.discard(connection)
        self._selector.unregister(channel)
        self._selector.register(data, _READ, _DataKey(owner))

    def _close_slow_strangers(self, ready: list[_Connection]) -> None:
        limit = self.system.monotonic() - STRANGER_TIMEOUT_S
        # One that has just sent something isn't slow: the server may have been busy.
        slow = [c for c in self._strangers if c.accepted_at < limit and c not in ready]
        for connection in slow:
            self._close(connection, "it took too long to authenticate")

    def _close(self, connection: _Connection, reason: str = "") -> None:
        self._strangers.pop(connection, None)
        self._blocked.discard(connection)
        self._sending.discard(connection)
        self._sessions.pop(connection.challenger.session, None)
        with suppress(KeyError, ValueError):
            self._selector.unregister(connection.channel)
        if reason:  # before the data connection ends, which would tell the worker nothing
            with suppress(PeerLost):
                connection.channel.send(Refused(reason))
        if connection.data is not None:
            self._selector.unregister(connection.data)
            connection.data = None
        if isinstance(connection.peer, TcpPeer):
            connection.peer.close()  # it may have memory for an upload, too
        connection.channel.close()
        # The channel refers to the connection: without this, only the garbage collector would free
        # the worker's slot.
        connection.peer = None


def _has_arrived(connection: _Connection) -> bool:
    return isinstance(connection.peer, TcpPeer) and connection.peer.has_arrived
