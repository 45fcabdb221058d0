# SPDX-License-Identifier: BSD-3-Clause
"""Both sides prove that they know the token, or no word of them is heard."""

import secrets
import socket
from concurrent.futures import ThreadPoolExecutor

import pytest

from paceline.errors import PeerLost, ProtocolError
from paceline.run.net import messages
from paceline.run.net.channel import (
    STRANGER_LIMIT,
    Challenger,
    Channel,
    connect,
    listen,
    new_token,
)
from paceline.run.server import listener as listener_module
from paceline.run.server.listener import Listener
from paceline.run.server.peers import STRANGERS_MAX
from strangers import prove

TOKEN = new_token()


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
def listener(server_socket):
    listener = Listener(server_socket, TOKEN)
    yield listener
    listener.shut()


@pytest.fixture
def knock(server_socket):
    """Make strangers that say what a test wants."""
    made = []

    def make():
        sock = socket.socket(server_socket.family, socket.SOCK_STREAM)
        sock.connect(server_socket.getsockname())
        made.append(Channel(sock, messages.decode_server, STRANGER_LIMIT))
        return made[-1]

    yield make
    for channel in made:
        channel.close()


def attend(listener, refusals=None):
    """Hear whoever has something to say, as the server does; return what workers said."""
    said = []
    for peer in listener.wait(1.0):
        try:
            said += listener.hear(peer)
        except ProtocolError as error:
            listener.close(peer, str(error))
            if refusals is not None:
                refusals.append(str(error))
        except PeerLost:
            listener.close(peer)
    return said


def ask(listener, channel, *messages):
    """Send these, and receive the answer to the last."""
    for message in messages:
        channel.send(message)
    while not channel.wait_readable(0.0):
        attend(listener)
    return channel.receive()


HELLO = messages.Hello(messages.PROTOCOL, bytes(32))


def test_two_that_have_the_same_token_know_each_other(listener, address):
    with ThreadPoolExecutor(1) as pool:
        connecting = pool.submit(connect, address, TOKEN)
        while not connecting.done():
            attend(listener)
        channel = connecting.result()
    channel.send(messages.AbandonReport(1, 0.5))
    said = []
    while not said:
        said += attend(listener)
    assert said == [messages.AbandonReport(1, 0.5)]
    channel.close()


def test_a_worker_finds_out_that_the_server_has_another_token(listener, address):
    refusals = []
    with ThreadPoolExecutor(1) as pool:
        connecting = pool.submit(connect, address, new_token())
        while not connecting.done():
            attend(listener, refusals)
    with pytest.raises(ProtocolError, match=f"the server at {address} has another token"):
        connecting.result()
    assert refusals == []  # it never came to a proof


def test_a_stranger_with_another_token_is_refused(listener, knock):
    stranger = knock()
    challenge = ask(listener, stranger, HELLO)
    refused = ask(listener, stranger, prove(new_token(), challenge))
    assert refused == messages.Refused("it has another token")
    with pytest.raises(PeerLost):
        stranger.receive()


def test_a_proof_that_was_overheard_is_of_no_use(listener, knock):
    challenge = ask(listener, first := knock(), HELLO)
    overheard = prove(TOKEN, challenge)
    first.send(overheard)
    attend(listener)
    second = knock()
    assert ask(listener, second, HELLO).nonce != challenge.nonce
    assert ask(listener, second, overheard) == messages.Refused("it has another token")


def test_the_proof_of_the_server_is_of_no_use_to_a_stranger(listener, knock):
    stranger = knock()
    challenge = ask(listener, stranger, HELLO)
    assert ask(listener, stranger, messages.Proof(challenge.proof)).reason == "it has another token"


def test_the_server_does_not_prove_what_it_was_asked_to_prove_itself(listener, knock):
    """Asked on a second connection for a proof of the challenge of the first."""
    first, second = knock(), knock()
    challenge = ask(listener, first, HELLO)
    stolen = ask(listener, second, messages.Hello(messages.PROTOCOL, challenge.nonce))
    assert ask(listener, first, messages.Proof(stolen.proof)).reason == "it has another token"


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (
            [messages.Hello(messages.PROTOCOL + 1, bytes(32))],
            "it speaks protocol 2, the run speaks 1",
        ),
        ([messages.Hello(0, bytes(32))], "it speaks protocol 0, the run speaks 1"),
        ([messages.Proof(bytes(32))], "it wants to prove itself before it has said hello"),
        ([messages.AbandonReport(1, 0.5)], "expected a message of a stranger: Invalid value 11"),
    ],
)
def test_who_does_not_begin_as_the_protocol_says_is_refused(listener, knock, said, reason):
    assert ask(listener, knock(), *said).reason.startswith(reason)


def test_hello_can_be_said_once(listener, knock):
    stranger = knock()
    ask(listener, stranger, HELLO)
    assert ask(listener, stranger, HELLO) == messages.Refused("it said hello twice")


def test_who_is_known_need_not_say_hello_again(listener, knock):
    stranger = knock()
    challenge = ask(listener, stranger, HELLO)
    refused = ask(listener, stranger, prove(TOKEN, challenge), HELLO)
    assert refused.reason.startswith("expected a message of a worker")


def test_a_stranger_that_says_nothing_is_sent_away_and_who_is_known_may_stay(
    listener, knock, monkeypatch
):
    silent, slow, known = knock(), knock(), knock()
    ask(listener, slow, HELLO)
    known.send(prove(TOKEN, ask(listener, known, HELLO)))
    attend(listener)
    monkeypatch.setattr(listener_module, "STRANGER_PATIENCE_S", -1.0)  # as if it had passed
    listener.wait(0.0)
    for stranger in (silent, slow):
        assert stranger.receive() == messages.Refused("it took too long to introduce itself")
        with pytest.raises(PeerLost):
            stranger.receive()
    known.send(messages.AbandonReport(1, 0.5))
    assert attend(listener) == [messages.AbandonReport(1, 0.5)]


def test_a_stranger_that_has_spoken_while_the_server_was_busy_is_heard(
    listener, knock, monkeypatch
):
    stranger = knock()
    attend(listener)
    stranger.send(HELLO)
    monkeypatch.setattr(
        listener_module, "STRANGER_PATIENCE_S", -1.0
    )  # as if it had passed meanwhile
    attend(listener)
    assert isinstance(stranger.receive(), messages.Challenge)


def test_of_many_strangers_the_oldest_must_go(listener, knock):
    known, *silent = [knock() for _ in range(STRANGERS_MAX + 3)]
    known.send(HELLO)
    while not known.wait_readable(0.0):
        attend(listener)
    known.send(prove(TOKEN, known.receive()))
    while listener.wait(0.0) or not silent[1].wait_readable(0.0):
        attend(listener)
    gone = [stranger for stranger in silent if stranger.wait_readable(0.0)]
    assert gone == silent[:2]


# ------------------------------------------------------------------------- from the worker's side


@pytest.mark.parametrize(
    ("answer", "error", "what"),
    [
        (messages.Refused("we are closed"), ProtocolError, "refuses us: we are closed"),
        (messages.Challenge(bytes(32), bytes(32)), ProtocolError, "has another token"),
        (messages.CancelTurn(1), ProtocolError, "expected a challenge from "),
        (messages.AbandonReport(1, 0.5), ProtocolError, "expected a message of a server"),
        (messages.Refused("x" * STRANGER_LIMIT), ProtocolError, "a frame must have 1 to 256 bytes"),
        (None, PeerLost, "the connection was closed"),
    ],
    ids=["refused", "another token", "no challenge", "no server", "too long", "closed"],
)
def test_a_worker_stands_whatever_answers_in_place_of_a_server(
    server_socket, address, answer, error, what
):
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


def test_what_a_worker_said_to_a_server_without_the_token_is_of_no_use(server_socket, address):
    """Nothing: it proves itself only after the server has."""
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
