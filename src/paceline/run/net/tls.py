# SPDX-License-Identifier: BSD-3-Clause
"""TLS for connections over TCP: contexts made from files, and a socket for both kinds of mode.

The server has a certificate and its key. If it also has the certificate of a CA, TLS is mutual:
clients must present a certificate of that CA. Clients accept a server whose certificate is of the
CA and names the host that they connect to; without a CA, only the server's own certificate itself.

There is no separate handshake: OpenSSL does it inside the first calls of `send` and `recv`, so it
never blocks a non-blocking socket. `TlsSocket` behaves like a plain socket wherever Paceline uses
one; what differs is `has_unread`.
"""

import re
import socket
import ssl
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.errors import SpecError

__all__ = [
    "TlsError",
    "TlsFiles",
    "TlsSocket",
    "check_files",
    "client_context",
    "server_context",
    "wrap_client",
    "wrap_server",
]

_CERTIFICATE = re.compile(r"-----BEGIN CERTIFICATE-----.*?-----END CERTIFICATE-----", re.DOTALL)
_HINTS = {
    "TLSV13_ALERT_CERTIFICATE_REQUIRED": "the server requires a certificate and its key",
    "TLSV1_ALERT_UNKNOWN_CA": "the peer doesn't trust our certificate",
    "SSLV3_ALERT_BAD_CERTIFICATE": "the peer doesn't trust our certificate",
    "SSLV3_ALERT_CERTIFICATE_EXPIRED": "our certificate has expired",
    "PEER_DID_NOT_RETURN_A_CERTIFICATE": "the client has no certificate",
    "WRONG_VERSION_NUMBER": "the peer doesn't use TLS",
    "KEY_VALUES_MISMATCH": "the key doesn't belong to the certificate",
}


class TlsError(OSError):
    """The connection isn't secure, for this reason."""


@dataclass(frozen=True)
class TlsFiles:
    """Paths of PEM files; "": none. Files are read when a context is made."""

    cert: str = ""  # of this process: its certificate, or that and those of its issuers
    key: str = ""  # belongs to `cert`
    ca: str = ""  # certificates that sign those of peers


def server_context(files: TlsFiles) -> ssl.SSLContext:
    """Return the context of a server; raises SpecError if a file is unusable."""
    if not (files.cert and files.key):
        raise SpecError("a server with TLS needs a certificate and its key")
    context = _new_context(ssl.PROTOCOL_TLS_SERVER)
    context.num_tickets = 0  # sessions are never resumed
    _load_own(context, files)
    if files.ca:
        context.verify_mode = ssl.CERT_REQUIRED
        _load_ca(context, files.ca)
    return context


def client_context(files: TlsFiles) -> ssl.SSLContext:
    """Return the context of a client; raises SpecError if a file is unusable."""
    context = _new_context(ssl.PROTOCOL_TLS_CLIENT)
    if files.ca:
        _load_ca(context, files.ca)
        if files.cert or files.key:
            _load_own(context, files)
    elif files.cert:
        # Trust this very certificate, whatever host it names and whatever signed it. Its issuers,
        # which may be in the same file, have signed others as well.
        context.check_hostname = False
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        _trust_only(context, files.cert)
    else:
        raise SpecError("a client with TLS needs the certificate of the CA or of the server")
    return context


def check_files(files: TlsFiles, host: str) -> None:
    """Raise SpecError unless a client with these files can connect to a server with them.

    `host`: where clients connect to. It does a real handshake, in memory.
    """
    at_server, at_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    server = server_context(files).wrap_bio(at_server, at_client, server_side=True)
    client = client_context(files).wrap_bio(at_client, at_server, server_hostname=host)
    try:
        for end in (client, server, client, server):
            with suppress(ssl.SSLWantReadError):
                end.do_handshake()
    except ssl.SSLError as error:
        raise SpecError(f"connections to {host} would fail: {_explain(error)}") from None


def wrap_client(sock: socket.socket, context: ssl.SSLContext, host: str) -> "TlsSocket":
    """Return a TLS socket in place of a connected one; `host`: where it is connected to."""
    return _wrapped(context.wrap_socket(sock, do_handshake_on_connect=False, server_hostname=host))


def wrap_server(sock: socket.socket, context: ssl.SSLContext) -> "TlsSocket":
    """Return a TLS socket in place of an accepted one; raises OSError if the client is gone."""
    return _wrapped(context.wrap_socket(sock, server_side=True, do_handshake_on_connect=False))


class TlsSocket(ssl.SSLSocket):
    """A TLS connection with the errors of a plain socket, and TlsError if it isn't secure."""

    def has_unread(self) -> bool:
        """Return whether it holds received bytes, which a selector doesn't know about."""
        return self.pending() > 0

    def send(self, data: Any, flags: int = 0) -> int:
        """Send all of these bytes; a socket that may not block raises BlockingIOError instead.

        Then a part of them may have been sent, and the next call must be with the same bytes.
        """
        try:
            return super().send(data, flags)
        except ssl.SSLError as error:
            raise _plain(error) from None

    def recv(self, buflen: int = 1024, flags: int = 0) -> bytes:
        """Receive a part of this many bytes, and all others that a selector doesn't know about."""
        try:
            data = super().recv(buflen, flags)
            unread = self.pending()
            return data + super().recv(unread) if unread else data
        except ssl.SSLError as error:
            raise _plain(error) from None

    def recv_into(self, buffer: Any, nbytes: int | None = None, flags: int = 0) -> int:
        """Receive into this memory. See `has_unread`."""
        try:
            return super().recv_into(buffer, nbytes, flags)
        except ssl.SSLError as error:
            raise _plain(error) from None


def _new_context(protocol: int) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.sslsocket_class = TlsSocket
    return context


def _wrapped(sock: ssl.SSLSocket) -> TlsSocket:
    assert isinstance(sock, TlsSocket)
    return sock


def _load_own(context: ssl.SSLContext, files: TlsFiles) -> None:
    def on_encrypted_key() -> str:
        raise SpecError(f"the TLS key {files.key} is encrypted; use one without a passphrase")

    if not (files.cert and files.key):
        raise SpecError("give a TLS certificate together with its key")
    _read(files.cert)
    _read(files.key)
    try:
        context.load_cert_chain(files.cert, files.key, on_encrypted_key)
    except ssl.SSLError as error:
        raise SpecError(
            f"cannot use the TLS certificate {files.cert} with the key {files.key}: "
            f"{_explain(error)}"
        ) from None


def _load_ca(context: ssl.SSLContext, path: str) -> None:
    _read(path)
    try:
        context.load_verify_locations(path)
    except ssl.SSLError as error:
        raise SpecError(f"cannot use the TLS CA {path}: {_explain(error)}") from None


def _trust_only(context: ssl.SSLContext, path: str) -> None:
    found = _CERTIFICATE.search(_read(path))
    try:
        context.load_verify_locations(cadata=found[0] if found else "")
    except (ssl.SSLError, ValueError):
        raise SpecError(f"there is no certificate in {path}; expected a PEM file") from None


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="ascii", errors="replace")
    except OSError as error:
        raise SpecError(f"cannot read the TLS file {path}: {error.strerror}") from None


def _plain(error: ssl.SSLError) -> OSError:
    """Return the error that a plain socket would raise, or why the connection isn't secure."""
    if isinstance(error, ssl.SSLWantReadError | ssl.SSLWantWriteError):
        return BlockingIOError()
    if isinstance(error, ssl.SSLEOFError | ssl.SSLZeroReturnError):
        return ConnectionResetError("the connection was closed")
    return TlsError(f"TLS failed: {_explain(error)}")


def _explain(error: ssl.SSLError) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"the certificate is invalid: {error.verify_message}"
    reason = error.reason or str(error)
    if "PEM lib" in reason:
        return "one of them isn't a PEM file"
    return _HINTS.get(reason, reason.replace("_", " ").lower())
