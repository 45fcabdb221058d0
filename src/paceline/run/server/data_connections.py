# SPDX-License-Identifier: BSD-3-Clause
"""The data connections of a server, in the selector of its event loop.

A peer says whether it has something to send and whether it can receive. A connection is watched for
just that, so bytes that nobody can take yet wait in the OS and wake nobody up.
"""

import selectors
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from paceline.run.net.data_peer import DataPeer
from paceline.run.net.data_socket import DataSocket

__all__ = ["DataConnections", "DataKey"]

_READ, _WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE


@dataclass(eq=False)
class DataKey:
    """A data connection, as the selector knows it."""

    peer: DataPeer
    data: DataSocket
    watched: int = 0  # the events that the selector reports; 0: it isn't registered


class DataConnections:
    """The data connections of a server."""

    def __init__(self, selector: selectors.BaseSelector) -> None:
        self._selector = selector
        self._by_peer: dict[DataPeer, DataKey] = {}
        self._changed: set[DataKey] = set()  # they may have to be watched for something else
        self._unread: set[DataKey] = set()  # they hold bytes that the selector doesn't know of

    def __contains__(self, peer: DataPeer) -> bool:
        return peer in self._by_peer

    @property
    def peers(self) -> list[DataPeer]:
        """The peers that have data connections."""
        return list(self._by_peer)

    @property
    def has_unread(self) -> bool:
        """Whether a connection has received bytes that a selector doesn't know of."""
        return bool(self._unread)

    def descriptor(self, peer: DataPeer) -> int:
        """Return the descriptor of a peer's connection."""
        return self._by_peer[peer].data.fileno()

    def add(self, peer: DataPeer, data: DataSocket) -> None:
        """Attach a data connection to its peer."""
        key = self._by_peer[peer] = DataKey(peer, data)
        peer.attach(data)
        peer.on_changed = lambda: self._changed.add(key)
        self._changed.add(key)

    def remove(self, peer: DataPeer) -> None:
        """Forget a data connection; its peer closes it."""
        key = self._by_peer.pop(peer, None)
        if key is not None:
            self._changed.discard(key)
            self._unread.discard(key)
            self._watch(key, 0)
            peer.on_changed = lambda: None

    def update(self) -> list[DataPeer]:
        """Watch every connection for what its peer can do now; call it before the selector.

        Returns the peers that have changed since the last call.
        """
        changed, self._changed = self._changed, set()
        for key in changed:
            self._watch(key, _READ * key.peer.is_receiving | _WRITE * key.peer.has_unsent)
            if key.peer.is_receiving and key.data.has_unread():
                self._unread.add(key)
        return [key.peer for key in changed]

    def _watch(self, key: DataKey, events: int) -> None:
        if events == key.watched:
            return
        with suppress(KeyError, ValueError):  # it was closed
            if not key.watched:
                self._selector.register(key.data, events, key)
            elif events:
                self._selector.modify(key.data, events, key)
            else:
                self._selector.unregister(key.data)
        key.watched = events

    def move(self, key: Any, events: int) -> DataPeer:
        """Send and receive on a connection that the selector has reported; return its peer."""
        if events & _WRITE:
            key.peer.send_data()
        if events & _READ and key.peer.is_receiving:
            key.peer.receive_data()
            if key.data.has_unread():
                self._unread.add(key)
        self._changed.add(key)
        peer: DataPeer = key.peer
        return peer

    def move_unread(self) -> list[DataPeer]:
        """Receive what connections hold; return their peers."""
        unread, self._unread = self._unread, set()
        return [self.move(key, _READ) for key in unread]
