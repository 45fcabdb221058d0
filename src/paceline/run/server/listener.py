# SPDX-License-Identifier: BSD-3-Clause
"""The server's connections: accept them, authenticate them, and report which have news.

The listener returns only authenticated connections, as transport ends. Until a client has proved
that it knows the token, it can occupy a few hundred bytes for a few seconds. A client that breaks
the protocol is refused here, before anything it sent reaches the server.
"""

import selectors
import signal
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from types import FrameType
from typing import Any

from paceline.errors import PeerLost, ProtocolError
from paceline.run.net.address import accept
from paceline.run.net.channel import STRANGER_LIMIT, Channel
from paceline.run.net.handshake import Challenger
from paceline.run.net.messages import Hello, Refused, decode_stranger, decode_worker
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


class Listener:
    """All connections of the server."""

    def __init__(
        self,
        listening: socket.socket,
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
        self._selector.register(listening, _READ)
        self._strangers: dict[_Connection, None] = {}  # oldest first
        self._connections: dict[PeerEnd, _Connection] = {}
        self._blocked: set[_Connection] = set()  # their outboxes aren't empty
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
        ready: list[_Connection] = []
        for key, events in self._selector.select(timeout_s):
            if key.fileobj is self._listening:
                self._accept()
            elif key.fileobj is self._woken:
                self._woken.recv(4096)
            else:
                is_broken = bool(events & _WRITE) and not self._flush(key.data)
                if events & _READ or is_broken:
                    ready.append(key.data)
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
        for sock in (self._listening, self._waker, self._woken):
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

    # --------------------------------------------------------------------------- authentication

    def _accept(self) -> None:
        sock = accept(self._listening)
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
                channel.trust(decode_worker)
                del self._strangers[connection]
                connection.peer = self._open_peer(channel)
                self._connections[connection.peer] = connection
                return  # the peer receives the rest
        except ProtocolError as error:
            self._refusals.add(str(error), self.system.monotonic())
            self._close(connection, str(error))
        except PeerLost:
            self._close(connection)

    def _close_slow_strangers(self, ready: list[_Connection]) -> None:
        limit = self.system.monotonic() - STRANGER_TIMEOUT_S
        # One that has just sent something isn't slow: the server may have been busy.
        slow = [c for c in self._strangers if c.accepted_at < limit and c not in ready]
        for connection in slow:
            self._close(connection, "it took too long to authenticate")

    def _close(self, connection: _Connection, reason: str = "") -> None:
        self._strangers.pop(connection, None)
        self._blocked.discard(connection)
        with suppress(KeyError, ValueError):
            self._selector.unregister(connection.channel)
        if reason:
            with suppress(PeerLost):
                connection.channel.send(Refused(reason))
        connection.channel.close()
        # The channel refers to the connection: without this, only the garbage collector would free
        # the worker's slot.
        connection.peer = None
