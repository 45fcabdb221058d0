# SPDX-License-Identifier: BSD-3-Clause
"""A data connection is handed to the peer of its session, or refused with a reason."""

import secrets
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress

import pytest

from paceline.errors import PeerLost, ProtocolError
from paceline.run.net import messages
from paceline.run.net.address import dial, listen
from paceline.run.net.channel import Channel, frame
from paceline.run.net.handshake import Authenticator, connect, connect_data, new_token
from paceline.run.net.shared_memory import SharedMemoryPeer, SharedMemoryStore
from paceline.run.net.tcp import TcpPeer
from paceline.run.server.listener import Listener
from tcp_loopback import TIMEOUT_S, Tcp, state_of_size, turn


@pytest.fixture
def tcp():
    with closing(Tcp(state_of_size(64).spec)) as tcp:
        yield tcp


def attempt(listener, call, *arguments):
    """Call a function that needs the listener to answer; return its result."""
    with ThreadPoolExecutor(1) as pool:
        calling = pool.submit(call, *arguments)
        while not calling.done():
            listener.wait(0.01)
        return calling.result()


def session_of(worker):
    return worker._control._channel.session


def refused_with(tcp, session, token=None):
    """Open a data connection of this session; return why it is refused."""
    with pytest.raises(ProtocolError) as caught:
        attempt(tcp.connections, connect_data, tcp.address, token or tcp.token, session, TIMEOUT_S)
    return str(caught.value).partition("refused the data connection: ")[2]


def assert_unharmed(tcp, peer, worker):
    """Check that the peer still works, and that the listener keeps nothing of the stranger."""
    assert turn(tcp, peer, worker, 1).turn == 1
    assert not tcp.connections._strangers
    assert len(tcp.connections._connections) == len(tcp.connections._sessions) == 1


def test_data_connection_of_an_unknown_session_is_refused(tcp):
    peer, worker, _ = tcp.join()
    reason = "the session of this data connection is unknown"
    assert refused_with(tcp, secrets.token_bytes(32)) == reason
    assert refused_with(tcp, session_of(worker)[:31]) == reason
    assert tcp.refusals[0] == f"refused a connection: {reason}"
    assert_unharmed(tcp, peer, worker)


def test_second_data_connection_of_a_session_is_refused(tcp):
    peer, worker, _ = tcp.join()
    reason = refused_with(tcp, session_of(worker))
    assert reason == "the session already has a data connection"
    assert_unharmed(tcp, peer, worker)


def test_data_connection_of_a_session_that_has_ended_is_refused(tcp):
    peer, worker, _ = tcp.join()
    gone, lost, _ = tcp.join()
    tcp.connections.close(gone)
    assert "unknown" in refused_with(tcp, session_of(lost))
    assert_unharmed(tcp, peer, worker)


def test_data_connection_with_another_token_is_refused(tcp):
    peer, worker, _ = tcp.join()
    with pytest.raises(ProtocolError, match="has a different token"):
        attempt(
            tcp.connections, connect_data, tcp.address, new_token(), session_of(worker), TIMEOUT_S
        )
    assert_unharmed(tcp, peer, worker)


class Stranger:
    """A client that sends what it likes."""

    def __init__(self, tcp):
        self._listener = tcp.connections
        self._channel = Channel(dial(tcp.address, TIMEOUT_S), messages.decode_server, 4096)

    def ask(self, message, behind=b""):
        """Send a message, and bytes behind it; return the answer."""
        self._channel._sock.sendall(frame(messages.encode(message)) + behind)
        while not self._channel.wait_readable(0.0):
            self._listener.wait(0.01)
        return self._channel.receive()

    def close(self):
        self._channel.close()


@pytest.fixture
def stranger(tcp):
    with closing(Stranger(tcp)) as stranger:
        yield stranger


def test_proof_for_one_session_does_not_open_another(tcp, stranger):
    peer, worker, _ = tcp.join()
    mine = Authenticator("here", tcp.token, "data", secrets.token_bytes(32))
    proof = mine.prove(stranger.ask(mine.hello()))
    moved = messages.Proof(proof.proof, session_of(worker), "data")
    assert stranger.ask(moved) == messages.Refused("the token is wrong")
    assert_unharmed(tcp, peer, worker)


def test_proof_that_was_overheard_opens_nothing(tcp, stranger):
    peer, worker, _ = tcp.join()
    authenticator = Authenticator("here", tcp.token, "data", session_of(worker))
    overheard = authenticator.prove(stranger.ask(authenticator.hello()))
    with closing(Stranger(tcp)) as other:
        other.ask(authenticator.hello())
        assert other.ask(overheard) == messages.Refused("the token is wrong")
    stranger.close()
    while tcp.connections._strangers:
        tcp.connections.wait(0.01)
    assert_unharmed(tcp, peer, worker)


def test_proof_of_the_server_does_not_open_a_data_connection(tcp, stranger):
    peer, worker, _ = tcp.join()
    challenge = stranger.ask(messages.Hello(messages.PROTOCOL, bytes(32)))
    reflected = messages.Proof(challenge.proof, session_of(worker), "data")
    assert stranger.ask(reflected) == messages.Refused("the token is wrong")
    assert_unharmed(tcp, peer, worker)


def test_bytes_behind_the_proof_of_a_data_connection_are_refused(tcp, stranger):
    """A worker waits for the answer before it sends anything."""
    channel = attempt(tcp.connections, connect, tcp.address, tcp.token, TIMEOUT_S)
    mine = Authenticator("here", tcp.token, "data", channel.session)
    proof = mine.prove(stranger.ask(mine.hello()))
    answers = [stranger.ask(proof, behind=b"data")]
    with suppress(PeerLost):
        while True:
            answers.append(stranger._channel.receive())
    assert messages.Refused("got or left bytes behind the last message of a connection") in answers
    data = attempt(
        tcp.connections, connect_data, tcp.address, tcp.token, channel.session, TIMEOUT_S
    )
    data.close()  # the session was unharmed
    channel.close()


def test_worker_that_shares_memory_has_no_data_connection():
    spec, token = state_of_size(64).spec, new_token()
    address, store = f"unix:@paceline-test-{secrets.token_hex(8)}", SharedMemoryStore(spec)
    listener = Listener(
        [listen(address)], token, lambda channel: SharedMemoryPeer(channel, store), lambda _: None
    )
    channel = attempt(listener, connect, address, token, TIMEOUT_S)
    with pytest.raises(ProtocolError, match="the session of this data connection is unknown"):
        attempt(listener, connect_data, address, token, channel.session, TIMEOUT_S)
    channel.send(messages.AbandonReport(1, 0.5))
    [peer] = listener.wait(TIMEOUT_S)
    assert list(peer.receive_nowait()) == [messages.AbandonReport(1, 0.5)]
    channel.close()
    listener.shut_down()
    store.close()


def test_end_of_a_data_connection_is_news_until_it_is_received(tcp):
    peer, worker, _ = tcp.join()
    worker._links[0].stream.close()
    assert tcp.connections.wait(TIMEOUT_S) == [peer]
    assert tcp.connections.wait(0.0) == [peer]
    with pytest.raises(PeerLost, match="the data connection was closed"):
        list(peer.receive_nowait())
    tcp.connections.close(peer)
    assert tcp.connections.wait(0.0) == []


def test_peer_is_one_of_the_transport_between_hosts(tcp):
    peer, _ = tcp.connect()
    assert isinstance(peer, TcpPeer)
    assert peer.pid is None
