# SPDX-License-Identifier: BSD-3-Clause
"""Addresses of a run, and the sockets behind them.

An address is "unix:/path", "unix:@name" (an abstract socket, which has no file and disappears with
its process) or "tcp:host:port".
"""

import errno
import hmac
import ipaddress
import socket

from paceline.errors import PeerLost, SpecError

__all__ = [
    "NobodyListens",
    "accept",
    "bind",
    "dial",
    "host_of",
    "is_loopback",
    "is_tcp",
    "listen",
    "listen_on",
    "local_twin",
    "of_socket",
    "tcp_address",
]

BACKLOG = 1024
KEEP_ALIVE_S = 5  # between questions whether an idle host is still there
NO_RESOURCES = errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM
VANISHED_S = 30  # without an answer, a host counts as gone


class NobodyListens(PeerLost):
    """The host of a server is there, but no process listens at the server's address."""


def is_tcp(address: str) -> bool:
    """Return whether other hosts may reach the address."""
    return address.startswith("tcp:")


def host_of(address: str) -> str:
    """Return the host of a TCP address; raises SpecError if it isn't one."""
    _, target = _parse(address)
    if not isinstance(target, tuple):
        raise SpecError(f"expected an address such as tcp:host:port, got {address!r}")
    return target[0]


def is_loopback(address: str) -> bool:
    """Return whether only this host can reach the address; False if that isn't certain."""
    if not is_tcp(address):
        return True
    host = host_of(address)
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:  # it is a name
        return False


def tcp_address(text: str) -> str:
    """Return the address that a user writes as HOST:PORT; raises SpecError if it isn't one."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or int(port) >= 2**16:
        raise SpecError(f"an address must be HOST:PORT, such as 10.0.0.5:29400, got {text!r}")
    return f"tcp:{text}"


def local_twin(address: str, token: str) -> str:
    """Return the address at which a server with a TCP address is reached from its own host.

    Only processes that know the token can work it out. They share memory with the server.
    """
    name = hmac.digest(token.encode(), b"twin of " + address.encode(), "sha256").hex()
    return f"unix:@paceline-{name[:32]}"


def of_socket(sock: socket.socket, address: str) -> str:
    """Return the address of a bound socket; the given one if it isn't TCP with port 0."""
    if not is_tcp(address) or not address.endswith(":0"):
        return address
    return f"{address.removesuffix(':0')}:{sock.getsockname()[1]}"


def bind(address: str) -> socket.socket:
    """Return a socket that has the address, but doesn't listen; raises SpecError if it can't.

    While it is open, no other process can have the address.
    """
    family, target = _parse(address)
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        if family != socket.AF_UNIX:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(target)
    except OSError as error:
        sock.close()
        raise SpecError(f"cannot listen at {address}: {error.strerror or error}") from None
    return sock


def listen_on(sock: socket.socket) -> socket.socket:
    """Let a socket that has its address listen, without blocking; return it.

    If another process listened on it before, pending connections are kept and accepted here.
    """
    sock.listen(BACKLOG)
    sock.setblocking(False)
    return sock


def listen(address: str) -> socket.socket:
    """Return a non-blocking socket that listens at the address; raises SpecError if it can't."""
    return listen_on(bind(address))


def accept(listening: socket.socket) -> socket.socket | None:
    """Return the next incoming connection, non-blocking; None if the client has given up.

    Raises OSError if this process can't have another connection now.
    """
    try:
        sock, _ = listening.accept()
    except OSError as error:
        if error.errno in NO_RESOURCES:
            raise
        return None
    sock.setblocking(False)
    _set_options(sock)
    return sock


def dial(address: str, timeout_s: float | None = None) -> socket.socket:
    """Connect to the address; raises PeerLost if that fails, NobodyListens if it is refused.

    The timeout, if any, also applies to everything that is done with the socket later.
    """
    family, target = _parse(address)
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.settimeout(timeout_s)
    try:
        sock.connect(target)
    except OSError as error:
        sock.close()
        kind = NobodyListens if isinstance(error, ConnectionRefusedError) else PeerLost
        raise kind(f"no server at {address}: {error.strerror or error}") from None
    _set_options(sock)
    return sock


def _set_options(sock: socket.socket) -> None:
    """Have the OS find out within half a minute that a host has vanished."""
    if sock.family != socket.AF_UNIX:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEP_ALIVE_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEP_ALIVE_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, VANISHED_S // KEEP_ALIVE_S - 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, VANISHED_S * 1000)


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
