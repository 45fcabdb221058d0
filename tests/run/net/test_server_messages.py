# SPDX-License-Identifier: BSD-3-Clause
"""What the messages between servers may contain, and who may send them."""

from math import inf, isnan, nan

import pytest

from message_examples import EXAMPLES
from paceline.errors import ProtocolError
from paceline.run.net import server_messages as between
from paceline.run.net.messages import decode_server, decode_worker, encode

FROM_OTHERS = between.FromOtherServer.__args__
TO_OTHERS = between.ToOtherServer.__args__


def examples(kinds):
    return [one for one in EXAMPLES if type(one) in kinds]


def test_each_message_has_one_direction_and_an_example():
    named = {getattr(between, name) for name in between.__all__ if not name.endswith("OtherServer")}
    assert {*FROM_OTHERS, *TO_OTHERS} == named
    assert not {*FROM_OTHERS} & {*TO_OTHERS}
    assert {type(one) for one in examples(named)} == named


@pytest.mark.parametrize("message", examples(FROM_OTHERS), ids=lambda one: type(one).__name__)
def test_only_the_head_receives_what_other_servers_send(message):
    assert decode_worker(encode(message)) == message
    with pytest.raises(ProtocolError):
        decode_server(encode(message))


@pytest.mark.parametrize("message", examples(TO_OTHERS), ids=lambda one: type(one).__name__)
def test_only_other_servers_receive_what_the_head_sends(message):
    assert decode_server(encode(message)) == message
    with pytest.raises(ProtocolError):
        decode_worker(encode(message))


@pytest.mark.parametrize(
    "message",
    [
        between.OpenPeer(1, 0, bytes(33)),
        between.AddPart(1, -1, 0, 1, 1.0, ()),
        between.AddPart(1, 0, 0, 1, -0.5, ()),
        between.StepUpdate(1, -1.0, ()),
        between.ReducePart(1, (1_000_000,), (1,), (1.0,), (1.0,)),
        between.ExpectPart(-1, 1, 0),
        between.LoadPart(-1),
    ],
    ids=lambda one: type(one).__name__,
)
def test_impossible_value_is_refused(message):
    with pytest.raises(ProtocolError):
        decode_server(encode(message))


@pytest.mark.parametrize("number", [-1, 1_000_000])
def test_impossible_number_of_a_server_is_refused(number):
    join = next(one for one in EXAMPLES if isinstance(one, between.JoinAsServer))
    with pytest.raises(ProtocolError):
        decode_worker(
            encode(between.JoinAsServer(number, join.release, join.spec, (True,), join.address))
        )


def test_squares_travel_exactly():
    squares = {0: ((0.1, 1e-310, inf), ()), 3: ((1 / 3,),)}
    assert decode_worker(encode(between.PartReduced(8, squares))).squares == squares
    [[found]] = decode_worker(encode(between.PartReduced(8, {0: ((nan,),)}))).squares[0]
    assert isnan(found)
