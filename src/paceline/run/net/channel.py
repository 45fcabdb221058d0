# SPDX-License-Identifier: BSD-3-Clause
"""The control connection: frames, mutual authentication, descriptors that travel along.

A frame is a length of four bytes, little end first, and a body of that many. A length beyond the
limit is refused before a byte of the body is read, and the limit is small until the peer has proved
that it knows the token. Addresses are "unix:/path", "unix:@name" (no file, gone with its owner) or
"tcp:host:port"; descriptors travel over Unix sockets only.
"""

import hmac
import os
import secrets
import select
import socket
import struct
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Generic, TypeVar

from paceline.errors import PeerLost, ProtocolError, SpecError
from paceline.run.net.messages import (
    PROTOCOL,
    Challenge,
    FromServer,
    Hello,
    Proof,
    Refused,
    decode_server,
    encode,
)

__all__ = [
    "MEMBER_LIMIT",
    "STRANGER_LIMIT",
    "Challenger",
    "Channel",
    "Frames",
    "accept",
    "connect",
    "listen",
    "new_token",
]

STRANGER_LIMIT = 256
MEMBER_LIMIT = 16 * 2**20
_LENGTH = struct.Struct("<I")
_READ_BYTES = 1 << 12
_FD = struct.Struct("i")
_FDS_MAX = 4
_ALONG_BYTES = socket.CMSG_SPACE(_FDS_MAX * _FD.size)

T = TypeVar("T")


class Frames:
    """Cuts a stream of bytes into frames."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._bytes = bytearray()

    def feed(self, data: bytes) -> None:
        """More bytes have come."""
        self._bytes += data

    def has_one(self) -> bool:
        """Whether there is a whole frame."""
        size = len(self._bytes)
        return size >= _LENGTH.size and size >= _LENGTH.size + _LENGTH.unpack_from(self._bytes)[0]

    def cut(self) -> bytes | None:
        """The next frame, None if it is not whole yet; raises ProtocolError if it is too long."""
        if len(self._bytes) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._bytes)
        if not 0 < length <= self.limit:
            raise ProtocolError(
                f"a frame must have 1 to {self.limit} bytes, one of {length} was announced"
            )
        end = _LENGTH.size + length
        if len(self._bytes) < end:
            return None
        body = bytes(self._bytes[_LENGTH.size : end])
        del self._bytes[:end]
        return body


class Channel(Generic[T]):
    """One end of a connection: sends messages, and receives those that `decode` knows."""

    def __init__(self, sock: socket.socket, decode: Callable[[bytes], T], limit: int) -> None:
        self._sock = sock
        self.decode = decode
        self._frames = Frames(limit)
        self._fds: deque[int] = deque()
        self._fds_max = 0  # a stranger has nothing to send along
        self.is_local = sock.family == socket.AF_UNIX  # so descriptors can come along

    def fileno(self) -> int:
        """The descriptor of the socket, for a selector."""
        return self._sock.fileno()

    def option(self, level: int, name: int, size: int) -> bytes:
        """An option of the socket; raises OSError where there is none."""
        return self._sock.getsockopt(level, name, size)

    def trust(self, decode: Callable[[bytes], T]) -> None:
        """The peer is known now: longer frames may come, other messages, and memory with them."""
        self.decode = decode
        self._frames.limit = MEMBER_LIMIT
        self._fds_max = _FDS_MAX

    def send(self, message: object, *fds: int) -> None:
        """Send a message; raises PeerLost if the peer is gone, or does not read."""
        body = encode(message)
        data = _LENGTH.pack(len(body)) + body
        try:
            if fds:
                sent = socket.send_fds(self._sock, [data], list(fds))
                data = data[sent:]
            if data:
                self._sock.sendall(data)
        except OSError as error:
            raise PeerLost(f"the connection broke: {error.strerror or error}") from None

    def receive(self) -> T:
        """Wait for the next message; raises PeerLost when the peer is gone."""
        while (body := self._frames.cut()) is None:
            self._read()
        return self.decode(body)

    def receive_nowait(self) -> Iterator[T]:
        """The messages that are there after one read, each cut when it is asked for.

        So the first may be what makes the next ones legal.
        """
        self._read()
        while (body := self._frames.cut()) is not None:
            yield self.decode(body)

    def wait_readable(self, seconds: float) -> bool:
        """Whether something is there before so many seconds have passed."""
        if self._frames.has_one():
            return True
        # Only select() takes less than a millisecond, but it cannot have large descriptors.
        if self.fileno() < 1024:
            return bool(select.select([self._sock], [], [], seconds)[0])
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        return bool(poll.poll(seconds * 1000))

    def take_fd(self) -> int:
        """The next descriptor that came along; it is the caller's to close."""
        if not self._fds:
            raise ProtocolError("a message came without the memory that belongs to it")
        return self._fds.popleft()

    def close(self) -> None:
        """Close the connection, and whatever came along and was not taken."""
        self._sock.close()
        while self._fds:
            os.close(self._fds.popleft())

    def _read(self) -> None:
        try:
            if self.is_local:
                data, along, _, _ = self._sock.recvmsg(_READ_BYTES, _ALONG_BYTES)
                if along:
                    self._take_along(along)
            else:
                data = self._sock.recv(_READ_BYTES)
        except BlockingIOError:
            return
        except ConnectionResetError:
            raise PeerLost("the connection was closed") from None
        except OSError as error:
            raise PeerLost(f"the connection broke: {error.strerror or error}") from None
        if not data:
            raise PeerLost("the connection was closed")
        self._frames.feed(data)

    def _take_along(self, along: list[tuple[int, int, bytes]]) -> None:
        for level, kind, data in along:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                count = len(data) // _FD.size
                self._fds.extend(fd for (fd,) in _FD.iter_unpack(data[: count * _FD.size]))
        if len(self._fds) > self._fds_max:
            raise ProtocolError("more memory came along than belongs to any message")


# ----------------------------------------------------------------------------- knowing each other


def new_token() -> str:
    """A secret for one run."""
    return secrets.token_hex(32)


def _prove(token: str, role: bytes, worker_nonce: bytes, server_nonce: bytes) -> bytes:
    return hmac.digest(token.encode(), role + worker_nonce + server_nonce, "sha256")


class Challenger:
    """The server's half of getting to know each other, message by message."""

    def __init__(self, token: str) -> None:
        self._token = token
        self._nonce = secrets.token_bytes(32)
        self._theirs: bytes | None = None

    def answer(self, hello: Hello) -> Challenge:
        """Prove to the stranger who we are, and ask for the same."""
        if hello.protocol != PROTOCOL:
            raise ProtocolError(f"it speaks protocol {hello.protocol}, the run speaks {PROTOCOL}")
        if self._theirs is not None:
            raise ProtocolError("it said hello twice")
        self._theirs = hello.nonce
        return Challenge(self._nonce, _prove(self._token, b"server", hello.nonce, self._nonce))

    def check(self, proof: Proof) -> None:
        """Raise ProtocolError unless the stranger knows the token."""
        if self._theirs is None:
            raise ProtocolError("it wants to prove itself before it has said hello")
        expected = _prove(self._token, b"worker", self._theirs, self._nonce)
        if not hmac.compare_digest(expected, proof.proof):
            raise ProtocolError("it has another token")


def connect(address: str, token: str, patience_s: float | None = None) -> Channel[FromServer]:
    """Reach the server and make sure that both know the token; raises PeerLost if it is not there.

    Raises ProtocolError where the server, or what answers in its place, does not know it. With
    `patience_s` a server that lets us wait for so long, now or later, is not there.
    """
    family, target = _parse(address)
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.settimeout(patience_s)
    try:
        sock.connect(target)
    except OSError as error:
        sock.close()
        raise PeerLost(f"no server at {address}: {error.strerror or error}") from None
    _no_delay(sock)
    channel: Channel[FromServer] = Channel(sock, decode_server, STRANGER_LIMIT)
    try:
        _introduce(channel, address, token)
    except BaseException:
        channel.close()
        raise
    channel.trust(decode_server)
    return channel


def _introduce(channel: Channel[FromServer], address: str, token: str) -> None:
    """The worker's half of getting to know each other."""
    nonce = secrets.token_bytes(32)
    channel.send(Hello(PROTOCOL, nonce))
    challenge = channel.receive()
    if isinstance(challenge, Refused):
        raise ProtocolError(f"the server at {address} refuses us: {challenge.reason}")
    if not isinstance(challenge, Challenge):
        raise ProtocolError(f"expected a challenge from {address}, got {challenge!r}")
    expected = _prove(token, b"server", nonce, challenge.nonce)
    if not hmac.compare_digest(expected, challenge.proof):
        raise ProtocolError(f"the server at {address} has another token")
    channel.send(Proof(_prove(token, b"worker", nonce, challenge.nonce)))


def listen(address: str) -> socket.socket:
    """Listen there, without blocking; raises SpecError if that cannot be."""
    family, target = _parse(address)
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        if family != socket.AF_UNIX:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(target)
        sock.listen(1024)
        sock.setblocking(False)
    except OSError as error:
        sock.close()
        raise SpecError(f"cannot listen at {address}: {error.strerror or error}") from None
    return sock


def accept(listener: socket.socket, decode: Callable[[bytes], T]) -> Channel[T] | None:
    """Take the next stranger in, without blocking; None if there is none after all."""
    with suppress(OSError):
        sock, _ = listener.accept()
        sock.setblocking(False)
        _no_delay(sock)
        return Channel(sock, decode, STRANGER_LIMIT)
    return None


def _no_delay(sock: socket.socket) -> None:
    if sock.family != socket.AF_UNIX:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


def _parse(address: str) -> tuple[socket.AddressFamily, str | bytes | tuple[str, int]]:
    kind, _, rest = address.partition(":")
    if kind == "unix" and rest.startswith("@"):
        return socket.AF_UNIX, b"\0" + rest[1:].encode()
    if kind == "unix" and rest:
        return socket.AF_UNIX, rest
    host, colon, port = rest.rpartition(":")
    if kind == "tcp" and colon and port.isdecimal() and int(port) < 2**16:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return family, (host.strip("[]"), int(port))
    raise SpecError(f"an address must be unix:/path, unix:@name or tcp:host:port, got {address!r}")
