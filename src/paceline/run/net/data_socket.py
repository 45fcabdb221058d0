# SPDX-License-Identifier: BSD-3-Clause
"""The socket of a data connection, and what moves payloads through it.

A data connection carries payloads in both directions and nothing else. Neither side ever waits for
it inside a call: what the socket doesn't take, or doesn't have, is left for the next call.
"""

import socket
from collections.abc import Iterator
from contextlib import suppress
from typing import Protocol

from paceline.errors import PeerLost
from paceline.run.net.payload_stream import CHUNK_BYTES, Arrival, PayloadReceiver, PayloadSender
from paceline.run.net.tls import TlsSocket

__all__ = ["ByteStream", "DataSocket", "receive_payloads", "send_payloads"]

AT_ONCE_BYTES = 8 * CHUNK_BYTES  # moved in one call, so that one connection can't keep others out

# What waits in the OS can't be cancelled. With this much a link is as fast as with more: measured
# at 100 Mbit/s and 1 Gbit/s, and with a delay of 5 ms. A fixed SO_SNDBUF would be slow with delays.
WAITING_BYTES = 1 << 17


class ByteStream(Protocol):
    """A connection that moves bytes without waiting. Both directions may raise PeerLost."""

    def fileno(self) -> int:
        """Return the descriptor, for a selector."""

    def send(self, buffers: list[memoryview]) -> int:
        """Send a part of these bytes; return how many, 0 if none can be sent now."""

    def receive_into(self, space: memoryview) -> int:
        """Receive a part of this many bytes; return how many, 0 if there are none now."""

    def has_unread(self) -> bool:
        """Return whether it holds received bytes, which a selector doesn't know about."""

    def close(self) -> None:
        """Close the connection."""


class DataSocket:
    """A data connection over TCP, with or without TLS."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        with suppress(OSError):  # it isn't a TCP socket
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, WAITING_BYTES)
            # A worker that computes doesn't read, for any time, and isn't gone for that reason. The
            # control connection notices a host that has vanished.
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 0)
        self._sock = sock

    def fileno(self) -> int:
        """Return the descriptor, for a selector."""
        return self._sock.fileno()

    def send(self, buffers: list[memoryview]) -> int:
        """Send a part of these bytes; return how many, 0 if none can be sent now."""
        try:
            if isinstance(self._sock, TlsSocket):
                return self._sock.send(buffers[0])  # all of it, or it is called with it again
            return self._sock.sendmsg(buffers)
        except BlockingIOError:
            return 0
        except OSError as error:
            raise PeerLost(f"the data connection broke: {error.strerror or error}") from None

    def receive_into(self, space: memoryview) -> int:
        """Receive a part of this many bytes; return how many, 0 if there are none now."""
        try:
            count = self._sock.recv_into(space)
        except BlockingIOError:
            return 0
        except OSError as error:
            raise PeerLost(f"the data connection broke: {error.strerror or error}") from None
        if not count:
            raise PeerLost("the data connection was closed")
        return count

    def has_unread(self) -> bool:
        """Return whether it holds received bytes, which a selector doesn't know about."""
        return isinstance(self._sock, TlsSocket) and self._sock.has_unread()

    def close(self) -> None:
        """Close the connection."""
        self._sock.close()


def send_payloads(stream: ByteStream, sender: PayloadSender) -> None:
    """Send what the connection takes now."""
    left = AT_ONCE_BYTES
    while left > 0 and sender:
        count = stream.send(sender.pending())
        if not count:
            return
        sender.sent(count)
        left -= count


def receive_payloads(stream: ByteStream, receiver: PayloadReceiver) -> Iterator[Arrival]:
    """Receive what has arrived; yield each payload that is complete, or was cancelled."""
    left = AT_ONCE_BYTES
    while left > 0:
        count = stream.receive_into(receiver.space())
        if not count:
            return
        left -= count
        arrival = receiver.received(count)
        if arrival is not None:
            yield arrival
