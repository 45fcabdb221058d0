# SPDX-License-Identifier: BSD-3-Clause
"""Both sides prove that they know the token, or no word of them is heard."""

import secrets
import socket
from concurrent.futures import ThreadPoolExecutor

import pytest

from paceline.errors import PeerLost, ProtocolError
from paceline.run import door as door_room
from paceline.run import wire
from paceline.run.channel import (
    STRANGER_LIMIT,
    Challenger,
    Channel,
    connect,
    listen,
    new_token,
)
from paceline.run.door import Door
from paceline.run.peers import STRANGERS_MAX
from strangers import prove

TOKEN = new_token()


@pytest.fixture(params=["unix", "tcp"])
def listener(request):
    name = f"unix:@paceline-test-{secrets.token_hex(8)}"
    with listen(name if request.param == "unix" else "tcp:127.0.0.1:0") as listener:
        yield listener


@pytest.fixture
def address(listener):
    name = listener.getsockname()
    return f"unix:@{name[1:].decode()}" if isinstance(name, bytes) else f"tcp:{name[0]}:{name[1]}"


@pytest.fixture
def door(listener):
    door = Door(listener, TOKEN)
    yield door
    door.shut()


@pytest.fixture
def knock(listener):
    """Make strangers that say what a test wants."""
    made = []

    def make():
        sock = socket.socket(listener.family, socket.SOCK_STREAM)
        sock.connect(listener.getsockname())
        made.append(Channel(sock, wire.decode_server, STRANGER_LIMIT))
        return made[-1]

    yield make
    for channel in made:
        channel.close()


def attend(door, refusals=None):
    """Hear whoever has something to say, as the server does; return what workers said."""
    said = []
    for peer in door.wait(1.0):
        try:
            said += door.hear(peer)
        except ProtocolError as error:
            door.close(peer, str(error))
            if refusals is not None:
                refusals.append(str(error))
        except PeerLost:
            door.close(peer)
    return said


def ask(door, channel, *messages):
    """Send these, and receive the answer to the last."""
    for message in messages:
        channel.send(message)
    while not channel.wait_readable(0.0):
        attend(door)
    return channel.receive()


HELLO = wire.Hello(wire.PROTOCOL, bytes(32))


def test_two_that_have_the_same_token_know_each_other(door, address):
    with ThreadPoolExecutor(1) as pool:
        connecting = pool.submit(connect, address, TOKEN)
        while not connecting.done():
            attend(door)
        channel = connecting.result()
    channel.send(wire.Abandoned(1, 0.5))
    said = []
    while not said:
        said += attend(door)
    assert said == [wire.Abandoned(1, 0.5)]
    channel.close()


def test_a_worker_finds_out_that_the_server_has_another_token(door, address):
    refusals = []
    with ThreadPoolExecutor(1) as pool:
        connecting = pool.submit(connect, address, new_token())
        while not connecting.done():
            attend(door, refusals)
    with pytest.raises(ProtocolError, match=f"the server at {address} has another token"):
        connecting.result()
    assert refusals == []  # it never came to a proof


def test_a_stranger_with_another_token_is_refused(door, knock):
    stranger = knock()
    challenge = ask(door, stranger, HELLO)
    refused = ask(door, stranger, prove(new_token(), challenge))
    assert refused == wire.Refused("it has another token")
    with pytest.raises(PeerLost):
        stranger.receive()


def test_a_proof_that_was_overheard_is_of_no_use(door, knock):
    challenge = ask(door, first := knock(), HELLO)
    overheard = prove(TOKEN, challenge)
    first.send(overheard)
    attend(door)
    second = knock()
    assert ask(door, second, HELLO).nonce != challenge.nonce
    assert ask(door, second, overheard) == wire.Refused("it has another token")


def test_the_proof_of_the_server_is_of_no_use_to_a_stranger(door, knock):
    stranger = knock()
    challenge = ask(door, stranger, HELLO)
    assert ask(door, stranger, wire.Proof(challenge.proof)).reason == "it has another token"


def test_the_server_does_not_prove_what_it_was_asked_to_prove_itself(door, knock):
    """Asked on a second connection for a proof of the challenge of the first."""
    first, second = knock(), knock()
    challenge = ask(door, first, HELLO)
    stolen = ask(door, second, wire.Hello(wire.PROTOCOL, challenge.nonce))
    assert ask(door, first, wire.Proof(stolen.proof)).reason == "it has another token"


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([wire.Hello(wire.PROTOCOL + 1, bytes(32))], "it speaks protocol 2, the run speaks 1"),
        ([wire.Hello(0, bytes(32))], "it speaks protocol 0, the run speaks 1"),
        ([wire.Proof(bytes(32))], "it wants to prove itself before it has said hello"),
        ([wire.Abandoned(1, 0.5)], "expected a message of a stranger: Invalid value 11"),
    ],
)
def test_who_does_not_begin_as_the_protocol_says_is_refused(door, knock, messages, reason):
    assert ask(door, knock(), *messages).reason.startswith(reason)


def test_hello_can_be_said_once(door, knock):
    stranger = knock()
    ask(door, stranger, HELLO)
    assert ask(door, stranger, HELLO) == wire.Refused("it said hello twice")


def test_who_is_known_need_not_say_hello_again(door, knock):
    stranger = knock()
    challenge = ask(door, stranger, HELLO)
    refused = ask(door, stranger, prove(TOKEN, challenge), HELLO)
    assert refused.reason.startswith("expected a message of a worker")


def test_a_stranger_that_says_nothing_is_sent_away_and_who_is_known_may_stay(
    door, knock, monkeypatch
):
    silent, slow, known = knock(), knock(), knock()
    ask(door, slow, HELLO)
    known.send(prove(TOKEN, ask(door, known, HELLO)))
    attend(door)
    monkeypatch.setattr(door_room, "STRANGER_PATIENCE_S", -1.0)  # as if it had passed
    door.wait(0.0)
    for stranger in (silent, slow):
        assert stranger.receive() == wire.Refused("it took too long to introduce itself")
        with pytest.raises(PeerLost):
            stranger.receive()
    known.send(wire.Abandoned(1, 0.5))
    assert attend(door) == [wire.Abandoned(1, 0.5)]


def test_a_stranger_that_has_spoken_while_the_server_was_busy_is_heard(door, knock, monkeypatch):
    stranger = knock()
    attend(door)
    stranger.send(HELLO)
    monkeypatch.setattr(door_room, "STRANGER_PATIENCE_S", -1.0)  # as if it had passed meanwhile
    attend(door)
    assert isinstance(stranger.receive(), wire.Challenge)


def test_of_many_strangers_the_oldest_must_go(door, knock):
    known, *silent = [knock() for _ in range(STRANGERS_MAX + 3)]
    known.send(HELLO)
    while not known.wait_readable(0.0):
        attend(door)
    known.send(prove(TOKEN, known.receive()))
    while door.wait(0.0) or not silent[1].wait_readable(0.0):
        attend(door)
    gone = [stranger for stranger in silent if stranger.wait_readable(0.0)]
    assert gone == silent[:2]


# ------------------------------------------------------------------------- from the worker's side


@pytest.mark.parametrize(
    ("answer", "error", "what"),
    [
        (wire.Refused("we are closed"), ProtocolError, "refuses us: we are closed"),
        (wire.Challenge(bytes(32), bytes(32)), ProtocolError, "has another token"),
        (wire.Cancel(1), ProtocolError, "expected a challenge from "),
        (wire.Abandoned(1, 0.5), ProtocolError, "expected a message of a server"),
        (wire.Refused("x" * STRANGER_LIMIT), ProtocolError, "a frame must have 1 to 256 bytes"),
        (None, PeerLost, "the connection was closed"),
    ],
    ids=["refused", "another token", "no challenge", "no server", "too long", "closed"],
)
def test_a_worker_stands_whatever_answers_in_place_of_a_server(
    listener, address, answer, error, what
):
    listener.setblocking(True)
    with ThreadPoolExecutor(1) as pool:
        connecting = pool.submit(connect, address, TOKEN)
        sock, _ = listener.accept()
        channel = Channel(sock, wire.decode_stranger, STRANGER_LIMIT)
        assert isinstance(channel.receive(), wire.Hello)
        if answer is not None:
            channel.send(answer)
        channel.close()
    with pytest.raises(error, match=what):
        connecting.result()


def test_what_a_worker_said_to_a_server_without_the_token_is_of_no_use(listener, address):
    """Nothing: it proves itself only after the server has."""
    listener.setblocking(True)
    with ThreadPoolExecutor(1) as pool:
        connecting = pool.submit(connect, address, TOKEN)
        channel = Channel(listener.accept()[0], wire.decode_stranger, STRANGER_LIMIT)
        hello = channel.receive()
        channel.send(Challenger(new_token()).answer(hello))
        with pytest.raises(PeerLost):
            channel.receive()
        channel.close()
    assert isinstance(connecting.exception(), ProtocolError)
