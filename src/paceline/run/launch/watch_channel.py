# SPDX-License-Identifier: BSD-3-Clause
"""The launcher's non-blocking connection to the server.

The handshakes, of TLS and of the run, happen while messages are received; what is sent before they
are complete is sent after them. The connection is registered with the launcher's selector for as
long as it is open.
"""

import ssl
from collections.abc import Callable, Iterator
from contextlib import suppress
from selectors import EVENT_READ, BaseSelector
from typing import Protocol

from paceline.errors import PeerLost
from paceline.run.launch.environment import Identity
from paceline.run.net.channel import STRANGER_LIMIT, Channel
from paceline.run.net.handshake import Authenticator, open_socket
from paceline.run.net.messages import FromServer, decode_server
from paceline.run.net.tls import client_context

__all__ = ["ServerEnd", "WatchChannel", "dialer"]

CONNECT_S = 1.0  # for the OS to connect; takes long only if the server is flooded


class ServerEnd(Protocol):
    """A connection to the server. Every method but `close` may raise PeerLost."""

    def send(self, message: object) -> None:
        """Send a message."""

    def receive_nowait(self) -> Iterator[FromServer]:
        """Yield the messages that have arrived; raises ProtocolError if one is malformed."""

    def wait_readable(self, timeout_s: float) -> bool:
        """Return whether there is something to receive within this time."""

    def close(self) -> None:
        """Close the connection."""


class WatchChannel:
    """A connection over a socket."""

    def __init__(
        self,
        address: str,
        token: str,
        selector: BaseSelector,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """Connect to the server; raises PeerLost if it isn't there."""
        sock = open_socket(address, CONNECT_S, tls)
        sock.setblocking(False)
        self._channel: Channel[FromServer] = Channel(sock, decode_server, STRANGER_LIMIT)
        self._authenticator: Authenticator | None = Authenticator(address, token)
        self._unsent: list[object] = []  # until the handshake is complete
        self._selector = selector
        selector.register(self._channel, EVENT_READ)
        with suppress(PeerLost):  # the next receive reports it
            self._channel.send(self._authenticator.hello())

    def send(self, message: object) -> None:
        """Send a message, or keep it until the handshake is complete."""
        if self._authenticator is None:
            self._channel.send(message)
        else:
            self._unsent.append(message)

    def receive_nowait(self) -> Iterator[FromServer]:
        """Yield the messages that have arrived, after those of the handshake."""
        for message in self._channel.receive_nowait():
            if self._authenticator is None:
                yield message
                continue
            self._channel.send(self._authenticator.prove(message))
            self._channel.trust(decode_server)
            self._authenticator = None
            for unsent in self._unsent:
                self._channel.send(unsent)
            self._unsent.clear()
        self._channel.flush()  # what had to wait for the handshake of TLS

    def wait_readable(self, timeout_s: float) -> bool:
        """Return whether there is something to receive within this time."""
        return self._channel.wait_readable(timeout_s)

    def close(self) -> None:
        """Close the connection."""
        self._selector.unregister(self._channel)
        self._channel.close()


def dialer(server: Identity, selector: BaseSelector) -> Callable[[], ServerEnd]:
    """Return a function that connects to the server; it raises PeerLost if it isn't there."""
    token = server.token()
    tls = None if server.tls is None else client_context(server.tls)
    return lambda: WatchChannel(server.address, token, selector, tls)
