# SPDX-License-Identifier: BSD-3-Clause
"""The token's handshake happens inside TLS; a client without TLS is told the reason."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from certificates import Authority
from paceline.errors import PeerLost, ProtocolError
from paceline.run.net import messages
from paceline.run.net.address import listen, of_socket
from paceline.run.net.handshake import connect, connect_data, new_token
from paceline.run.net.shared_memory import SharedMemoryStore
from paceline.run.net.tcp import TcpPeer
from paceline.run.net.tls import TlsFiles, TlsSocket, client_context, server_context
from paceline.run.server.listener import Listener
from paceline.run.tensors.state_spec import StateSpec

TOKEN = new_token()
TIMEOUT_S = 20.0


class Server:
    """A listener at a TCP address, and clients that connect in another thread."""

    def __init__(self, files):
        listening = listen("tcp:127.0.0.1:0")
        self.address = of_socket(listening, "tcp:127.0.0.1:0")
        self.refusals = []
        store = SharedMemoryStore(StateSpec((), (), (), ()))
        self.listener = Listener(
            [listening],
            TOKEN,
            lambda channel: TcpPeer(channel, store),
            self.refusals.append,
            tls=files and server_context(files),
        )

    def serve(self, connecting):
        """Serve until a client has finished; return what it returned."""
        with ThreadPoolExecutor(1) as pool:
            future = pool.submit(connecting)
            while not future.done():
                self.listener.wait(0.01)
            return future.result()

    def connect(self, files, token=TOKEN):
        tls = files and client_context(files)
        return self.serve(lambda: connect(self.address, token, TIMEOUT_S, tls))

    def connect_data(self, files, session):
        tls = files and client_context(files)
        return self.serve(lambda: connect_data(self.address, TOKEN, session, TIMEOUT_S, tls))


@pytest.fixture
def start():
    servers = []

    def make(files):
        servers.append(Server(files))
        return servers[-1]

    yield make
    for server in servers:
        server.listener.shut_down()


def test_both_connections_of_a_session_are_encrypted(start, tls_files):
    server = start(tls_files)
    channel = server.connect(tls_files)
    data = server.connect_data(tls_files, channel.session)
    assert isinstance(data, TlsSocket)
    assert data.version() == "TLSv1.3"
    channel.send(messages.AbandonReport(1, 0.5))
    [peer] = server.listener.wait(TIMEOUT_S)
    assert list(peer.receive_nowait()) == [messages.AbandonReport(1, 0.5)]
    channel.close()
    data.close()


def test_wrong_token_is_detected_inside_tls(start, tls_files):
    with pytest.raises(ProtocolError, match="has a different token"):
        start(tls_files).connect(tls_files, new_token())


def test_client_without_tls_is_told_what_is_missing(start, tls_files):
    server = start(tls_files)
    with pytest.raises(ProtocolError, match="refused the connection: this server uses TLS; give"):
        server.connect(None)
    [refusal] = server.refusals
    assert refusal.startswith("refused a connection: this server uses TLS")


def test_client_with_tls_detects_a_server_without(start, tls_files):
    server = start(None)
    with pytest.raises(ProtocolError, match="TLS failed: the peer doesn't use TLS"):
        server.connect(tls_files)
    assert len(server.refusals) == 1


def test_client_without_a_certificate_is_refused(start, tls_files):
    server = start(tls_files)
    with pytest.raises(ProtocolError, match="the server requires a certificate and its key"):
        server.connect(TlsFiles(ca=tls_files.ca))
    assert server.refusals == ["refused a connection: TLS failed: the client has no certificate"]


def test_client_detects_a_server_of_another_ca(start, tls_files, tmp_path):
    server = start(Authority(tmp_path / "other").issue("server"))
    with pytest.raises(ProtocolError, match="TLS failed: the certificate is invalid"):
        server.connect(tls_files)
    [refusal] = server.refusals
    assert refusal.startswith("refused a connection: TLS failed: ")


def test_server_that_dies_during_tls_is_lost_and_may_come_back(tls_files):
    with listen("tcp:127.0.0.1:0") as listening, ThreadPoolExecutor(1) as pool:
        address = of_socket(listening, "tcp:127.0.0.1:0")
        tls = client_context(tls_files)
        connecting = pool.submit(connect, address, TOKEN, TIMEOUT_S, tls)
        listening.setblocking(True)
        listening.accept()[0].close()
        with pytest.raises(PeerLost):
            connecting.result()
