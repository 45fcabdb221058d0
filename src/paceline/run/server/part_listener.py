# SPDX-License-Identifier: BSD-3-Clause
"""The connections of a server that isn't the head.

It has one connection to the head, which it has opened itself, and accepts data connections of
workers. The head names the session of each worker. A worker may be faster than the head: then its
connection waits until the head has named its session.
"""

import selectors
import socket
import ssl
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from paceline.errors import PeerLost, ProtocolError
from paceline.run.net.channel import Channel
from paceline.run.net.data_peer import PartPeer
from paceline.run.net.data_socket import DataSocket
from paceline.run.net.messages import DataAttached
from paceline.run.net.tcp_client import ControlSocket, TcpClient
from paceline.run.server.data_connections import DataConnections, DataKey
from paceline.run.server.refusals import Refusals
from paceline.run.server.stranger_watch import StrangerWatch
from paceline.run.server.strangers import Authenticated, Strangers
from paceline.run.system import SYSTEM, System

__all__ = ["HeadLink", "PartListener"]

EARLY_S = 30.0  # how long a data connection may wait for the head to name its session
EARLY_MAX = 1024  # data connections that wait at a time

_READ, _WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE


class HeadLink(NamedTuple):
    """The connection to the head."""

    control: ControlSocket
    stream: DataSocket
    client: TcpClient  # made of the two


class _Early(NamedTuple):
    """A data connection of a session that the head hasn't named yet."""

    channel: Channel[Any]
    since: float


class PartListener:
    """All connections of the server."""

    def __init__(
        self,
        listening: Sequence[socket.socket],
        address: str,
        token: str,
        head: HeadLink,
        system: System = SYSTEM,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """`address`: where workers reach this server."""
        self.address = address
        self.head = head.client
        self._stream = head.stream
        self._refusals = Refusals(print)
        self._now = system.monotonic
        self._selector = selectors.DefaultSelector()
        self._strangers = Strangers(listening, token, self._refusals, self._now, tls)
        self._watch = StrangerWatch(self._selector, self._strangers)
        self._data = DataConnections(self._selector)
        self._expected: dict[bytes, PartPeer] = {}  # by session
        self._early: dict[bytes, _Early] = {}  # by session, oldest first
        self._selector.register(head.control, _READ)
        self._head_events = 0  # of its data connection that the selector reports

    def expect(self, session: bytes, peer: PartPeer) -> None:
        """Attach the data connection of this session to the peer, when it is there."""
        early = self._early.pop(session, None)
        if early is None:
            self._expected[session] = peer
        else:
            self._attach(early.channel, peer)

    def _attach(self, channel: Channel[Any], peer: PartPeer) -> None:
        try:
            channel.send(DataAttached())
            self._data.add(peer, DataSocket(channel.detach()))
        except (PeerLost, ProtocolError):
            channel.close()  # the worker connects again, to all servers

    def wait(self, timeout_s: float) -> list[PartPeer]:
        """Wait until the head or a peer has news, or for this long; return those peers."""
        moved = [*self._data.update(), *self._data.move_unread()]
        limit_s = self._watch.timeout_s(timeout_s)
        if (
            any(peer.has_arrived for peer in moved)
            or self._data.has_unread
            or self._has_unread_head()
        ):
            limit_s = 0
        are_strangers_ready = False
        for key, events in self._selector.select(limit_s):
            if isinstance(key.data, DataKey):
                moved.append(self._data.move(key.data, events))
            elif key.fileobj is self._strangers:
                are_strangers_ready = True
        if are_strangers_ready or self._watch.is_due():
            self._serve_strangers()
        self._close_early()
        arrived = dict.fromkeys(peer for peer in moved if peer.has_arrived)
        return [peer for peer in arrived if isinstance(peer, PartPeer)]

    def _has_unread_head(self) -> bool:
        """Watch the head's data connection for what is wanted of it; return whether it has some."""
        wishes = self.head.wishes
        events = _READ * (self._stream in wishes.to_receive)
        events |= _WRITE * (self._stream in wishes.to_send)
        if events != self._head_events:
            if self._head_events:
                self._selector.unregister(self._stream)
            if events:
                self._selector.register(self._stream, events)
            self._head_events = events
        return bool(events & _READ) and self._stream.has_unread()

    def _serve_strangers(self) -> None:
        for one in self._strangers.serve():
            if one.kind != "data":
                reason = "this server isn't the head of its run; connect to the head"
                self._strangers.refuse(one.channel, reason)
            elif (peer := self._expected.pop(one.of_session, None)) is not None:
                self._attach(one.channel, peer)
            else:
                self._keep_early(one)

    def _keep_early(self, one: Authenticated) -> None:
        if one.of_session in self._early or len(self._early) >= EARLY_MAX:
            self._strangers.refuse(one.channel, "the session of this data connection is unknown")
        else:
            self._early[one.of_session] = _Early(one.channel, self._now())

    def _close_early(self) -> None:
        for session, early in list(self._early.items()):
            if self._now() < early.since + EARLY_S:
                break
            del self._early[session]
            early.channel.close()

    def close_peer(self, peer: PartPeer) -> None:
        """Close the data connection of a peer."""
        self._expected = {s: one for s, one in self._expected.items() if one is not peer}
        self._data.remove(peer)
        peer.close()

    def close(self) -> None:
        """Close everything."""
        for early in self._early.values():
            early.channel.close()
        for peer in self._data.peers:
            self._data.remove(peer)
            peer.close()
        with suppress(KeyError, ValueError):
            self._selector.close()
        self._strangers.close()
        self.head.close()
