# SPDX-License-Identifier: BSD-3-Clause
"""Recorded handshakes can't be replayed, reflected or moved to another session.

An eavesdropper records everything that a real worker and a real server send each other.
"""

import socket
from concurrent.futures import ThreadPoolExecutor

import pytest

from paceline.errors import PeerLost, ProtocolError
from paceline.run.net import messages
from paceline.run.net.address import dial, listen, of_socket
from paceline.run.net.channel import MEMBER_LIMIT, STRANGER_LIMIT, Channel, FrameBuffer
from paceline.run.net.handshake import Authenticator, Challenger, connect, connect_data, new_token
from paceline.run.net.shared_memory import SharedMemoryStore
from paceline.run.net.tcp import TcpPeer
from paceline.run.server.listener import Listener
from paceline.run.tensors.state_spec import StateSpec

TOKEN = new_token()
TIMEOUT_S = 20.0
WRONG = messages.Refused("the token is wrong")


class Tap:
    """A socket that keeps what is sent through it."""

    def __init__(self, sock):
        self._sock, self.sent = sock, b""

    def send(self, data):
        count = self._sock.send(data)
        self.sent += bytes(data[:count])
        return count

    def __getattr__(self, name):
        return getattr(self._sock, name)


class Overheard:
    """A server, a worker with both its connections, and a record of both handshakes."""

    def __init__(self, monkeypatch):
        self.taps = []
        monkeypatch.setattr("paceline.run.net.handshake.dial", self._dial)
        listening = listen("tcp:127.0.0.1:0")
        self.address = of_socket(listening, "tcp:127.0.0.1:0")
        store = SharedMemoryStore(StateSpec((), (), (), ()))
        self.listener = Listener([listening], TOKEN, lambda c: TcpPeer(c, store), lambda _: None)
        self._open = []

    def _dial(self, address, timeout_s=None):
        self.taps.append(Tap(dial(address, timeout_s)))
        return self.taps[-1]

    def _serve(self, connecting, *arguments):
        with ThreadPoolExecutor(1) as pool:
            future = pool.submit(connecting, *arguments)
            while not future.done():
                self.listener.wait(0.01)
            self._open.append(future.result())
        return self._open[-1]

    def control(self):
        """Connect a worker; return its channel and the messages that it sent."""
        channel = self._serve(connect, self.address, TOKEN, TIMEOUT_S)
        return channel, self.taps[-1].sent

    def data(self, session):
        """Open its data connection; return what it sent."""
        self._serve(connect_data, self.address, TOKEN, session, TIMEOUT_S)
        return self.taps[-1].sent

    def intruder(self):
        """Return a connection of someone who doesn't know the token."""
        channel = Channel(dial(self.address, TIMEOUT_S), messages.decode_server, MEMBER_LIMIT)
        self._open.append(channel)
        return channel

    def answers(self, channel, *sent):
        """Send bytes or messages; return the server's answers until it hangs up."""
        found = []
        for one in sent:
            if isinstance(one, bytes):
                channel._sock.sendall(one)
            else:
                channel.send(one)
        try:
            while True:
                while not channel.wait_readable(0.0):
                    self.listener.wait(0.01)
                found += channel.receive_nowait()
        except PeerLost:
            return found

    def close(self):
        self.listener.shut_down()
        for one in self._open:
            one.close()


@pytest.fixture
def overheard(monkeypatch):
    one = Overheard(monkeypatch)
    yield one
    one.close()


def sent_messages(data):
    """Return the messages in recorded bytes of a client."""
    frames = FrameBuffer.with_limit(STRANGER_LIMIT)
    frames += data
    return [messages.decode_stranger(body) for body in iter(frames.next_body, None)]


def test_record_contains_neither_the_token_nor_a_proof_without_nonces(overheard):
    channel, control = overheard.control()
    data = overheard.data(channel.session)
    assert [type(one) for one in sent_messages(control)] == [messages.Hello, messages.Proof]
    assert [type(one) for one in sent_messages(data)] == [messages.Hello, messages.Proof]
    assert TOKEN.encode() not in control + data
    assert sent_messages(data)[1].session == channel.session


def test_replayed_control_connection_is_refused(overheard):
    _, control = overheard.control()
    challenge, refused = overheard.answers(overheard.intruder(), control)
    assert isinstance(challenge, messages.Challenge)
    assert refused == WRONG


@pytest.mark.parametrize("is_open", [True, False], ids=["session open", "session closed"])
def test_replayed_data_connection_is_refused(overheard, is_open):
    channel, _ = overheard.control()
    data = overheard.data(channel.session)
    if not is_open:
        channel.close()
        [peer] = overheard.listener.wait(TIMEOUT_S)
        overheard.listener.close(peer)
    assert overheard.answers(overheard.intruder(), data)[1:] == [WRONG]


def test_data_connection_cannot_be_moved_to_another_session(overheard):
    """An intruder in the middle changes the session in a worker's own proof."""
    first, _ = overheard.control()
    second, _ = overheard.control()
    intruder = overheard.intruder()
    worker = Authenticator(overheard.address, TOKEN, "data", first.session)
    intruder.send(worker.hello())
    while not intruder.wait_readable(0.0):
        overheard.listener.wait(0.01)
    proof = worker.prove(intruder.receive())
    moved = messages.Proof(proof.proof, second.session, "data")
    assert overheard.answers(intruder, moved) == [WRONG]


@pytest.mark.parametrize("session", [b"", b"x" * 32], ids=["control", "unknown session"])
def test_proof_of_a_data_connection_opens_nothing_else(overheard, session):
    channel, _ = overheard.control()
    intruder = overheard.intruder()
    worker = Authenticator(overheard.address, TOKEN, "data", channel.session)
    intruder.send(worker.hello())
    while not intruder.wait_readable(0.0):
        overheard.listener.wait(0.01)
    proof = worker.prove(intruder.receive())
    assert overheard.answers(intruder, messages.Proof(proof.proof, session)) == [WRONG]


def test_session_has_one_data_connection(overheard):
    channel, _ = overheard.control()
    overheard.data(channel.session)
    with pytest.raises(ProtocolError, match="the session already has a data connection"):
        overheard.data(channel.session)


def test_challenge_that_is_reflected_to_the_server_is_refused(overheard):
    """The server's own nonce and proof, sent back to it as a client's."""
    intruder = overheard.intruder()
    intruder.send(messages.Hello(messages.PROTOCOL, bytes(32)))
    while not intruder.wait_readable(0.0):
        overheard.listener.wait(0.01)
    challenge = intruder.receive()
    assert overheard.answers(intruder, messages.Proof(challenge.proof)) == [WRONG]


def test_hello_that_is_reflected_to_the_worker_is_refused():
    """A fake server answers a worker with the worker's own nonce, or an overheard challenge."""
    worker = Authenticator("tcp:host:1", TOKEN)
    nonce = worker.hello().nonce
    overheard = Challenger(TOKEN).answer(Authenticator("tcp:host:1", TOKEN).hello())
    for challenge in (messages.Challenge(nonce, nonce), overheard):
        with pytest.raises(ProtocolError, match="has a different token"):
            worker.prove(challenge)


def test_two_workers_cannot_be_connected_to_each_other():
    """Someone in the middle passes each one's messages to the other as if it were the server."""
    first, second = (Authenticator("tcp:host:1", TOKEN) for _ in range(2))
    for one, other in ((first, second), (second, first)):
        with pytest.raises(ProtocolError, match="expected a challenge from"):
            one.prove(other.hello())


def test_no_socket_is_left_by_a_replay(overheard):
    _, control = overheard.control()
    for _ in range(3):
        overheard.answers(overheard.intruder(), control)
    assert len(overheard.listener._strangers) == 0
    assert isinstance(overheard.taps[0].family, socket.AddressFamily)
