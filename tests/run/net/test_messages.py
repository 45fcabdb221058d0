# SPDX-License-Identifier: BSD-3-Clause
"""Bytes decode to exactly one message of the expected side, or raise `ProtocolError`."""

from math import inf, nan
from typing import get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from message_examples import EXAMPLES, SPEC, any_message, unhurried
from paceline.errors import ProtocolError
from paceline.run.net import messages
from paceline.run.tensors.state_spec import OptionChange

SIDES = [
    (messages.decode_stranger, get_args(messages.FromStranger)),
    (messages.decode_worker, get_args(messages.FromWorker)),
    (messages.decode_server, get_args(messages.FromServer)),
]
DECODE = {kind: decode for decode, kinds in SIDES for kind in kinds}

every_example = pytest.mark.parametrize("example", EXAMPLES, ids=lambda m: type(m).__name__)


def raw(message):
    """Return the message as plain lists, which a test can modify."""
    return msgspec.msgpack.decode(messages.encode(message))


def refused(decode, body):
    """Return why these bytes are refused; any error but ProtocolError is a failure."""
    with pytest.raises(ProtocolError) as caught:
        decode(body if isinstance(body, bytes) else msgspec.msgpack.encode(body))
    return str(caught.value)


def test_every_message_has_an_example_and_a_unique_tag():
    assert {type(example) for example in EXAMPLES} == set(DECODE)
    tags = [raw(example)[0] for example in EXAMPLES]
    assert len(set(tags)) == len(tags)


@pytest.mark.parametrize("kind", DECODE, ids=lambda kind: kind.__name__)
def test_every_message_survives_a_round_trip(kind):
    @unhurried
    @given(any_message(kind))
    def check(message):
        found = DECODE[kind](messages.encode(message))
        assert found == message
        assert type(found) is kind

    check()


@every_example
def test_message_of_another_side_is_refused(example):
    body = messages.encode(example)
    for decode, kinds in SIDES:
        if type(example) not in kinds:
            assert "expected a message from " in refused(decode, body)


@every_example
def test_truncated_message_is_refused(example):
    body = messages.encode(example)
    for length in range(len(body)):
        refused(DECODE[type(example)], body[:length])


@every_example
def test_trailing_bytes_and_fields_are_refused(example):
    decode = DECODE[type(example)]
    refused(decode, messages.encode(example) + b"\xc0")
    whole = [*raw(example)]
    known = 1 + len(example.__struct_fields__)
    refused(decode, whole + [None] * (known + 1 - len(whole)))


@every_example
def test_field_of_a_wrong_type_is_refused(example):
    """No field accepts an extension, a negative number or this map."""
    good = raw(example)
    for i in range(1, len(good)):
        for wrong in (msgspec.msgpack.Ext(1, b""), -1, {"x": "y"}):
            refused(DECODE[type(example)], [*good[:i], wrong, *good[i + 1 :]])


@every_example
def test_odd_nested_value_is_refused_or_survives_a_round_trip(example):
    good, decode = raw(example), DECODE[type(example)]

    @unhurried
    @given(st.lists(st.integers(0, 6), min_size=1, max_size=5), st.sampled_from(ODD))
    def check(path, value):
        body = msgspec.msgpack.encode(replaced(good, path, value))
        try:
            message = decode(body)
        except ProtocolError:
            return
        # Compare bytes, because a NaN is not equal to itself.
        assert messages.encode(decode(messages.encode(message))) == messages.encode(message)

    check()


ODD = [
    None,
    True,
    -1,
    0,
    2**53 + 1,
    2**64 - 1,
    -(2**63),
    1.5,
    nan,
    inf,
    "",
    "x" * 5000,
    b"",
    [],
    {},
]


def replaced(tree, path, value):
    """Return the tree with another value at that path."""
    if not isinstance(tree, list) or not tree or not path:
        return value
    i = path[0] % len(tree)
    return [*tree[:i], replaced(tree[i], path[1:], value), *tree[i + 1 :]]


GRADIENT = [10, 1, 0, 0, 1, 0.5, 1.0]

BAD = {
    "no bytes": b"",
    "not an array": b"\xc0",
    "an empty array": b"\x90",
    "a string as tag": ["10", *GRADIENT[1:]],
    "tag 0": [0, *GRADIENT[1:]],
    "an unknown tag": [99, *GRADIENT[1:]],
    "a negative turn": [10, -1, 0, 0, 1, 0.5, 1.0],
    "a turn above the limit": [10, 2**53 + 1, 0, 0, 1, 0.5, 1.0],
    "a fractional turn": [10, 1.5, 0, 0, 1, 0.5, 1.0],
    "a boolean turn": [10, True, 0, 0, 1, 0.5, 1.0],
    "no samples": [10, 1, 0, 0, 0, 0.5, 1.0],
    "a time that is NaN": [10, 1, 0, 0, 1, nan, 1.0],
    "an infinite time": [10, 1, 0, 0, 1, inf, 1.0],
    "a negative time": [10, 1, 0, 0, 1, -0.5, 1.0],
    "a norm that is NaN": [10, 1, 0, 0, 1, 0.5, nan],
    "an infinite norm": [10, 1, 0, 0, 1, 0.5, inf],
    "a negative parameter": [*GRADIENT, [-1]],
    "an option without a value": [*GRADIENT, [], [[0, 0, "lr"]]],
    "an option that is a map": [*GRADIENT, [], [[0, 0, "lr", {"a": 1}]]],
    "an option with a long name": [*GRADIENT, [], [[0, 0, "l" * 201, 1]]],
    "an option with a long string": [*GRADIENT, [], [[0, 0, "lr", "l" * 4097]]],
    "an option of many numbers": [*GRADIENT, [], [[0, 0, "lr", [0.0] * 65]]],
    "a logged string": [*GRADIENT, [], [], {"loss": "small"}],
    "a worker number above the limit": [4, 10**6, "1", raw(SPEC)],
    "an unknown kind of state": [12, "model", 0],
    "a string that is not UTF-8": b"\x93\x0c\xa9\xff\xff\xff\xff\xff\xff\xff\xff\xff\x00",
    "endless nesting": b"\x91" * 100_000,
    "an array longer than the message": b"\xdd\xff\xff\xff\xff",
    "a string longer than the message": b"\x93\x0c\xdb\xff\xff\xff\xff",
}


@pytest.mark.parametrize("name", BAD)
def test_malformed_message_is_refused(name):
    assert refused(messages.decode_worker, BAD[name]).startswith(
        "expected a message from a worker: "
    )


@pytest.mark.parametrize("size", [0, 31, 33])
def test_nonce_and_proof_have_32_bytes(size):
    refused(messages.decode_stranger, [1, messages.PROTOCOL, bytes(size)])
    refused(messages.decode_stranger, [3, bytes(size)])


def test_logged_scalars_may_be_nan_or_infinite():
    sent = messages.GradientReport(1, 0, 0, 1, 0.5, 1.0, scalars={"a": inf, "b": -inf, "c": nan})
    found = messages.decode_worker(messages.encode(sent)).scalars
    assert (found["a"], found["b"]) == (inf, -inf)
    assert found["c"] != found["c"]


def test_option_values_keep_their_type():
    for value in (None, True, 0, 1, 1.0, -(2**63), "a", (), (0.9, 0.999)):
        sent = messages.GradientReport(
            1, 0, 0, 1, 0.5, 1.0, options=(OptionChange(0, 0, "x", value),)
        )
        [option] = messages.decode_worker(messages.encode(sent)).options
        assert (type(option.value), option.value) == (type(value), value)
