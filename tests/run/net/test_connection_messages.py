# SPDX-License-Identifier: BSD-3-Clause
"""The messages of connections have fixed numbers, and strangers may send only a few short ones."""

import pytest

from message_examples import EXAMPLES
from paceline.errors import ProtocolError
from paceline.run.net import connection_messages, messages
from paceline.run.net.channel import STRANGER_LIMIT
from paceline.run.net.messages import (
    decode_server,
    decode_stranger,
    decode_worker,
    encode,
)

NONCE, SESSION = b"n" * 32, b"s" * 32
FROM_STRANGERS = [
    messages.Hello(messages.PROTOCOL, NONCE),
    messages.Proof(NONCE),
    messages.Proof(NONCE, SESSION),
]
FROM_THE_SERVER = [
    messages.Challenge(NONCE, NONCE),
    messages.Refused("closed"),
    messages.SlotShared(),
    messages.BufferShared(3),
    messages.SendPayload(3),
    messages.StopPayload(3),
    messages.DataAttached(),
]


def test_every_message_of_a_connection_is_one_of_the_protocol():
    own = {
        kind
        for name in connection_messages.__all__
        if isinstance(kind := getattr(connection_messages, name), type)
        and issubclass(kind, connection_messages.Message)
        and kind is not connection_messages.Message
    }
    assert own <= {type(example) for example in EXAMPLES}
    assert own == {type(example) for example in (*FROM_STRANGERS, *FROM_THE_SERVER)}


@pytest.mark.parametrize("message", FROM_STRANGERS, ids=str)
def test_stranger_may_send_what_the_handshake_needs(message):
    assert decode_stranger(encode(message)) == message
    assert len(encode(message)) <= STRANGER_LIMIT


@pytest.mark.parametrize("message", FROM_THE_SERVER, ids=str)
def test_only_the_server_may_send_these(message):
    assert decode_server(encode(message)) == message
    for decode in (decode_stranger, decode_worker):
        with pytest.raises(ProtocolError):
            decode(encode(message))


@pytest.mark.parametrize("message", FROM_STRANGERS, ids=str)
def test_handshake_is_over_once_a_worker_is_known(message):
    with pytest.raises(ProtocolError):
        decode_worker(encode(message))


@pytest.mark.parametrize(
    "bad",
    [
        [3, b"n" * 31],
        [3, b"n" * 33],
        [3, NONCE, b"s" * 33],
        [3, NONCE, "text"],
        [3, NONCE, SESSION, 1],
        [3],
        [1, messages.PROTOCOL, b""],
        [1, -1, NONCE],
    ],
    ids=str,
)
def test_malformed_handshake_breaks_the_protocol(bad):
    with pytest.raises(ProtocolError, match="expected a message from an unauthenticated client"):
        decode_stranger(encode(bad))


@pytest.mark.parametrize("bad", [[27], [27, -1], [27, "1"], [28, 1.5], [29, 1]], ids=str)
def test_malformed_request_for_a_payload_breaks_the_protocol(bad):
    with pytest.raises(ProtocolError, match="expected a message from the server"):
        decode_server(encode(bad))


def test_numbers_of_messages_never_change():
    tags = {type(m).__name__: type(m).__struct_config__.tag for m in FROM_THE_SERVER}
    assert tags == {
        "Challenge": 2,
        "Refused": 6,
        "SlotShared": 18,
        "BufferShared": 19,
        "SendPayload": 27,
        "StopPayload": 28,
        "DataAttached": 29,
    }
