# SPDX-License-Identifier: BSD-3-Clause
"""Averages of gradients are what they are to be, in whatever order and when they are added up."""

from itertools import permutations
from math import inf, isfinite

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from message_examples import unhurried
from paceline.run.tensors import sums
from paceline.run.tensors.layout import Layout
from paceline.run.tensors.state_spec import OptimizerSpec, StateSpec, TensorSpec
from paceline.run.tensors.sums import PendingUpdate, SlotGradient, WeightedSum, square

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
SIZE = 5


def layout(*dtypes):
    """One optimizer with a parameter and a buffer of each type, and a counter."""
    specs = tuple(TensorSpec(str(d), str(d), (SIZE,), (1,)) for d in dtypes)
    counter = (TensorSpec("count", "torch.int64", (), ()),)
    one = OptimizerSpec("SGD", specs)
    return Layout.of(StateSpec((one, one), specs, counter, ()))


class Heap:
    """A region of plain memory, for which nobody asks the system."""

    def __init__(self, size):
        self._bytes = torch.zeros(size, dtype=torch.uint8)

    def tensor(self, dtype, count, offset):
        return self._bytes[offset : offset + count * dtype.itemsize].view(dtype)


def new_views(where):
    return where.view(Heap(where.size))


def slot_of(where, *rows):
    """A slot in which each parameter and each buffer has these values."""
    views = new_views(where)
    for row, *found in zip(rows, *views.parameters, views.buffers, strict=True):
        for tensor in found:
            tensor.copy_(torch.tensor(row, dtype=torch.float64))
    return views


def flats_of(views):
    return views.flats[0]


numbers = st.floats(-8, 8, width=16)  # so that no sum leaves the range of float16
rows = st.lists(numbers, min_size=SIZE, max_size=SIZE)
pieces = st.lists(
    st.tuples(
        st.integers(0, 4),  # worker
        rows,
        st.integers(1, 64),  # samples
        st.sampled_from([1.0, 0.5, 1 / 3]),  # scale
        st.sets(st.integers(0, 4)),  # whose slots are needed after it has come
    ),
    min_size=1,
    max_size=6,
)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("block", [2, 1 << 18])
def test_an_average_is_weighted_by_samples_and_scales(dtype, block, monkeypatch):
    monkeypatch.setattr(sums, "BLOCK", block)
    where = layout(dtype)

    @unhurried
    @given(pieces)
    def is_weighted(given):
        total = WeightedSum(flats_of, lambda: slot_of(where, [7.0] * SIZE))  # used before
        for worker, row, samples, scale, needed in given:
            total.add(worker)  # its slot is needed
            total.give(worker, slot_of(where, row), samples, scale)
            for other in needed:
                total.add(other)
        found, sq_norm = total.average()

        values = torch.tensor([row for _, row, _, _, _ in given], dtype=torch.float64)
        weights = torch.tensor([n * scale for _, _, n, scale, _ in given], dtype=torch.float64)
        weights /= sum(n for _, _, n, _, _ in given)
        expected = (weights[:, None] * values).sum(0)
        size = (weights[:, None] * values.abs()).sum(0)
        rounding = torch.finfo(dtype).eps * (len(given) + 2)
        got = found.parameters[0][0].double()
        assert ((got - expected).abs() <= rounding * size + torch.finfo(dtype).tiny * 1e4).all()
        reference = float(got.square().sum())
        assert abs(sq_norm - reference) <= 1e-5 * reference + 1e-30

    is_weighted()


@unhurried
@given(st.lists(rows, min_size=1, max_size=8), st.integers(1, 64))
def test_with_equal_samples_nothing_is_rounded_but_the_sum(given, samples):
    where = layout(torch.float32)
    total = WeightedSum(flats_of, lambda: new_views(where))
    for worker, row in enumerate(given):
        total.give(worker, slot_of(where, row), samples)
    expected = torch.tensor(given[0])
    for row in given[1:]:
        expected = expected + torch.tensor(row)
    found, _ = total.average()
    assert torch.equal(found.parameters[0][0], expected * (samples / (samples * len(given))))


def test_the_order_of_arrival_does_not_matter_for_what_waited():
    where = layout(torch.float32)
    torch.manual_seed(0)
    slots = [slot_of(where, torch.randn(SIZE).tolist()) for _ in range(4)]
    found = set()
    for order in permutations(range(4)):
        total = WeightedSum(flats_of, lambda: new_views(where))
        for worker in order:
            total.give(worker, slots[worker], samples=worker + 1)
        found.add(tuple(total.average()[0].parameters[0][0].tolist()))
    assert len(found) == 1


def test_one_alone_is_its_own_average_and_stays_where_it_is():
    where = layout(torch.float32)
    slot = slot_of(where, [1.0, 2.0, 3.0, 4.0, 5.0])
    total = WeightedSum(flats_of, accumulator=lambda: pytest.fail("no memory is needed"))
    total.give(3, slot, 32)
    assert total.average() == (slot, 55.0)


def test_one_that_counts_less_is_scaled_elsewhere_and_its_slot_left_alone():
    where = layout(torch.float32)
    slot = slot_of(where, [2.0] * SIZE)
    total = WeightedSum(flats_of, lambda: new_views(where))
    total.give(0, slot, 32, scale=0.25)
    found, sq_norm = total.average()
    assert (found.parameters[0][0].tolist(), sq_norm) == ([0.5] * SIZE, SIZE * 0.25)
    assert slot.parameters[0][0].tolist() == [2.0] * SIZE


def test_slots_are_not_written():
    where = layout(torch.float32, torch.float64)
    slots = [slot_of(where, [float(i)] * SIZE, [float(-i)] * SIZE) for i in range(3)]
    total = WeightedSum(flats_of, lambda: new_views(where))
    for worker, slot in enumerate(slots):
        total.give(worker, slot, worker + 1)
        if worker == 1:
            total.add(0)
    total.average()
    for i, slot in enumerate(slots):
        assert [t.tolist() for t in slot.parameters[0]] == [[float(i)] * SIZE, [float(-i)] * SIZE]


def test_an_added_piece_may_be_overwritten():
    where = layout(torch.float32)
    slot = slot_of(where, [4.0] * SIZE)
    total = WeightedSum(flats_of, lambda: new_views(where))
    total.give(0, slot, 1)
    total.add(0)
    slot.flats[0][0].fill_(torch.nan)
    total.give(1, slot_of(where, [8.0] * SIZE), 1)
    assert total.average()[0].parameters[0][0].tolist() == [6.0] * SIZE


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_one_number_that_is_not_finite_shows_in_the_norm(dtype, bad):
    flat = torch.ones(100, dtype=dtype)
    assert square(flat) == 100.0
    flat[17] = bad
    assert not isfinite(square(flat))


@pytest.mark.parametrize(("dtype", "large"), [(torch.float32, 1e30), (torch.float64, 1e200)])
def test_the_norm_of_large_but_finite_numbers_is_finite(dtype, large):
    flat = torch.full((4,), large, dtype=dtype)
    expected = min(4 * large * large, sums.LARGEST_SQUARE)
    assert square(flat) == pytest.approx(expected)
    assert isfinite(sum(square(flat) for _ in range(1000)))


@pytest.mark.parametrize("limit", range(5))
def test_what_is_added_early_makes_no_difference_to_the_bits(limit):
    where = layout(torch.float32)
    torch.manual_seed(0)
    slots = [slot_of(where, torch.randn(SIZE).tolist()) for _ in range(4)]
    found = []
    for early in (False, True):
        total = WeightedSum(flats_of, lambda: new_views(where))
        for worker in (2, 0, 3, 1):
            total.give(worker, slots[worker], samples=worker + 1)
        if early:
            total.add_early(limit)
            total.add_early(limit)  # there is nothing left to add
        average, sq_norm = total.average()
        found.append((average.parameters[0][0].tolist(), sq_norm))
    assert found[0] == found[1]


def test_one_piece_alone_is_not_moved_early():
    where = layout(torch.float32)
    slot = slot_of(where, [4.0] * SIZE)
    total = WeightedSum(flats_of, lambda: pytest.fail("there was nothing to add it to"))
    total.give(0, slot, 1)
    total.add_early(inf)
    assert total.average()[0] is slot


# ------------------------------------------------------------------------ an update in the making


def piece(where, worker, value, **fields):
    usual = {"optimizer": 0, "samples": 1, "scale": 1.0, "unused": frozenset()}
    return SlotGradient(worker=worker, slot=slot_of(where, [value] * SIZE), **{**usual, **fields})


def test_what_nobody_gave_a_gradient_for_is_unused():
    where = layout(torch.float32)
    making = PendingUpdate(lambda: new_views(where))
    making.give(piece(where, 0, 1.0, unused=frozenset({1, 2})))
    assert making.unused == {0: {1, 2}}
    making.give(piece(where, 1, 1.0, unused=frozenset({2, 3})))
    making.give(piece(where, 2, 1.0, optimizer=1, unused=frozenset({0})))
    assert making.unused == {0: {2}, 1: {0}}


def test_buffers_are_averaged_by_samples_whatever_the_rule_makes_of_staleness():
    where = layout(torch.float32)
    making = PendingUpdate(lambda: new_views(where))
    making.give(piece(where, 0, 4.0, samples=1))
    making.give(piece(where, 1, 8.0, samples=3, scale=0.5))
    found, _ = making.sums[0].average()
    buffers, _ = making.buffers.average()
    assert found.parameters[0][0].tolist() == [4.0] * SIZE
    assert buffers.buffers[0].tolist() == [7.0] * SIZE


def test_two_optimizers_and_the_buffers_share_one_accumulator():
    where = layout(torch.float32)
    made = []

    def accumulator():
        made.append(new_views(where))
        return made[-1]

    making = PendingUpdate(accumulator)
    assert making.memory is None
    for worker, optimizer, value in ((0, 0, 1.0), (1, 1, 10.0), (2, 0, 3.0), (3, 1, 30.0)):
        making.give(piece(where, worker, value, optimizer=optimizer))
        making.add(worker)
    averages = [making.sums[i].average()[0].parameters[i][0].tolist() for i in range(2)]
    assert averages == [[2.0] * SIZE, [20.0] * SIZE]
    assert making.buffers.average()[0].buffers[0].tolist() == [11.0] * SIZE
    assert made == [making.memory]


def test_counters_are_those_of_the_first_worker_that_gave():
    where = layout(torch.float32)
    making = PendingUpdate(lambda: new_views(where))
    for worker in (2, 1, 3):
        given = piece(where, worker, 0.0)
        given.slot.counters[0].fill_(10 * worker)
        making.give(given)
        given.slot.counters[0].fill_(-1)  # it goes on
    assert [int(flat[0]) for flat in making.counters] == [10]
