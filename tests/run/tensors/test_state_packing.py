# SPDX-License-Identifier: BSD-3-Clause
"""States survive packing unchanged; what wouldn't is refused."""

import copy
import enum
import os
from collections import OrderedDict
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal
from math import inf, isnan, nan

import msgspec
import numpy as np
import pytest
import torch
import torch._dynamo  # optimizers import it, and it sets an environment variable
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from message_examples import unhurried
from paceline.errors import ProtocolError, SpecError
from paceline.run.tensors.shared_region import Region
from paceline.run.tensors.state_packing import pack, unpack


def round_trip(tree):
    body, fd = pack(tree, "state")
    try:
        return unpack(body, fd)
    finally:
        os.close(fd)


def same(a, b):
    """Return whether the trees are equal; a tuple equals its list, and a NaN a NaN."""
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a.cpu(), b)
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and (a == b or (isnan(a) and isnan(b)))


OPTIMIZERS = {
    name: kind
    for name in dir(torch.optim)
    if isinstance(kind := getattr(torch.optim, name), type)
    and issubclass(kind, torch.optim.Optimizer)
    and name not in ("Optimizer", "SparseAdam")  # the latter needs sparse gradients
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_state_of_every_torch_optimizer_survives(name):
    def make():
        torch.manual_seed(0)
        model = nn.Linear(3, 2, bias=False)
        return model, OPTIMIZERS[name](model.parameters(), lr=0.1)

    def step(model, optimizer):
        def closure():
            optimizer.zero_grad()
            loss = model(torch.arange(12.0).reshape(4, 3)).square().mean()
            loss.backward()
            return loss

        closure()
        optimizer.step(closure)

    model, optimizer = make()
    step(model, optimizer)
    state = optimizer.state_dict()
    found = round_trip(state)
    assert same(state, found)

    other_model, other = make()
    other_model.load_state_dict(copy.deepcopy(model.state_dict()))
    other.load_state_dict(found)
    step(model, optimizer)
    step(other_model, other)
    assert torch.equal(model.weight, other_model.weight)


tensors = st.builds(
    lambda dtype, shape: torch.arange(torch.Size(shape).numel()).reshape(shape).to(dtype),
    st.sampled_from(
        [
            torch.float32,
            torch.float64,
            torch.bfloat16,
            torch.float16,
            torch.int64,
            torch.int8,
            torch.uint8,
            torch.bool,
            torch.complex64,
        ]
    ),
    st.lists(st.integers(0, 3), max_size=3),
)
plain = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**63), 2**64 - 1), st.floats(), st.text(max_size=5)
)
keys = st.one_of(st.integers(0, 9), st.text(max_size=5))
trees = st.recursive(
    plain | tensors,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(keys, inner, max_size=4),
    max_leaves=10,
)


@unhurried
@given(trees)
def test_any_tree_survives(tree):
    assert same(tree, round_trip(tree))


@pytest.mark.parametrize(
    ("value", "found"),
    [
        ((1, (2.5, None)), [1, [2.5, None]]),
        (OrderedDict(a=1), {"a": 1}),
        (np.float64(0.5), 0.5),
        (np.float32(0.5), 0.5),
        (np.int64(5), 5),
        ([inf, -inf, nan], [inf, -inf, nan]),
    ],
)
def test_value_with_a_plain_equivalent_comes_back_as_that(value, found):
    assert same(found, round_trip(value))


def test_tensors_come_back_dense_with_their_order_of_dimensions():
    """Fused optimizers assume that a state has the strides of its parameter."""
    base = torch.arange(24.0).reshape(4, 6)
    image = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    for tensor, stride in (
        (base.t(), (1, 6)),
        (base[:, ::2], (3, 1)),
        (base.t()[::2], (1, 3)),
        (base[0, 0].expand(3), (1,)),
        (nn.Parameter(base), (6, 1)),
        (image, image.stride()),
        (torch.empty(3, 0, 2).transpose(0, 2), None),
    ):
        found = round_trip(tensor)
        assert torch.equal(found, tensor)
        assert stride is None or found.stride() == stride
        assert not found.requires_grad


def test_sparse_tensor_is_refused():
    with pytest.raises(SpecError, match="the state contains a sparse tensor"):
        pack([torch.eye(3).to_sparse()], "state")


def test_unpacked_tensor_is_a_copy():
    given = torch.ones(3)
    body, fd = pack([given], "state")
    [first], [second] = unpack(body, fd), unpack(body, fd)
    os.close(fd)
    first.fill_(2.0)
    assert (given.tolist(), second.tolist()) == ([1.0] * 3, [1.0] * 3)


@dataclass
class Record:
    value: int = 1


class Colour(enum.Enum):
    RED = 1


@pytest.mark.parametrize(
    ("value", "name"),
    [
        ({1, 2}, "set"),
        (b"bytes", "bytes"),
        (1j, "complex"),
        (object(), "object"),
        (datetime(2026, 1, 1), "datetime"),
        (Decimal("0.1"), "Decimal"),
        (Record(), "Record"),
        (Colour.RED, "Colour"),
        (np.arange(3), "ndarray"),
        (torch.float32, "dtype"),
        (lambda: 0, "function"),
        ({(1, 2): 3}, "tuple"),
        ({torch.tensor(1): 2}, "Tensor"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_value_that_would_not_survive_is_refused_by_name(value, name):
    for tree in (value, {"state": [value]}):
        with pytest.raises(SpecError, match=rf"the state contains a .*{name}, which can't be sent"):
            pack(tree, "state")


def test_number_beyond_64_bits_is_refused():
    with pytest.raises(SpecError, match="the state contains a number that can't be sent"):
        pack({"seed": 2**64}, "state")


# --------------------------------------------------------------------------------- what is no state


def tensor_at(*where):
    return msgspec.msgpack.Ext(1, msgspec.msgpack.encode(where))


F32 = "torch.float32"

BAD = {
    "nothing": b"",
    "cut short": b"\x92\x01",
    "more than a tree": b"\x01\x02",
    "too deep": b"\x91" * 100_000,
    "a text that is no text": b"\xa2\xff\xff",
    "a tree as a key": b"\x81\x81\x01\x02\x03",
    "another extension": msgspec.msgpack.encode(msgspec.msgpack.Ext(9, b"")),
    "an extension of nothing": msgspec.msgpack.encode(msgspec.msgpack.Ext(1, b"")),
    "too few fields": tensor_at(F32, (2,)),
    "too many fields": tensor_at(F32, (2,), 0, 0),
    "no type": tensor_at("torch.nonsense", (2,), 0),
    "a type that is a function": tensor_at("torch.zeros", (2,), 0),
    "a quantized type": tensor_at("torch.qint8", (2,), 0),
    "a shape that is no shape": tensor_at(F32, "ab", 0),
    "a negative shape": tensor_at(F32, (-1,), 0),
    "two negative sizes": tensor_at(F32, (-2, -4), 0),
    "a shape beyond 64 bits": tensor_at(F32, (2**32, 2**32), 0),
    "a shape that overflows to nothing": tensor_at(F32, (2**53, 2**53, 0), 0),
    "a size beyond 64 bits": tensor_at(F32, (2**63,), 0),
    "too large": tensor_at(F32, (17,), 0),
    "too large from there": tensor_at(F32, (2,), 60),
    "a negative offset": tensor_at(F32, (2,), -4),
    "an odd offset": tensor_at(F32, (2,), 1),
    "an offset beyond": tensor_at(F32, (0,), 2**40),
    "strides that are none": tensor_at(F32, (2,), 0, 1),
    "too few strides": tensor_at(F32, (2, 2), 0, (1,)),
    "too many strides": tensor_at(F32, (2, 2), 0, (2, 1, 1)),
    "a negative stride": tensor_at(F32, (2, 2), 0, (2, -1)),
    "strides that lead outside": tensor_at(F32, (2, 2), 0, (3, 1)),
    "strides beyond 64 bits": tensor_at(F32, (2, 8), 0, (2**53, 2**53)),
    "two on one memory": [tensor_at(F32, (8,), 0), tensor_at(F32, (8,), 4)],
    "the same many times": [tensor_at(F32, (16,), 0)] * 1000,
}


@pytest.mark.parametrize("name", BAD)
def test_malformed_state_is_refused(name):
    body = BAD[name] if isinstance(BAD[name], bytes) else msgspec.msgpack.encode(BAD[name])
    _, fd = Region.create(64, "test")
    with pytest.raises(ProtocolError):
        unpack(body, fd)
    os.close(fd)
