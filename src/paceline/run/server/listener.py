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
from typing import Any

from paceline.errors import PeerLost, ProtocolError
from paceline.run.net.channel import Channel
from paceline.run.net.data_socket import DataSocket
from paceline.run.net.messages import DataAttached, Refused, decode_worker
from paceline.run.net.tcp import TcpPeer
from paceline.run.net.transport import PeerEnd
from paceline.run.server.refusals import Refusals
from paceline.run.server.strangers import Authenticated, Strangers
from paceline.run.system import SYSTEM, System

__all__ = ["Listener"]

_READ, _WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE


@dataclass(eq=False)
class _Connection:
    """One authenticated connection of the server."""

    channel: Channel[Any]
    session: bytes
    peer: PeerEnd | None = None  # None: it was closed
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
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """`open_peer`: makes the transport end of an authenticated connection.

        `tls`: for TCP connections; None: they aren't encrypted.
        """
        self.system = system
        self._open_peer = open_peer
        self._refusals = Refusals(report)
        self._selector = selectors.DefaultSelector()
        self._strangers = Strangers(listening, token, self._refusals, self._now, tls)
        self._selector.register(self._strangers, _READ)
        self._is_paused = False  # strangers have to wait
        self._connections: dict[PeerEnd, _Connection] = {}
        self._sessions: dict[bytes, _Connection] = {}  # that may have a data connection
        self._blocked: set[_Connection] = set()  # their outboxes aren't empty
        self._sending: set[_Connection] = set()  # their data connections have something to send
        self._unread: set[_Connection] = set()  # their data connections hold bytes, see `TlsSocket`
        self._arrived: list[_Connection] = []  # of which `wait` has reported news, see below
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

    def wait(self, timeout_s: float | None) -> list[PeerEnd]:
        """Wait until a peer has news, or for this long; return the peers that do."""
        self._watch_blocked()
        ready = self._arrived = [c for c in self._arrived if _has_arrived(c)]
        for owner in self._take_unread():
            if self._move_data(owner, _READ) and owner not in ready:
                ready.append(owner)
        are_strangers_ready = False
        for key, events in self._selector.select(self._timeout_s(ready, timeout_s)):
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
                are_strangers_ready = True
        if are_strangers_ready or (not self._is_paused and self._strangers.due_s() == 0):
            self._serve_strangers(ready)
        return [connection.peer for connection in ready if connection.peer is not None]

    def _timeout_s(self, ready: list[_Connection], timeout_s: float | None) -> float | None:
        """Return how long to wait for an event."""
        pause_s = self._strangers.pause_s()
        self._pause_strangers(pause_s > 0)
        if ready or self._unread:
            return 0
        limits = timeout_s, pause_s if self._is_paused else self._strangers.due_s()
        return min((limit for limit in limits if limit is not None), default=None)

    def _pause_strangers(self, is_paused: bool) -> None:
        if is_paused and not self._is_paused:
            self._selector.unregister(self._strangers)
        elif self._is_paused and not is_paused:
            self._selector.register(self._strangers, _READ)
        self._is_paused = is_paused

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
            if data.has_unread():
                self._unread.add(owner)
        return peer.has_arrived

    def _take_unread(self) -> set[_Connection]:
        taken, self._unread = self._unread, set()
        return taken

    # ------------------------------------------------------------------------------- strangers

    def _serve_strangers(self, ready: list[_Connection]) -> None:
        """Serve strangers; those that are authenticated now may have sent more."""
        for one in self._strangers.serve():
            try:
                if one.data_of:
                    self._attach(one.channel, one.data_of)
                else:
                    ready.append(self._admit(one))
            except ProtocolError as error:
                self._strangers.refuse(one.channel, str(error))
            except PeerLost:
                one.channel.close()

    def _admit(self, one: Authenticated) -> _Connection:
        """Open the peer of an authenticated control connection."""
        channel = one.channel
        channel.trust(decode_worker, one.session)
        connection = _Connection(channel, one.session)
        channel.on_blocked = lambda: self._blocked.add(connection)
        peer = connection.peer = self._open_peer(channel)
        self._connections[peer] = connection
        self._selector.register(channel, _READ, connection)
        if isinstance(peer, TcpPeer):
            self._sessions[one.session] = connection
            peer.on_blocked = lambda: self._sending.add(connection)
        return connection

    def _attach(self, channel: Channel[Any], session: bytes) -> None:
        """Hand a data connection to the peer of its session."""
        owner = self._sessions.get(session)
        if owner is None or not isinstance(owner.peer, TcpPeer):
            raise ProtocolError("the session of this data connection is unknown")
        if owner.data is not None:
            raise ProtocolError("the session already has a data connection")
        channel.send(DataAttached())
        data = owner.data = DataSocket(channel.detach())
        owner.peer.attach(data)
        self._selector.register(data, _READ, _DataKey(owner))

    def _close(self, connection: _Connection, reason: str = "") -> None:
        self._blocked.discard(connection)
        self._sending.discard(connection)
        self._unread.discard(connection)
        self._sessions.pop(connection.session, None)
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
