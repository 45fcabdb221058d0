# SPDX-License-Identifier: BSD-3-Clause
"""Bytes are exactly a message of the side that is expected, or a `ProtocolError`."""

from math import inf, nan
from typing import get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from message_examples import CONTENTS, EXAMPLES, any_message, unhurried
from paceline.errors import ProtocolError
from paceline.run.net import messages
from paceline.run.tensors.state_spec import OptionChange

SIDES = [
    (messages.decode_stranger, get_args(messages.FromStranger)),
    (messages.decode_worker, get_args(messages.FromWorker)),
    (messages.decode_server, get_args(messages.FromServer)),
]
DECODE = {kind: decode for decode, kinds in SIDES for kind in kinds}

each_example = pytest.mark.parametrize("example", EXAMPLES, ids=lambda m: type(m).__name__)


def raw(message):
    """The message as plain lists, which a test can spoil."""
    return msgspec.msgpack.decode(messages.encode(message))


def refused(decode, body):
    """Why these bytes are refused; any error but the right one is a failure."""
    with pytest.raises(ProtocolError) as caught:
        decode(body if isinstance(body, bytes) else msgspec.msgpack.encode(body))
    return str(caught.value)


def test_there_is_an_example_of_every_message_and_all_tags_differ():
    assert {type(example) for example in EXAMPLES} == set(DECODE)
    tags = [raw(example)[0] for example in EXAMPLES]
    assert len(set(tags)) == len(tags)


@pytest.mark.parametrize("kind", DECODE, ids=lambda kind: kind.__name__)
def test_every_message_comes_back_as_it_was(kind):
    @unhurried
    @given(any_message(kind))
    def comes_back(message):
        found = DECODE[kind](messages.encode(message))
        assert found == message
        assert type(found) is kind

    comes_back()


@each_example
def test_a_message_of_another_side_is_refused(example):
    body = messages.encode(example)
    for decode, kinds in SIDES:
        if type(example) not in kinds:
            assert "expected a message of a" in refused(decode, body)


@each_example
def test_a_message_that_was_cut_short_is_refused(example):
    body = messages.encode(example)
    for length in range(len(body)):
        refused(DECODE[type(example)], body[:length])


@each_example
def test_anything_after_a_message_is_refused(example):
    decode = DECODE[type(example)]
    refused(decode, messages.encode(example) + b"\xc0")
    whole = [*raw(example)]
    known = 1 + len(example.__struct_fields__)
    refused(decode, whole + [None] * (known + 1 - len(whole)))


@each_example
def test_a_field_of_a_wrong_type_is_refused(example):
    """No field is an extension, so this is wrong everywhere; and so is what no field may be."""
    good = raw(example)
    for i in range(1, len(good)):
        for wrong in (msgspec.msgpack.Ext(1, b""), -1, {"x": "y"}):
            refused(DECODE[type(example)], [*good[:i], wrong, *good[i + 1 :]])


@each_example
def test_a_field_of_a_wrong_type_deep_inside_is_refused_or_means_what_it_says(example):
    """Whatever is put in whose place, what is decoded is a message that comes back as it was."""
    good, decode = raw(example), DECODE[type(example)]

    @unhurried
    @given(st.lists(st.integers(0, 6), min_size=1, max_size=5), st.sampled_from(ODD))
    def spoil(path, value):
        body = msgspec.msgpack.encode(spoiled(good, path, value))
        try:
            message = decode(body)
        except ProtocolError:
            return
        # As bytes: a NaN is not equal to itself.
        assert messages.encode(decode(messages.encode(message))) == messages.encode(message)

    spoil()


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


def spoiled(tree, path, value):
    """The tree with another value at that place."""
    if not isinstance(tree, list) or not tree or not path:
        return value
    i = path[0] % len(tree)
    return [*tree[:i], spoiled(tree[i], path[1:], value), *tree[i + 1 :]]


GRADIENT = [10, 1, 0, 0, 1, 0.5, 1.0]

BAD = {
    "no message at all": b"",
    "not an array": b"\xc0",
    "an empty array": b"\x90",
    "a text as tag": ["10", *GRADIENT[1:]],
    "tag 0": [0, *GRADIENT[1:]],
    "an unknown tag": [99, *GRADIENT[1:]],
    "a negative turn": [10, -1, 0, 0, 1, 0.5, 1.0],
    "a turn beyond all numbers": [10, 2**53 + 1, 0, 0, 1, 0.5, 1.0],
    "a turn that is not whole": [10, 1.5, 0, 0, 1, 0.5, 1.0],
    "a turn that is true": [10, True, 0, 0, 1, 0.5, 1.0],
    "no samples": [10, 1, 0, 0, 0, 0.5, 1.0],
    "time that is not a number": [10, 1, 0, 0, 1, nan, 1.0],
    "time without end": [10, 1, 0, 0, 1, inf, 1.0],
    "time that runs backwards": [10, 1, 0, 0, 1, -0.5, 1.0],
    "a norm that is not a number": [10, 1, 0, 0, 1, 0.5, nan],
    "an infinite norm": [10, 1, 0, 0, 1, 0.5, inf],
    "a negative parameter": [*GRADIENT, [-1]],
    "an option without a value": [*GRADIENT, [], [[0, 0, "lr"]]],
    "an option that is a tree": [*GRADIENT, [], [[0, 0, "lr", {"a": 1}]]],
    "an option with a long name": [*GRADIENT, [], [[0, 0, "l" * 201, 1]]],
    "an option with a long text": [*GRADIENT, [], [[0, 0, "lr", "l" * 4097]]],
    "an option of many numbers": [*GRADIENT, [], [[0, 0, "lr", [0.0] * 65]]],
    "a text that was logged": [*GRADIENT, [], [], {"loss": "small"}],
    "a worker beyond all workers": [4, 10**6, "1", raw(CONTENTS)],
    "a state of something else": [12, "model", 0],
    "a text that is no text": b"\x93\x0c\xa9\xff\xff\xff\xff\xff\xff\xff\xff\xff\x00",
    "brackets without end": b"\x91" * 100_000,
    "an array of a size that is not there": b"\xdd\xff\xff\xff\xff",
    "a text of a size that is not there": b"\x93\x0c\xdb\xff\xff\xff\xff",
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_not_exactly_a_message_is_refused(name):
    assert refused(messages.decode_worker, BAD[name]).startswith("expected a message of a worker: ")


@pytest.mark.parametrize("size", [0, 31, 33])
def test_a_nonce_and_a_proof_have_32_bytes(size):
    refused(messages.decode_stranger, [1, messages.PROTOCOL, bytes(size)])
    refused(messages.decode_stranger, [3, bytes(size)])


def test_what_a_script_logs_may_be_anything_that_a_float_may_be():
    sent = messages.GradientReport(1, 0, 0, 1, 0.5, 1.0, scalars={"a": inf, "b": -inf, "c": nan})
    found = messages.decode_worker(messages.encode(sent)).scalars
    assert (found["a"], found["b"]) == (inf, -inf)
    assert found["c"] != found["c"]


def test_values_of_options_keep_their_kind():
    for value in (None, True, 0, 1, 1.0, -(2**63), "a", (), (0.9, 0.999)):
        sent = messages.GradientReport(
            1, 0, 0, 1, 0.5, 1.0, options=(OptionChange(0, 0, "x", value),)
        )
        [option] = messages.decode_worker(messages.encode(sent)).options
        assert (type(option.value), option.value) == (type(value), value)
