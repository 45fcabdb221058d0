# SPDX-License-Identifier: BSD-3-Clause
"""Mutual authentication: both sides prove that they know the run's token, which is never sent.

The client sends a nonce; the server answers with its own nonce and a proof (HMAC-SHA256 over its
role and both nonces); the client checks it and sends its proof. The role is part of the proof, so
neither side can be made to produce the other's by reflecting messages.

The server's nonce names the session. Each connection has a handshake of its own. The client's proof
includes what the connection is for and, for a data connection, the session of the control
connection that it belongs to, so it can't be moved to another.
"""

import hmac
import secrets
import socket
import ssl
from contextlib import suppress

from paceline.errors import PeerLost, ProtocolError
from paceline.run.net.address import dial, host_of, is_tcp
from paceline.run.net.channel import STRANGER_LIMIT, Channel
from paceline.run.net.connection_messages import Kind
from paceline.run.net.messages import (
    PROTOCOL,
    Challenge,
    DataAttached,
    FromServer,
    Hello,
    Proof,
    Refused,
    decode_server,
)
from paceline.run.net.tls import wrap_client

__all__ = [
    "Authenticator",
    "Challenger",
    "connect",
    "connect_as_host",
    "connect_data",
    "connect_hosted",
    "new_token",
    "open_socket",
]


def new_token() -> str:
    """Return a new secret for one run."""
    return secrets.token_hex(32)


def _proof(token: str, role: bytes, client_nonce: bytes, server_nonce: bytes) -> bytes:
    return hmac.digest(token.encode(), role + client_nonce + server_nonce, "sha256")


def _client_role(kind: Kind, session: bytes) -> bytes:
    """Return the role of a client: what its connection is for, and the session it belongs to."""
    return kind.encode() + session


class Challenger:
    """The server's half of the handshake with one client."""

    def __init__(self, token: str) -> None:
        self._token = token
        self._nonce = secrets.token_bytes(32)
        self._client_nonce: bytes | None = None

    @property
    def session(self) -> bytes:
        """The session that a control connection opens."""
        return self._nonce

    def answer(self, hello: Hello) -> Challenge:
        """Return the server's proof and nonce; raises ProtocolError."""
        if hello.protocol != PROTOCOL:
            raise ProtocolError(
                f"expected version {PROTOCOL} of the protocol, got {hello.protocol}; use the same "
                "release of Paceline in all processes"
            )
        if self._client_nonce is not None:
            raise ProtocolError("Hello was sent twice")
        self._client_nonce = hello.nonce
        return Challenge(self._nonce, _proof(self._token, b"server", hello.nonce, self._nonce))

    def check(self, proof: Proof) -> None:
        """Raise ProtocolError unless the client knows the token."""
        if self._client_nonce is None:
            raise ProtocolError("Proof was sent before Hello")
        role = _client_role(proof.kind, proof.session)
        expected = _proof(self._token, role, self._client_nonce, self._nonce)
        if not hmac.compare_digest(expected, proof.proof):
            raise ProtocolError("the token is wrong")


class Authenticator:
    """The client's half of the handshake."""

    def __init__(
        self, address: str, token: str, kind: Kind = "control", of_session: bytes = b""
    ) -> None:
        """`address`: of the server, for error messages.

        `of_session`: that a "data" or "hosted" connection belongs to.
        """
        self._address = address
        self._token = token
        self._kind: Kind = kind
        self._of_session = of_session
        self._nonce = secrets.token_bytes(32)
        self.session = b""
        """The session that this connection opens; known once the server was proved."""

    def hello(self) -> Hello:
        """Return the first message."""
        return Hello(PROTOCOL, self._nonce)

    def prove(self, challenge: FromServer) -> Proof:
        """Check the server's proof and return ours; raises ProtocolError."""
        if isinstance(challenge, Refused):
            raise ProtocolError(
                f"the server at {self._address} refused the connection: {challenge.reason}"
            )
        if not isinstance(challenge, Challenge):
            raise ProtocolError(f"expected a challenge from {self._address}, got {challenge!r}")
        expected = _proof(self._token, b"server", self._nonce, challenge.nonce)
        if not hmac.compare_digest(expected, challenge.proof):
            raise ProtocolError(f"the server at {self._address} has a different token")
        self.session = challenge.nonce
        role = _client_role(self._kind, self._of_session)
        proof = _proof(self._token, role, self._nonce, challenge.nonce)
        return Proof(proof, self._of_session, self._kind)


def open_socket(
    address: str, timeout_s: float | None = None, tls: ssl.SSLContext | None = None
) -> socket.socket:
    """Connect to the address; a TCP connection gets TLS if there is a context for it.

    Raises PeerLost if no server listens there. See `dial` for the timeout.
    """
    sock = dial(address, timeout_s)
    if tls is None or not is_tcp(address):
        return sock
    try:
        return wrap_client(sock, tls, host_of(address))
    except OSError as error:
        sock.close()
        raise PeerLost(f"lost the server at {address}: {error.strerror or error}") from None


def connect(
    address: str, token: str, timeout_s: float | None = None, tls: ssl.SSLContext | None = None
) -> Channel[FromServer]:
    """Connect to the server and authenticate both sides; raises PeerLost if it isn't there.

    Raises ProtocolError if the server refuses us or doesn't know the token. The timeout applies to
    the handshake and to all later messages: a server that doesn't answer in time counts as lost.
    """
    return _connect(address, Authenticator(address, token), timeout_s, tls)


def connect_data(
    address: str,
    token: str,
    session: bytes,
    timeout_s: float | None = None,
    tls: ssl.SSLContext | None = None,
) -> socket.socket:
    """Open the data connection of a session; raises PeerLost or ProtocolError as `connect` does."""
    channel = _connect(address, Authenticator(address, token, "data", session), timeout_s, tls)
    try:
        _check_attached(address, channel.receive_last())
        return channel.detach()
    except BaseException:
        channel.close()
        raise


def connect_as_host(
    address: str, token: str, tls: ssl.SSLContext | None = None
) -> Channel[FromServer]:
    """Connect to the server as the agent of a host; raises as `connect` does."""
    return _connect(address, Authenticator(address, token, "host"), None, tls)


def connect_hosted(
    address: str, token: str, session: bytes, tls: ssl.SSLContext | None = None
) -> Channel[FromServer]:
    """Open a control connection for a worker that the agent of this session serves."""
    return _connect(address, Authenticator(address, token, "hosted", session), None, tls)


def _check_attached(address: str, answer: FromServer) -> None:
    if isinstance(answer, Refused):
        raise ProtocolError(f"the server at {address} refused the data connection: {answer.reason}")
    if not isinstance(answer, DataAttached):
        raise ProtocolError(f"expected {address} to attach the connection, got {answer!r}")


def _connect(
    address: str,
    authenticator: Authenticator,
    timeout_s: float | None,
    tls: ssl.SSLContext | None,
) -> Channel[FromServer]:
    sock = open_socket(address, timeout_s, tls)
    channel = Channel(sock, decode_server, STRANGER_LIMIT)
    try:
        with suppress(PeerLost):  # a server that refused us has said why, which is received next
            channel.send(authenticator.hello())
        channel.send(authenticator.prove(channel.receive()))
    except BaseException:
        channel.close()
        raise
    channel.trust(decode_server, authenticator.session)
    return channel
