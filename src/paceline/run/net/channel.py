# SPDX-License-Identifier: BSD-3-Clause
"""One end of a control connection: typed messages over a socket.

A message travels as a frame: a length of four bytes, little-endian, and a body of that many bytes.
A length above the limit is refused before any of the body is read.

On a blocking socket (a worker's), `send` waits until the socket has taken the message. On a
non-blocking one (the server's), `send` never waits: what the socket doesn't take immediately goes
into a bounded outbox, which `flush` empties when the socket is writable again. So a peer that reads
slowly costs a little memory, and only one that stops reading counts as lost. Over TLS, the first
calls also do its handshake.

File descriptors can be sent with a message over a Unix socket. Only the shared-memory transport and
the fork server use that.
"""

import os
import select
import socket
import struct
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Generic, NamedTuple, TypeVar

from paceline.errors import InternalError, PeerLost, ProtocolError
from paceline.run.net.messages import encode
from paceline.run.net.tls import TlsError

__all__ = [
    "MEMBER_LIMIT",
    "OUTBOX_BYTES",
    "STRANGER_LIMIT",
    "Channel",
    "FrameBuffer",
    "frame",
    "wait_ready",
]

STRANGER_LIMIT = 256  # bytes of a message, until the peer has proved that it knows the token
MEMBER_LIMIT = 16 * 2**20
OUTBOX_BYTES = MEMBER_LIMIT  # unsent bytes at which a peer counts as lost
_READ_BYTES = 1 << 12
_LENGTH = struct.Struct("<I")
_FD = struct.Struct("i")
_FDS_MAX = 4
_ANCILLARY_BYTES = socket.CMSG_SPACE(_FDS_MAX * _FD.size)
_CREDENTIALS = struct.Struct("3i")

T = TypeVar("T")


def frame(body: bytes) -> bytes:
    """Return the body as a frame."""
    return _LENGTH.pack(len(body)) + body


class FrameBuffer(bytearray):
    """Received bytes, cut into frames. Add bytes with `+=`.

    It is a bytearray, so that it costs nothing to see that there are no bytes.
    """

    limit: int

    @classmethod
    def with_limit(cls, limit: int) -> "FrameBuffer":
        """Return a buffer that accepts bodies of 1 to `limit` bytes."""
        buffer = cls()
        buffer.limit = limit
        return buffer

    def has_frame(self) -> bool:
        """Return whether a whole frame has been received."""
        size = len(self)
        return size >= _LENGTH.size and size >= _LENGTH.size + _LENGTH.unpack_from(self)[0]

    def next_body(self) -> bytes | None:
        """Remove and return the body of the next frame; None if it isn't complete yet.

        Raises ProtocolError if the announced length is above the limit.
        """
        if len(self) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self)
        if not 0 < length <= self.limit:
            raise ProtocolError(f"a frame must have 1 to {self.limit} bytes, got {length}")
        end = _LENGTH.size + length
        if len(self) < end:
            return None
        body = bytes(self[_LENGTH.size : end])
        del self[:end]
        return body

    def missing(self) -> int:
        """Return how many bytes to receive next, at least, to complete the next frame."""
        if len(self) < _LENGTH.size:
            return _LENGTH.size - len(self)
        return int(_LENGTH.size + _LENGTH.unpack_from(self)[0]) - len(self)


class _Unsent(NamedTuple):
    """The rest of a message that the socket didn't take, and the descriptors that go with it."""

    data: memoryview  # not bytes: a long message is sent in many pieces, without copying the rest
    fds: list[int]  # duplicates, which the channel closes


class Channel(Generic[T]):
    """Sends messages, and receives those that `decode` knows."""

    def __init__(self, sock: socket.socket, decode: Callable[[bytes], T], limit: int) -> None:
        self._sock = sock
        self._decode = decode
        self.is_local = sock.family == socket.AF_UNIX
        """Whether the peer is on this host and descriptors can be sent to it."""
        self.session = b""
        """Identifies this connection on both sides; empty before the handshake is complete."""
        self._frames = FrameBuffer.with_limit(limit)
        self._fds: deque[int] = deque()
        self._fds_max = 0  # an unauthenticated peer may send none
        self._is_trusted = False
        self._outbox: deque[_Unsent] = deque()
        self._outbox_bytes = 0
        self._broken_by = ""  # why sending failed; receiving fails with the same reason
        self.on_blocked: Callable[[], None] = lambda: None
        """Called when the outbox is no longer empty: the owner calls `flush` when it can."""

    def fileno(self) -> int:
        """Return the descriptor of the socket, for a selector."""
        return self._sock.fileno()

    @property
    def remote_host(self) -> str:
        """The IP address of the other end; empty if it has none, or the OS doesn't know it."""
        with suppress(OSError):
            return "" if self.is_local else str(self._sock.getpeername()[0])
        return ""

    @property
    def peer_pid(self) -> int | None:
        """The process at the other end, if it is on this host and the OS knows it."""
        with suppress(OSError):
            credentials = self._sock.getsockopt(
                socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size
            )
            return _CREDENTIALS.unpack(credentials)[0] or None
        return None

    def trust(self, decode: Callable[[bytes], T], session: bytes = b"") -> None:
        """Accept longer frames, descriptors, and the messages that `decode` knows from now on."""
        self._decode = decode
        self.session = session
        self._frames.limit = MEMBER_LIMIT
        self._fds_max = _FDS_MAX
        self._is_trusted = True

    # ----------------------------------------------------------------------------------- sending

    def send(self, message: object, *fds: int) -> None:
        """Send a message; raises PeerLost if the peer is gone or has stopped reading.

        The caller closes the descriptors.
        """
        if fds and not self.is_local:
            raise InternalError("descriptors can be sent over Unix sockets only")
        data = frame(encode(message))
        sent = 0 if self._outbox else self._try_send(data, fds)
        if sent < len(data):
            unsent = memoryview(data)[sent:]
            if self._sock.gettimeout() != 0:
                while unsent:
                    unsent = unsent[self._try_send(unsent, ()) :]
                return
            if self._outbox and self._outbox_bytes + len(unsent) > OUTBOX_BYTES:
                raise PeerLost(f"it has not read the last {self._outbox_bytes} bytes sent to it")
            self._outbox.append(_Unsent(unsent, [] if sent else _duplicates(fds)))
            self._outbox_bytes += len(unsent)
            self.on_blocked()

    def flush(self) -> bool:
        """Send what the socket takes; return whether the outbox is empty. Raises PeerLost."""
        while self._outbox:
            data, fds = self._outbox[0]
            sent = self._try_send(data, fds)
            if not sent:
                return False
            self._outbox_bytes -= sent
            _close_all(fds)
            if sent < len(data):
                self._outbox[0] = _Unsent(data[sent:], [])
            else:
                self._outbox.popleft()
        return True

    def _try_send(self, data: bytes | memoryview, fds: tuple[int, ...] | list[int]) -> int:
        try:
            if fds:
                return socket.send_fds(self._sock, [data], list(fds))
            return self._sock.send(data)
        except BlockingIOError:
            return 0
        except OSError as error:
            self._broken_by = str(self._failure(error))
            # A variable for it would be a reference cycle: the slot of a lost worker would stay.
            raise self._failure(error) from None

    def _failure(self, error: OSError) -> PeerLost | ProtocolError:
        """Return what an error means: certificates that are wrong now will be wrong next time."""
        if isinstance(error, TlsError) and not self._is_trusted:
            return ProtocolError(str(error))
        return PeerLost(f"the connection broke: {error.strerror or error}")

    # --------------------------------------------------------------------------------- receiving

    def receive(self) -> T:
        """Wait for the next message; raises PeerLost when the peer is gone."""
        while not self._frames or (body := self._frames.next_body()) is None:
            self._read()
        return self._decode(body)

    def receive_last(self) -> T:
        """Wait for the next message, and receive nothing behind it; call `detach` then."""
        while (body := self._frames.next_body()) is None:
            space = memoryview(bytearray(self._frames.missing()))
            try:
                count = self._sock.recv_into(space)  # `recv` of TLS may return more
            except OSError as error:
                raise self._failure(error) from None
            if not count:
                raise PeerLost("the connection was closed")
            self._frames += space[:count]
        return self._decode(body)

    def receive_nowait(self) -> Iterator[T]:
        """Yield the complete messages that have arrived; read once if there is none yet.

        Each is decoded when it is asked for, so handling one can make the next ones legal.
        """
        if not self._frames or not self._frames.has_frame():
            self._read()
        while self._frames and (body := self._frames.next_body()) is not None:
            yield self._decode(body)

    def wait_readable(self, timeout_s: float) -> bool:
        """Return whether there is something to receive within this time."""
        if self._frames and self._frames.has_frame():
            return True
        return bool(wait_ready([self.fileno()], [], timeout_s))

    def take_fd(self) -> int:
        """Return the next descriptor that arrived; the caller closes it."""
        if not self._fds:
            raise ProtocolError("expected shared memory with a message, got none")
        return self._fds.popleft()

    def detach(self) -> socket.socket:
        """Return the socket, which carries no messages from now on; the caller closes it."""
        if self._frames or self._outbox:
            raise ProtocolError("got or left bytes behind the last message of a connection")
        return self._sock

    def close(self) -> None:
        """Close the connection, and all descriptors that were not taken or not sent."""
        self._sock.close()
        _close_all(self._fds)
        self._fds.clear()
        for unsent in self._outbox:
            _close_all(unsent.fds)
        self._outbox.clear()
        self._outbox_bytes = 0

    def _read(self) -> None:
        try:
            if self.is_local:
                data, ancillary, _, _ = self._sock.recvmsg(_READ_BYTES, _ANCILLARY_BYTES)
                if ancillary:
                    self._take_descriptors(ancillary)
            else:
                data = self._sock.recv(_READ_BYTES)
        except BlockingIOError:
            if self._broken_by:  # everything that the peer sent before has been received
                raise PeerLost(self._broken_by) from None
            return
        except ConnectionResetError:
            raise PeerLost("the connection was closed") from None
        except OSError as error:
            raise self._failure(error) from None
        if not data:
            raise PeerLost("the connection was closed")
        self._frames += data

    def _take_descriptors(self, ancillary: list[tuple[int, int, bytes]]) -> None:
        for level, kind, data in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                count = len(data) // _FD.size
                self._fds.extend(fd for (fd,) in _FD.iter_unpack(data[: count * _FD.size]))
        if len(self._fds) > self._fds_max:
            raise ProtocolError("got more shared memory than any message needs")


def wait_ready(reads: list[int], writes: list[int], timeout_s: float | None) -> set[int]:
    """Wait until a descriptor can be read or written, or for this long; return those that can."""
    # Only select() resolves less than a millisecond, but it can't take large descriptors.
    if max([*reads, *writes], default=0) < 1024:
        ready = select.select(reads, writes, [], timeout_s)
        return {*ready[0], *ready[1]}
    poll = select.poll()
    for fd in {*reads, *writes}:
        poll.register(fd, select.POLLIN * (fd in reads) | select.POLLOUT * (fd in writes))
    return {fd for fd, _ in poll.poll(None if timeout_s is None else timeout_s * 1000)}


def _duplicates(fds: tuple[int, ...]) -> list[int]:
    found: list[int] = []
    try:
        found.extend(os.dup(fd) for fd in fds)
    except OSError as error:  # too many open files
        _close_all(found)
        raise PeerLost(f"cannot send to it: {error.strerror}") from None
    return found


def _close_all(fds: "list[int] | deque[int]") -> None:
    for fd in fds:
        os.close(fd)
