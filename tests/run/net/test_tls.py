# SPDX-License-Identifier: BSD-3-Clause
"""TLS made from files: bad files are named before training, and sockets behave like plain ones."""

import select
import socket
import ssl
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from certificates import Authority, issue
from paceline.errors import SpecError
from paceline.run.net.tls import (
    TlsError,
    TlsFiles,
    check_files,
    client_context,
    server_context,
    wrap_client,
    wrap_server,
)

HOST = "127.0.0.1"
RECORD_BYTES = 1 << 14  # the most that TLS sends as one unit


@pytest.fixture
def junk(tmp_path):
    path = tmp_path / "junk"
    path.write_text("not a certificate", encoding="ascii")
    return str(path)


# --------------------------------------------------------------------------------------- files


def test_files_of_a_ca_and_of_a_certificate_alone_are_accepted(tls_files, tmp_path):
    check_files(tls_files, HOST)
    check_files(replace(tls_files, ca=""), HOST)
    check_files(issue(tmp_path), HOST)


def test_certificate_of_another_host_is_named(authority):
    files = authority.issue("elsewhere", host="DNS:elsewhere.example")
    with pytest.raises(SpecError, match=f"connections to {HOST} would fail: .*not valid for"):
        check_files(files, HOST)
    check_files(files, "elsewhere.example")
    check_files(replace(files, ca=""), HOST)  # the certificate itself is trusted


def test_expired_certificate_is_named(authority):
    files = authority.issue("old", days=-1)
    for one in (files, replace(files, ca="")):
        with pytest.raises(SpecError, match="certificate has expired"):
            check_files(one, HOST)


def test_certificate_of_another_ca_is_named(tls_files, tmp_path):
    other = Authority(tmp_path / "other")
    with pytest.raises(SpecError, match="unable to get local issuer"):
        check_files(replace(tls_files, ca=str(other.cert)), HOST)


def test_key_of_another_certificate_is_named(tls_files, tmp_path):
    other = issue(tmp_path)
    with pytest.raises(SpecError, match=f"{other.key}: the key doesn't belong to the certificate"):
        check_files(replace(tls_files, key=other.key), HOST)


def test_encrypted_key_is_refused_without_asking_for_its_passphrase(tls_files, tmp_path):
    encrypted = str(tmp_path / "encrypted.key")
    command = ["openssl", "ec", "-aes128", "-passout", "pass:x", "-in", tls_files.key]
    subprocess.run([*command, "-out", encrypted], check=True, capture_output=True)
    with pytest.raises(SpecError, match=f"{encrypted} is encrypted"):
        check_files(replace(tls_files, key=encrypted), HOST)


@pytest.mark.parametrize("field", ["cert", "key", "ca"])
def test_file_that_is_missing_or_not_pem_is_named(tls_files, junk, tmp_path, field):
    with pytest.raises(SpecError, match=rf"cannot read the TLS file {tmp_path}/none: No such file"):
        check_files(replace(tls_files, **{field: f"{tmp_path}/none"}), HOST)
    with pytest.raises(SpecError, match=f"cannot use the TLS .*{junk}"):
        check_files(replace(tls_files, **{field: junk}), HOST)


def test_missing_files_are_named(tls_files, junk):
    with pytest.raises(SpecError, match="a server with TLS needs a certificate and its key"):
        server_context(TlsFiles(ca=tls_files.ca))
    with pytest.raises(SpecError, match="needs the certificate of the CA or of the server"):
        client_context(TlsFiles())
    with pytest.raises(SpecError, match="together with its key"):
        client_context(replace(tls_files, key=""))
    with pytest.raises(SpecError, match=f"there is no certificate in {junk}"):
        client_context(TlsFiles(junk))


# ----------------------------------------------------------------------------- who is accepted


class Pair:
    """Both ends of a TLS connection, non-blocking, in one thread."""

    def __init__(self, server_tls, client_tls, host=HOST):
        with socket.create_server((HOST, 0)) as listening:
            client = socket.create_connection(listening.getsockname())
            server, _ = listening.accept()
        for sock in (client, server):
            sock.setblocking(False)
        self.raw = server.dup()  # the bytes on the wire
        self.client = wrap_client(client, client_tls, host)
        self.server = wrap_server(server, server_tls)

    def shake_hands(self):
        """Do the handshake: it happens inside `recv`."""
        for end in (self.client, self.server, self.client, self.server, self.client):
            with pytest.raises(BlockingIOError):
                end.recv(1)
        return self

    def close(self):
        for sock in (self.client, self.server, self.raw):
            sock.close()


@pytest.fixture
def connect_pair(tls_files):
    pairs = []

    def connect(server=tls_files, client=tls_files, host=HOST):
        contexts = [
            one if isinstance(one, ssl.SSLContext) else make(one)
            for make, one in ((server_context, server), (client_context, client))
        ]
        pairs.append(Pair(*contexts, host))
        return pairs[-1]

    yield connect
    for pair in pairs:
        pair.close()


def wait_readable(sock):
    assert select.select([sock], [], [], 20)[0]


def outcome(pair):
    """Return the errors of the client and the server; both are None if they are connected."""
    found = {pair.client: None, pair.server: None}
    for end in (pair.client, pair.server) * 3:
        try:
            end.recv(1)
        except BlockingIOError:
            pass
        except OSError as error:
            found[end] = found[end] or str(error)
    return list(found.values())


def test_handshake_happens_without_blocking(connect_pair):
    pair = connect_pair().shake_hands()
    assert pair.client.version() == pair.server.version() == "TLSv1.3"
    pair.client.send(b"hello")
    wait_readable(pair.server)
    assert pair.server.recv(10) == b"hello"


def test_client_without_a_certificate_is_refused_by_a_server_with_a_ca(connect_pair, tls_files):
    client, server = outcome(connect_pair(client=TlsFiles(ca=tls_files.ca)))
    assert client == "TLS failed: the server requires a certificate and its key"
    assert server == "TLS failed: the client has no certificate"


def test_client_with_a_certificate_of_another_ca_is_refused(connect_pair, tls_files, tmp_path):
    other = Authority(tmp_path / "other").issue("intruder")
    client, server = outcome(connect_pair(client=replace(other, ca=tls_files.ca)))
    assert client == "TLS failed: the peer doesn't trust our certificate"
    assert "the certificate is invalid" in server


def test_client_needs_no_certificate_if_the_server_has_no_ca(connect_pair, tls_files):
    without_ca = replace(tls_files, ca="")
    for client in (TlsFiles(ca=tls_files.ca), TlsFiles(cert=tls_files.cert)):
        assert outcome(connect_pair(server=without_ca, client=client)) == [None, None]


def test_server_of_another_host_is_refused(connect_pair):
    client, _ = outcome(connect_pair(host="127.0.0.2"))
    assert "IP address mismatch, certificate is not valid for '127.0.0.2'" in client


def test_client_without_a_ca_trusts_one_certificate_and_not_its_issuer(
    connect_pair, authority, tls_files, tmp_path
):
    chain = tmp_path / "chain.pem"
    chain.write_text(Path(tls_files.cert).read_text() + authority.cert.read_text())
    pinned = TlsFiles(str(chain))
    assert outcome(connect_pair(replace(tls_files, ca=""), pinned)) == [None, None]
    sibling = replace(authority.issue("sibling"), ca="")
    client, _ = outcome(connect_pair(sibling, pinned))
    assert "the certificate is invalid" in client


def test_older_tls_is_refused(connect_pair, tls_files):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(tls_files.ca)
    context.load_cert_chain(tls_files.cert, tls_files.key)
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    context.sslsocket_class = client_context(tls_files).sslsocket_class
    _, server = outcome(connect_pair(client=context))
    assert server == "TLS failed: unsupported protocol"


# ------------------------------------------------------------------- sockets like plain sockets


def test_recv_leaves_nothing_that_a_selector_does_not_see(connect_pair):
    pair = connect_pair().shake_hands()
    pair.client.send(b"x" * RECORD_BYTES)
    received = b""
    while len(received) < RECORD_BYTES:
        wait_readable(pair.server)
        received += pair.server.recv(10)
        assert not pair.server.has_unread()
    assert received == b"x" * RECORD_BYTES


def test_has_unread_tells_of_bytes_that_a_selector_does_not_see(connect_pair):
    pair = connect_pair().shake_hands()
    pair.client.send(b"abc")
    wait_readable(pair.server)
    space = bytearray(2)
    assert pair.server.recv_into(space) == 2
    assert not select.select([pair.server], [], [], 0)[0]
    assert pair.server.has_unread()
    assert pair.server.recv_into(space) == 1
    assert not pair.server.has_unread()
    with pytest.raises(BlockingIOError):
        pair.server.recv_into(space)


def test_blocked_send_is_completed_by_later_ones_with_the_same_bytes(connect_pair):
    pair = connect_pair().shake_hands()
    data = memoryview(bytes(range(256)) * (1 << 15))
    received, sent = bytearray(), 0
    blocked = 0
    while not sent:
        try:
            sent = pair.client.send(data)
        except BlockingIOError:
            blocked += 1
            wait_readable(pair.server)
            received += pair.server.recv(1 << 20)
    assert blocked
    assert sent == len(data)
    while len(received) < len(data):
        wait_readable(pair.server)
        received += pair.server.recv(1 << 20)
    assert received == data


def test_connection_that_is_cut_looks_closed(connect_pair):
    pair = connect_pair().shake_hands()
    pair.raw.close()
    pair.server.close()
    wait_readable(pair.client)
    assert pair.client.recv(1) == b""
    assert pair.client.recv_into(bytearray(1)) == 0


def test_connection_that_is_cut_during_the_handshake_looks_closed(connect_pair):
    pair = connect_pair()
    pair.raw.close()
    pair.server.close()
    wait_readable(pair.client)
    assert pair.client.recv(1) == b""


def test_bytes_from_a_third_party_are_never_received(connect_pair):
    pair = connect_pair().shake_hands()
    pair.raw.send(b"\x17\x03\x03\x00\x20" + bytes(32))  # a record, encrypted with another key
    wait_readable(pair.client)
    with pytest.raises(TlsError, match="TLS failed: decryption failed or bad record mac"):
        pair.client.recv(1)


def test_peer_without_tls_is_told_apart(connect_pair):
    pair = connect_pair()
    pair.raw.send(b"a plain answer")
    wait_readable(pair.client)
    with pytest.raises(TlsError, match="TLS failed: the peer doesn't use TLS"):
        pair.client.recv(1)
