# SPDX-License-Identifier: BSD-3-Clause
"""Parts are disjoint, cover everything, are equally large, and have the bytes of the whole."""

from dataclasses import astuple
from itertools import pairwise
from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from message_examples import unhurried
from paceline.run.net.in_process import PlainMemory
from paceline.run.tensors import layout
from paceline.run.tensors.layout import Layout, flat
from paceline.run.tensors.partition import Slice, partition
from paceline.run.tensors.state_spec import OptimizerSpec, StateSpec, TensorSpec
from paceline.run.tensors.sums import BLOCK, blocks, square

UNIT = 32


def spec(name, dtype, shape, order=()):
    """Describe a tensor whose dimensions are in this order in memory."""
    order = [i for i in order if i < len(shape)]
    order += [i for i in range(len(shape)) if i not in order]
    permuted = torch.empty([shape[i] for i in order], device="meta")
    stride = permuted.permute([order.index(i) for i in range(len(shape))]).stride()
    return TensorSpec(name, f"torch.{dtype}", tuple(shape), tuple(stride))


def specs_of(dtypes):
    shapes = st.lists(st.sampled_from([0, 1, 2, 3, 5, 17, 40]), max_size=3)
    one = st.builds(spec, st.just("x"), st.sampled_from(dtypes), shapes, st.permutations(range(3)))
    return st.lists(one, max_size=6).map(tuple)


trainable = specs_of(["float32", "float64", "bfloat16"])
contents = st.builds(
    StateSpec,
    st.lists(st.builds(OptimizerSpec, st.just("SGD"), trainable), max_size=3).map(tuple),
    trainable,
    specs_of(["int64", "uint8", "bool"]),
    trainable,
)


@st.composite
def partitions(draw):
    """Yield a description, and its parts."""
    whole = draw(contents)
    is_split = [draw(st.booleans()) for _ in whole.optimizers]
    unit = draw(st.sampled_from([32, 64, 96, 1024]))
    return whole, partition(whole, draw(st.integers(1, 5)), is_split, unit)


@pytest.fixture(autouse=True)
def _small_tensors_are_tiny(monkeypatch):
    monkeypatch.setattr(layout, "SMALL_BYTES", 256)


def counted(layout_):
    """Return memory of this layout in which every parameter has other numbers."""
    views = layout_.view(PlainMemory(layout_.size))
    number = 0
    for one in (one for own in views.flats for one in own):
        # Numbers of a bfloat16 are exact up to 256.
        one.copy_(torch.arange(number, number + one.numel()) % 251)
        number += one.numel()
    return views


def one_parameter(count, servers, dtype="float32", unit=UNIT):
    whole = StateSpec((OptimizerSpec("SGD", (spec("w", dtype, [count]),)),), (), (), ())
    return partition(whole, servers, [True], unit)


@unhurried
@given(partitions())
def test_every_element_of_every_parameter_is_on_exactly_one_server(drawn):
    whole, parts = drawn
    for index, optimizer in enumerate(whole.optimizers):
        covered = [[] for _ in optimizer.parameters]
        for part in parts:
            count = len(optimizer.parameters)
            if part.slices[index] is None:
                slices = [Slice(i, 0, prod(optimizer.parameters[i].shape)) for i in range(count)]
            else:
                slices = part.slices[index]
            assert len({one.parameter for one in slices}) == len(slices)
            for one in slices:
                covered[one.parameter].append((one.begin, one.end))
        for one, ranges in zip(optimizer.parameters, covered, strict=True):
            assert ranges[0][0] == 0
            assert ranges[-1][1] == prod(one.shape)
            assert all(a[1] == b[0] for a, b in pairwise(ranges))


@unhurried
@given(partitions())
def test_every_byte_with_padding_is_on_exactly_one_server(drawn):
    whole, parts = drawn
    for index, section in enumerate(Layout.of(whole).parameters):
        for number, block in enumerate(section.blocks):
            ranges = [part.ranges[index][number] for part in parts]
            assert sum(end - begin for begin, end in ranges) == block.numbers
            held = [one for one in ranges if one.begin < one.end]
            assert not held or (held[0].begin == 0 and held[-1].end == block.numbers)
            assert all(a.end == b.begin for a, b in pairwise(held))
    assert sum(part.layout.size for part in parts) == Layout.of(whole).size


@unhurried
@given(partitions())
def test_flats_of_a_part_are_those_of_the_whole(drawn):
    whole, parts = drawn
    everything = counted(Layout.of(whole))
    for part in parts:
        theirs = part.of(everything)
        own = part.layout.view(PlainMemory(part.layout.size))
        for name in ("flats", "small_flats", "parameters"):
            for a, b in zip(getattr(theirs, name), getattr(own, name), strict=True):
                assert [(x.dtype, x.shape, x.stride()) for x in a] == [
                    (x.dtype, x.shape, x.stride()) for x in b
                ]
        for name in ("buffers", "buffer_flats", "counters", "counter_flats"):
            a, b = getattr(theirs, name), getattr(own, name)
            assert [(x.dtype, x.shape) for x in a] == [(x.dtype, x.shape) for x in b]


@unhurried
@given(partitions())
def test_slices_contain_the_elements_that_they_name_after_a_copy_of_the_flats(drawn):
    whole, parts = drawn
    everything = counted(Layout.of(whole))
    for part in parts:
        own = part.layout.view(PlainMemory(part.layout.size))
        pairs = zip(part.of(everything).flats, own.flats, strict=True)
        for theirs, mine in (pair for ab in pairs for pair in zip(*ab, strict=True)):
            mine.copy_(theirs)
        for index, slices in enumerate(part.slices):
            parameters = everything.parameters[index]
            if slices is None:
                assert all(map(torch.equal, own.parameters[index], parameters))
                continue
            for one, (i, begin, end) in zip(own.parameters[index], slices, strict=True):
                assert torch.equal(one, flat(parameters[i])[begin:end])
        assert all(map(torch.equal, *_flat_lists(part.of(everything).parameters, own.parameters)))


def _flat_lists(*nested):
    return [[one for own in lists for one in own] for lists in nested]


@unhurried
@given(contents, st.integers(2, 5), st.sampled_from([32, 64, 1024]))
def test_servers_hold_equal_shares_to_within_a_unit(whole, servers, unit):
    parts = partition(whole, servers, [True] * len(whole.optimizers), unit)
    for index, section in enumerate(Layout.of(whole).parameters):
        sizes = [b.dtype.itemsize for b in section.blocks]
        held = [
            sum((r.end - r.begin) * size for r, size in zip(p.ranges[index], sizes, strict=True))
            for p in parts
        ]
        share = sum(held) / servers
        assert all(abs(one - share) < unit * max(sizes, default=1) for one in held)
        assert held[0] >= share
        assert [part.has(index) for part in parts] == [one > 0 for one in held]


@unhurried
@given(partitions())
def test_head_has_the_rest(drawn):
    whole, (head, *others) = drawn
    assert head.has(None) == (Layout.of(whole).size > 0)
    for name in ("buffers", "counters", "constants"):
        assert getattr(head.spec, name) == getattr(whole, name)
        assert not any(getattr(part.spec, name) for part in others)
    assert not any(part.layout.buffers.blocks or part.layout.counters.blocks for part in others)
    assert all(part.slices[i] is not None for part in others for i in range(len(whole.optimizers)))


@unhurried
@given(partitions())
def test_spec_of_a_part_describes_its_tensors(drawn):
    whole, parts = drawn
    for part in parts:
        for index, section in enumerate(part.layout.parameters):
            assert part.spec.optimizers[index].kind == whole.optimizers[index].kind
            assert part.spec.optimizers[index].parameters == section.specs


@given(contents, st.booleans())
def test_one_server_has_the_whole(whole, is_split):
    [part] = partition(whole, 1, [is_split] * len(whole.optimizers))
    assert part.layout == Layout.of(whole)
    assert part.spec == whole
    assert part.slices == (None,) * len(whole.optimizers)
    views = counted(part.layout)
    for theirs, own in zip(astuple(part.of(views)), astuple(views), strict=True):
        assert str(theirs) == str(own)


def test_optimizer_that_cannot_be_split_is_on_the_head_in_its_shapes():
    weight = spec("w", "float32", [8, 40])
    whole = StateSpec(
        (OptimizerSpec("LBFGS", (weight,)), OptimizerSpec("SGD", (weight,))), *[()] * 3
    )
    head, other = partition(whole, 2, [False, True], UNIT)
    assert head.slices == (None, (Slice(0, 0, 160),))
    assert head.spec.optimizers[0].parameters == (weight,)
    assert other.slices == ((), (Slice(0, 160, 320),))
    assert not other.has(0)
    assert other.has(1)
    assert other.has(None)


def test_slice_has_a_name_of_its_own_only_if_the_parameter_is_cut():
    small, large = spec("bias", "float32", [4, 2]), spec("weight", "float32", [100])
    whole = StateSpec((OptimizerSpec("SGD", (small, large)),), (), (), ())
    names = [
        [(one.name, one.shape) for one in part.spec.optimizers[0].parameters]
        for part in partition(whole, 3, [True], UNIT)
    ]
    assert names == [
        [("bias", (8,)), ("weight[0:32]", (32,))],
        [("weight[32:96]", (64,))],
        [("weight[96:100]", (4,))],
    ]


def test_long_name_keeps_its_range():
    whole = StateSpec((OptimizerSpec("SGD", (spec("x" * 200, "float32", [64]),)),), (), (), ())
    _, other = partition(whole, 2, [True], UNIT)
    [name] = [one.name for one in other.spec.optimizers[0].parameters]
    assert len(name) == 200
    assert name.endswith("xx[32:64]")


def test_empty_parameter_is_on_the_head():
    parts = one_parameter(0, 2)
    assert [part.slices for part in parts] == [((Slice(0, 0, 0),),), ((),)]
    assert not any(part.has(None) for part in parts)


def test_more_servers_than_units_leave_some_without_a_part():
    parts = one_parameter(3 * UNIT, 5)
    assert [part.has(0) for part in parts].count(True) == 3
    assert parts[0].has(None)
    idle = next(part for part in parts if not part.has(0))
    assert idle.layout.size == 0
    assert not idle.has(None)


def test_unused_parameters_are_named_by_the_tensors_of_the_part():
    whole = StateSpec(
        (OptimizerSpec("SGD", tuple(spec(n, "float32", [64]) for n in "abcd")),), (), (), ()
    )
    head, other = partition(whole, 2, [True], UNIT)
    assert [one.parameter for one in other.slices[0]] == [2, 3]
    assert head.unused(0, frozenset({1, 3})) == {1}
    assert other.unused(0, frozenset({1, 3})) == {1}
    assert other.unused(0, frozenset()) == frozenset()
    [only] = partition(whole, 1, [True])
    assert only.unused(0, frozenset({1, 3})) == {1, 3}


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
@pytest.mark.parametrize("servers", range(1, 6))
def test_servers_measure_the_blocks_that_one_server_would(dtype, servers):
    parameters = tuple(spec("w", dtype, [count]) for count in (1, 300, BLOCK, 3 * BLOCK + 70))
    whole = StateSpec((OptimizerSpec("SGD", parameters),), (), (), ())
    views = Layout.of(whole).view(PlainMemory(Layout.of(whole).size))
    generator = torch.Generator().manual_seed(0)
    for one in views.flats[0]:
        one.copy_(torch.randn(one.numel(), generator=generator))
    flats = [part.of(views).flats[0] for part in partition(whole, servers, [True])]
    for number, one in enumerate(views.flats[0]):
        held = [own[number].clone() for own in flats]  # in memory of their own
        measured = [square(block) for own in held if own.numel() for block in blocks(own)]
        assert measured == [square(block) for block in blocks(one)]
