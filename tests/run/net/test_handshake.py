# SPDX-License-Identifier: BSD-3-Clause
"""Both sides prove that they know the token before the server reads anything else."""

import secrets
import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest

from paceline.errors import PeerLost, ProtocolError
from paceline.run.net import messages
from paceline.run.net.address import listen
from paceline.run.net.channel import STRANGER_LIMIT, Channel, frame
from paceline.run.net.handshake import (
    Authenticator,
    Challenger,
    connect,
    connect_data,
    new_token,
)
from paceline.run.server import strangers as strangers_module
from paceline.run.server.listener import Listener
from paceline.run.server.strangers import STRANGERS_MAX
from strangers import prove

TOKEN = new_token()
HELLO = messages.Hello(messages.PROTOCOL, bytes(32))


@pytest.fixture(params=["unix", "tcp"])
def server_socket(request):
    name = f"unix:@paceline-test-{secrets.token_hex(8)}"
    with listen(name if request.param == "unix" else "tcp:127.0.0.1:0") as server_socket:
        yield server_socket


@pytest.fixture
def address(server_socket):
    name = server_socket.getsockname()
    return f"unix:@{name[1:].decode()}" if isinstance(name, bytes) else f"tcp:{name[0]}:{name[1]}"


@pytest.fixture
def refusals():
    """What the listener reported."""
    return []


@pytest.fixture
def listener(server_socket, refusals):
    """A listener whose peers are plain channels."""
    listener = Listener([server_socket], TOKEN, lambda channel: channel, refusals.append)
    yield listener
    listener.shut_down()


@pytest.fixture
def connect_client(server_socket):
    """Return a function that connects a client without authenticating it."""
    clients = []

    def make():
        sock = socket.socket(server_socket.family, socket.SOCK_STREAM)
        sock.connect(server_socket.getsockname())
        clients.append(Channel(sock, messages.decode_server, STRANGER_LIMIT))
        return clients[-1]

    yield make
    for channel in clients:
        channel.close()


def poll(listener):
    """Receive as the server does; return the messages of authenticated peers."""
    received = []
    for peer in listener.wait(1.0):
        try:
            received += peer.receive_nowait()
        except ProtocolError as error:
            listener.close(peer, str(error))
        except PeerLost:
            listener.close(peer)
    return received


def ask(listener, client, *questions):
    """Send these messages, and return the answer to the last one."""
    for message in questions:
        client.send(message)
    while not client.wait_readable(0.0):
        poll(listener)
    return client.receive()


# ---------------------------------------------------------------------------- the server's side


def test_client_with_the_token_is_authenticated(listener, address, refusals):
    with ThreadPoolExecutor(1) as pool:
        connecting = pool.submit(connect, address, TOKEN)
        while not connecting.done():
            poll(listener)
        client = connecting.result()
    client.send(messages.AbandonReport(1, 0.5))
    received = []
    while not received:
        received += poll(listener)
    assert received == [messages.AbandonReport(1, 0.5)]
    assert refusals == []
    client.close()


def test_message_in_one_packet_with_the_proof_reaches_the_server(listener, connect_client):
    client = connect_client()
    proof = prove(TOKEN, ask(listener, client, HELLO))
    client.send(proof)
    client.send(messages.AbandonReport(1, 0.5))
    received = []
    while not received:
        received += poll(listener)
    assert received == [messages.AbandonReport(1, 0.5)]


def test_wait_returns_authenticated_peers_only(listener, connect_client):
    client = connect_client()
    assert listener.wait(1.0) == []  # accepts it
    client.send(HELLO)
    assert listener.wait(1.0) == []  # answers
    client.send(prove(TOKEN, client.receive()))
    [peer] = listener.wait(1.0)
    client.send(messages.AbandonReport(1, 0.5))
    assert listener.wait(1.0) == [peer]


def test_worker_detects_a_server_with_another_token(listener, address, refusals):
    with ThreadPoolExecutor(1) as pool:
        connecting = pool.submit(connect, address, new_token())
        while not connecting.done():
            poll(listener)
    with pytest.raises(ProtocolError, match=f"the server at {address} has a different token"):
        connecting.result()
    assert refusals == []  # the worker hung up before its proof


def test_client_with_another_token_is_refused(listener, connect_client, refusals):
    client = connect_client()
    challenge = ask(listener, client, HELLO)
    refused = ask(listener, client, prove(new_token(), challenge))
    assert refused == messages.Refused("the token is wrong")
    assert refusals == ["refused a connection: the token is wrong"]
    with pytest.raises(PeerLost):
        client.receive()


def test_replayed_proof_is_refused(listener, connect_client):
    challenge = ask(listener, first := connect_client(), HELLO)
    overheard = prove(TOKEN, challenge)
    first.send(overheard)
    poll(listener)
    second = connect_client()
    assert ask(listener, second, HELLO).nonce != challenge.nonce
    assert ask(listener, second, overheard) == messages.Refused("the token is wrong")


def test_proof_of_the_server_does_not_authenticate_a_client(listener, connect_client):
    client = connect_client()
    challenge = ask(listener, client, HELLO)
    assert ask(listener, client, messages.Proof(challenge.proof)).reason == "the token is wrong"


def test_server_cannot_be_made_to_answer_its_own_challenge(listener, connect_client):
    """A second connection asks for a proof of the first one's challenge."""
    first, second = connect_client(), connect_client()
    challenge = ask(listener, first, HELLO)
    stolen = ask(listener, second, messages.Hello(messages.PROTOCOL, challenge.nonce))
    assert ask(listener, first, messages.Proof(stolen.proof)).reason == "the token is wrong"


@pytest.mark.parametrize(
    ("sent", "reason"),
    [
        (
            messages.Hello(messages.PROTOCOL + 1, bytes(32)),
            f"expected version {messages.PROTOCOL} of the protocol, got {messages.PROTOCOL + 1}; ",
        ),
        (
            messages.Hello(0, bytes(32)),
            f"expected version {messages.PROTOCOL} of the protocol, got 0; ",
        ),
        (messages.Proof(bytes(32)), "Proof was sent before Hello"),
        (
            messages.AbandonReport(1, 0.5),
            "expected a message from an unauthenticated client: Invalid value 11",
        ),
    ],
)
def test_client_that_does_not_begin_with_hello_is_refused(
    listener, connect_client, refusals, sent, reason
):
    assert ask(listener, connect_client(), sent).reason.startswith(reason)
    [refusal] = refusals
    assert refusal.startswith(f"refused a connection: {reason}")


def test_second_hello_is_refused(listener, connect_client):
    client = connect_client()
    ask(listener, client, HELLO)
    assert ask(listener, client, HELLO) == messages.Refused("Hello was sent twice")


def test_hello_after_the_handshake_is_refused(listener, connect_client):
    client = connect_client()
    challenge = ask(listener, client, HELLO)
    refused = ask(listener, client, prove(TOKEN, challenge), HELLO)
    assert refused.reason.startswith("expected a message from a worker")


def test_silent_client_is_refused_after_a_while_and_an_authenticated_one_stays(
    listener, connect_client, monkeypatch
):
    silent, slow, known = connect_client(), connect_client(), connect_client()
    ask(listener, slow, HELLO)
    known.send(prove(TOKEN, ask(listener, known, HELLO)))
    poll(listener)
    monkeypatch.setattr(strangers_module, "STRANGER_TIMEOUT_S", -1.0)  # as if it had passed
    listener.wait(0.0)
    for client in (silent, slow):
        assert client.receive() == messages.Refused("it took too long to authenticate")
        with pytest.raises(PeerLost):
            client.receive()
    known.send(messages.AbandonReport(1, 0.5))
    assert poll(listener) == [messages.AbandonReport(1, 0.5)]


def test_client_that_sent_something_while_the_server_was_busy_is_answered(
    listener, connect_client, monkeypatch
):
    client = connect_client()
    poll(listener)
    client.send(HELLO)
    # As if the time had passed while the server was busy.
    monkeypatch.setattr(strangers_module, "STRANGER_TIMEOUT_S", -1.0)
    poll(listener)
    assert isinstance(client.receive(), messages.Challenge)


def test_oldest_of_too_many_unauthenticated_clients_is_closed(listener, connect_client):
    known, *silent = [connect_client() for _ in range(STRANGERS_MAX + 3)]
    known.send(HELLO)
    while not known.wait_readable(0.0):
        poll(listener)
    known.send(prove(TOKEN, known.receive()))
    while listener.wait(0.0) or not silent[1].wait_readable(0.0):
        poll(listener)
    closed = [client for client in silent if client.wait_readable(0.0)]
    assert closed == silent[:2]


def test_client_that_hangs_up_during_the_handshake_is_forgotten(listener, connect_client, refusals):
    client = connect_client()
    ask(listener, client, HELLO)
    client.close()
    assert listener.wait(1.0) == []
    assert refusals == []
    assert not listener._strangers


# ---------------------------------------------------------------------------- the worker's side


@pytest.mark.parametrize(
    ("answer", "error", "what"),
    [
        (messages.Refused("closed"), ProtocolError, "refused the connection: closed"),
        (messages.Challenge(bytes(32), bytes(32)), ProtocolError, "has a different token"),
        (messages.CancelTurn(1), ProtocolError, "expected a challenge from "),
        (messages.AbandonReport(1, 0.5), ProtocolError, "expected a message from the server"),
        (messages.Refused("x" * STRANGER_LIMIT), ProtocolError, "a frame must have 1 to 256 bytes"),
        (None, PeerLost, "the connection was closed"),
    ],
    ids=["refused", "another token", "no challenge", "no server", "too long", "closed"],
)
def test_worker_survives_any_answer_to_its_hello(server_socket, address, answer, error, what):
    server_socket.setblocking(True)
    with ThreadPoolExecutor(1) as pool:
        connecting = pool.submit(connect, address, TOKEN)
        sock, _ = server_socket.accept()
        channel = Channel(sock, messages.decode_stranger, STRANGER_LIMIT)
        assert isinstance(channel.receive(), messages.Hello)
        if answer is not None:
            channel.send(answer)
        channel.close()
    with pytest.raises(error, match=what):
        connecting.result()


def test_worker_sends_no_proof_to_a_server_without_the_token(server_socket, address):
    """It proves that it knows the token only after the server has."""
    server_socket.setblocking(True)
    with ThreadPoolExecutor(1) as pool:
        connecting = pool.submit(connect, address, TOKEN)
        channel = Channel(server_socket.accept()[0], messages.decode_stranger, STRANGER_LIMIT)
        hello = channel.receive()
        channel.send(Challenger(new_token()).answer(hello))
        with pytest.raises(PeerLost):
            channel.receive()
        channel.close()
    assert isinstance(connecting.exception(), ProtocolError)


def test_server_that_listens_but_never_answers_counts_as_lost(server_socket, address):
    with pytest.raises(PeerLost, match="the connection broke: timed out"):
        connect(address, TOKEN, timeout_s=0.01)


def test_connecting_without_a_server_raises_peer_lost(tmp_path):
    with pytest.raises(PeerLost, match=r"no server at unix:.*: No such file"):
        connect(f"unix:{tmp_path}/server", TOKEN)


# -------------------------------------------------------------------------------- data connections


def challenged(authenticator, challenger):
    """Return the proof of a client to a server that it has said hello to."""
    return authenticator.prove(challenger.answer(authenticator.hello()))


def test_both_sides_name_the_session_of_a_control_connection_alike():
    authenticator, challenger = Authenticator("here", TOKEN), Challenger(TOKEN)
    assert authenticator.session == b""
    proof = challenged(authenticator, challenger)
    challenger.check(proof)
    assert proof.session == b""
    assert authenticator.session == challenger.session
    assert len(challenger.session) == 32


def test_proof_of_a_data_connection_names_its_session():
    challenger, session = Challenger(TOKEN), secrets.token_bytes(32)
    proof = challenged(Authenticator("here", TOKEN, "data", session), challenger)
    challenger.check(proof)
    assert proof.session == session


@pytest.mark.parametrize("other", [b"", b"B" * 32, b"A" * 31, b"A" * 31 + b"B"])
def test_proof_for_one_session_is_no_proof_for_another(other):
    challenger = Challenger(TOKEN)
    proof = challenged(Authenticator("here", TOKEN, "data", b"A" * 32), challenger)
    with pytest.raises(ProtocolError, match="the token is wrong"):
        challenger.check(messages.Proof(proof.proof, other, "data"))


@pytest.mark.parametrize("kind", ["control", "data", "host", "hosted"])
def test_proof_of_a_control_connection_is_no_proof_of_another(kind):
    challenger = Challenger(TOKEN)
    proof = challenged(Authenticator("here", TOKEN), challenger)
    with pytest.raises(ProtocolError, match="the token is wrong"):
        challenger.check(messages.Proof(proof.proof, b"A" * 32, kind))


def test_proof_of_another_data_connection_is_refused():
    """A proof that was overheard is worth nothing on another connection."""
    overheard = challenged(Authenticator("here", TOKEN, "data", b"A" * 32), Challenger(TOKEN))
    challenger = Challenger(TOKEN)
    challenger.answer(HELLO)
    with pytest.raises(ProtocolError, match="the token is wrong"):
        challenger.check(overheard)


@pytest.mark.parametrize(
    ("answer", "error", "what"),
    [
        (messages.Refused("full"), ProtocolError, "refused the data connection: full"),
        (messages.CancelTurn(1), ProtocolError, "to attach the connection, got CancelTurn"),
        (None, PeerLost, "the connection was closed"),
    ],
    ids=["refused", "not attached", "closed"],
)
def test_worker_survives_any_answer_to_its_data_connection(
    server_socket, address, answer, error, what
):
    server_socket.setblocking(True)
    with ThreadPoolExecutor(1) as pool:
        connecting = pool.submit(connect_data, address, TOKEN, b"A" * 32)
        channel = Channel(server_socket.accept()[0], messages.decode_stranger, STRANGER_LIMIT)
        channel.send(Challenger(TOKEN).answer(channel.receive()))
        assert channel.receive().session == b"A" * 32
        if answer is not None:
            channel.send(answer)
        channel.close()
    with pytest.raises(error, match=what):
        connecting.result()


def test_bytes_behind_the_answer_to_a_data_connection_stay_on_it(server_socket, address):
    """A server that isn't the head may send its part of a version at once."""
    server_socket.setblocking(True)
    with ThreadPoolExecutor(1) as pool:
        connecting = pool.submit(connect_data, address, TOKEN, b"A" * 32)
        sock, _ = server_socket.accept()
        channel = Channel(sock, messages.decode_stranger, STRANGER_LIMIT)
        channel.send(Challenger(TOKEN).answer(channel.receive()))
        channel.receive()
        sock.sendall(frame(messages.encode(messages.DataAttached())) + b"more")
        with closing(connecting.result()) as data:
            assert data.recv(100) == b"more"
        channel.close()
