# SPDX-License-Identifier: BSD-3-Clause
"""Averages of gradients have the decided weights, whenever the gradients are added."""

import gc
import weakref
from itertools import permutations
from math import inf, isfinite

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from message_examples import unhurried
from paceline.core.events import ApplyUpdate
from paceline.errors import InternalError
from paceline.run.tensors import sums
from paceline.run.tensors.layout import Layout
from paceline.run.tensors.state_spec import OptimizerSpec, StateSpec, TensorSpec
from paceline.run.tensors.sums import PendingUpdate, SlotGradient, WeightedSum, combined, square
from shard_updates import decide

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
SIZE = 5


def make_layout(*dtypes):
    """Lay out two optimizers with a parameter and a buffer of each type, and a counter."""
    specs = tuple(TensorSpec(str(d), str(d), (SIZE,), (1,)) for d in dtypes)
    counter = (TensorSpec("count", "torch.int64", (), ()),)
    optimizer = OptimizerSpec("SGD", specs)
    return Layout.of(StateSpec((optimizer, optimizer), specs, counter, ()))


class Heap:
    """Plain memory in place of a region of shared memory."""

    def __init__(self, size):
        self._bytes = torch.zeros(size, dtype=torch.uint8)

    def tensor(self, dtype, count, offset):
        return self._bytes[offset : offset + count * dtype.itemsize].view(dtype)


def new_views(layout):
    return layout.view(Heap(layout.size))


def make_slot(layout, *rows):
    """Return a slot in which each parameter and each buffer has these values."""
    views = new_views(layout)
    for row, *tensors in zip(rows, *views.parameters, views.buffers, strict=True):
        for tensor in tensors:
            tensor.copy_(torch.tensor(row, dtype=torch.float64))
    return views


def flats_of(views):
    return views.flats[0]


def weights_of(samples, scales=None):
    """Return the weights that the core decides on, by contribution."""
    scales = [1.0] * len(samples) if scales is None else scales
    return [n / sum(samples) * scale for n, scale in zip(samples, scales, strict=True)]


numbers = st.floats(-8, 8, width=16)  # so that no sum leaves the range of float16
rows = st.lists(numbers, min_size=SIZE, max_size=SIZE)
contributions = st.lists(
    st.tuples(
        st.integers(0, 4),  # worker
        rows,
        st.integers(1, 64),  # samples
        st.sampled_from([1.0, 0.5, 1 / 3]),  # scale
        st.sets(st.integers(0, 4)),  # workers whose slots are needed afterwards
    ),
    min_size=1,
    max_size=6,
)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("block", [2, 1 << 18])
def test_average_has_the_decided_weights(dtype, block, monkeypatch):
    monkeypatch.setattr(sums, "BLOCK", block)
    layout = make_layout(dtype)

    @unhurried
    @given(contributions)
    def check(given):
        total = WeightedSum(flats_of, lambda: make_slot(layout, [7.0] * SIZE))  # was used before
        for number, (worker, row, samples, scale, needed) in enumerate(given):
            total.add_worker(worker)  # its slot is needed
            total.give(worker, number, make_slot(layout, row), samples * scale)
            for other in needed:
                total.add_worker(other)
        weights = weights_of([n for _, _, n, _, _ in given], [s for _, _, _, s, _ in given])
        found, squares = total.average(weights)
        sq_norm = combined([{0: squares}])

        values = torch.tensor([row for _, row, _, _, _ in given], dtype=torch.float64)
        column = torch.tensor(weights, dtype=torch.float64)[:, None]
        expected, size = (column * values).sum(0), (column * values.abs()).sum(0)
        rounding = torch.finfo(dtype).eps * (len(given) + 2)
        got = found.parameters[0][0].double()
        assert ((got - expected).abs() <= rounding * size + torch.finfo(dtype).tiny * 1e4).all()
        reference = float(got.square().sum())
        assert abs(sq_norm - reference) <= 1e-5 * reference + 1e-30

    check()


@unhurried
@given(st.lists(rows, min_size=1, max_size=8), st.integers(1, 64))
def test_with_equal_samples_only_the_sum_is_rounded(given, samples):
    layout = make_layout(torch.float32)
    total = WeightedSum(flats_of, lambda: new_views(layout))
    for worker, row in enumerate(given):
        total.give(worker, worker, make_slot(layout, row), samples)
    expected = torch.tensor(given[0])
    for row in given[1:]:
        expected = expected + torch.tensor(row)
    weights = weights_of([samples] * len(given))
    found, _ = total.average(weights)
    assert torch.equal(found.parameters[0][0], expected * weights[0])


def test_order_of_arrival_does_not_change_the_bits():
    layout = make_layout(torch.float32)
    torch.manual_seed(0)
    slots = [make_slot(layout, torch.randn(SIZE).tolist()) for _ in range(4)]
    found = set()
    for order in permutations(range(4)):
        total = WeightedSum(flats_of, lambda: new_views(layout))
        for number, worker in enumerate(order):
            total.give(worker, number, slots[worker], worker + 1)
        average, _ = total.average(weights_of([worker + 1 for worker in order]))
        found.add(tuple(average.parameters[0][0].tolist()))
    assert len(found) == 1


def test_single_gradient_is_its_own_average_and_stays_in_its_slot():
    layout = make_layout(torch.float32)
    slot = make_slot(layout, [1.0, 2.0, 3.0, 4.0, 5.0])
    total = WeightedSum(flats_of, accumulator=lambda: pytest.fail("no memory is needed"))
    total.give(3, 0, slot, 32)
    assert total.average([1.0]) == (slot, [[55.0]])


def test_single_gradient_with_a_scale_is_scaled_outside_its_slot():
    layout = make_layout(torch.float32)
    slot = make_slot(layout, [2.0] * SIZE)
    total = WeightedSum(flats_of, lambda: new_views(layout))
    total.give(0, 0, slot, 32 * 0.25)
    found, squares = total.average([0.25])
    assert (found.parameters[0][0].tolist(), squares) == ([0.5] * SIZE, [[SIZE * 0.25]])
    assert slot.parameters[0][0].tolist() == [2.0] * SIZE


def test_slots_are_not_written():
    layout = make_layout(torch.float32, torch.float64)
    slots = [make_slot(layout, [float(i)] * SIZE, [float(-i)] * SIZE) for i in range(3)]
    total = WeightedSum(flats_of, lambda: new_views(layout))
    for worker, slot in enumerate(slots):
        total.give(worker, worker, slot, worker + 1)
        if worker == 1:
            total.add_worker(0)
    total.average(weights_of([1, 2, 3]))
    for i, slot in enumerate(slots):
        assert [t.tolist() for t in slot.parameters[0]] == [[float(i)] * SIZE, [float(-i)] * SIZE]


def test_slot_may_be_overwritten_after_its_gradient_was_added():
    layout = make_layout(torch.float32)
    slot = make_slot(layout, [4.0] * SIZE)
    total = WeightedSum(flats_of, lambda: new_views(layout))
    total.give(0, 0, slot, 1)
    total.add_worker(0)
    slot.flats[0][0].fill_(torch.nan)
    total.give(1, 1, make_slot(layout, [8.0] * SIZE), 1)
    assert total.average([0.5, 0.5])[0].parameters[0][0].tolist() == [6.0] * SIZE


def test_slot_is_not_kept_after_its_gradient_was_added():
    """Otherwise a worker that has left would occupy memory until the update is made."""
    layout = make_layout(torch.float32)
    slot = make_slot(layout, [4.0] * SIZE)
    freed = weakref.ref(slot)
    total = WeightedSum(flats_of, lambda: new_views(layout))
    total.give(0, 0, slot, 1)
    gc.disable()
    try:
        total.add_worker(0)
        del slot
        assert freed() is None
    finally:
        gc.enable()
    assert total.average([1.0])[0].parameters[0][0].tolist() == [4.0] * SIZE


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_one_non_finite_element_shows_in_the_norm(dtype, bad):
    flat = torch.ones(100, dtype=dtype)
    assert square(flat) == 100.0
    flat[17] = bad
    assert not isfinite(square(flat))


@pytest.mark.parametrize(("dtype", "large"), [(torch.float32, 1e30), (torch.float64, 1e200)])
def test_norm_of_large_finite_elements_is_finite(dtype, large):
    flat = torch.full((4,), large, dtype=dtype)
    expected = min(4 * large * large, sums.LARGEST_SQUARE)
    assert square(flat) == pytest.approx(expected)
    assert isfinite(sum(square(flat) for _ in range(1000)))


@pytest.mark.parametrize("limit", range(5))
def test_adding_early_does_not_change_the_bits(limit):
    layout = make_layout(torch.float32)
    torch.manual_seed(0)
    slots = [make_slot(layout, torch.randn(SIZE).tolist()) for _ in range(4)]
    order, found = (2, 0, 3, 1), []
    for early in (False, True):
        total = WeightedSum(flats_of, lambda: new_views(layout))
        for number, worker in enumerate(order):
            total.give(worker, number, slots[worker], worker + 1)
        if early:
            total.add_early(limit)
            total.add_early(limit)  # there is nothing left to add
        average, sq_norm = total.average(weights_of([worker + 1 for worker in order]))
        found.append((average.parameters[0][0].tolist(), sq_norm))
    assert found[0] == found[1]


def test_single_gradient_is_not_added_early():
    layout = make_layout(torch.float32)
    slot = make_slot(layout, [4.0] * SIZE)
    total = WeightedSum(flats_of, lambda: pytest.fail("there was nothing to add it to"))
    total.give(0, 0, slot, 1)
    total.add_early(inf)
    assert total.average([1.0])[0] is slot


@pytest.mark.parametrize("added", [(), (0,), (1,), (0, 1, 2)], ids=str)
@pytest.mark.parametrize("weights", [(0.5, 0.25, 0.25), (1.0, 0.0, 0.0), (0.25, 0.25, 0.5001)])
def test_weights_that_do_not_match_the_added_gradients_are_an_internal_error(added, weights):
    """Whether a gradient was added early or not: its ratio to the others can't change later."""
    layout = make_layout(torch.float32)
    total = WeightedSum(flats_of, lambda: new_views(layout))
    for worker, samples in enumerate((1, 1, 2)):
        total.give(worker, worker, make_slot(layout, [1.0] * SIZE), samples)
    for worker in added:
        total.add_worker(worker)
    with pytest.raises(InternalError, match="don't match the samples and scales"):
        total.average(weights)


# ------------------------------------------------------------------------------- pending updates


def make_gradient(layout, worker, value, **fields):
    usual = {"optimizer": 0, "samples": 1, "scale": 1.0, "unused": frozenset()}
    slot = make_slot(layout, [value] * SIZE)
    return SlotGradient(worker=worker, slot=slot, **{**usual, **fields})


def test_parameter_is_unused_if_no_contribution_has_a_gradient_for_it():
    layout = make_layout(torch.float32)
    pending = PendingUpdate(lambda: new_views(layout))
    pending.give(make_gradient(layout, 0, 1.0, unused=frozenset({1, 2})))
    assert pending.unused == {0: {1, 2}}
    pending.give(make_gradient(layout, 1, 1.0, unused=frozenset({2, 3})))
    pending.give(make_gradient(layout, 2, 1.0, optimizer=1, unused=frozenset({0})))
    assert pending.unused == {0: {2}, 1: {0}}


def test_buffers_are_averaged_by_samples_without_the_scales():
    layout = make_layout(torch.float32)
    pending = PendingUpdate(lambda: new_views(layout))
    given = [
        make_gradient(layout, 0, 4.0, samples=1),
        make_gradient(layout, 1, 8.0, samples=3, scale=0.5),
    ]
    for gradient in given:
        pending.give(gradient)
    decided = decide(1, given)
    [(found, _)] = pending.average(decided).values()
    assert found.parameters[0][0].tolist() == [4.0] * SIZE
    assert pending.average_buffers(decided)[0][0].tolist()[:SIZE] == [7.0] * SIZE


def test_two_optimizers_and_the_buffers_share_one_accumulator():
    layout = make_layout(torch.float32)
    allocated = []

    def accumulator():
        allocated.append(new_views(layout))
        return allocated[-1]

    pending, given = PendingUpdate(accumulator), []
    assert pending.memory is None
    for worker, optimizer, value in ((0, 0, 1.0), (1, 1, 10.0), (2, 0, 3.0), (3, 1, 30.0)):
        given.append(make_gradient(layout, worker, value, optimizer=optimizer))
        pending.give(given[-1])
        pending.add_worker(worker)
    decided = decide(1, given)
    averages = pending.average(decided)
    assert pending.optimizers == [0, 1]
    assert [pending.contributions(optimizer) for optimizer in (0, 1)] == [2, 2]
    assert [averages[i][0].parameters[i][0].tolist() for i in range(2)] == [
        [2.0] * SIZE,
        [20.0] * SIZE,
    ]
    assert pending.average_buffers(decided)[0][0].tolist()[:SIZE] == [11.0] * SIZE
    assert allocated == [pending.memory]


def test_weights_are_normalized_among_the_contributions_to_each_optimizer():
    layout = make_layout(torch.float64)
    pending = PendingUpdate(lambda: new_views(layout))
    given = [
        make_gradient(layout, 0, 1.0, optimizer=0, samples=1),
        make_gradient(layout, 1, 8.0, optimizer=1, samples=6, scale=0.5),
        make_gradient(layout, 2, 5.0, optimizer=0, samples=3),
    ]
    for gradient in given:
        pending.give(gradient)
    averages = pending.average(decide(1, given))
    assert averages[0][0].parameters[0][0].tolist() == [4.0] * SIZE  # (1·1 + 3·5) / 4
    assert averages[1][0].parameters[1][0].tolist() == [4.0] * SIZE  # 0.5 · 8


def test_counters_are_those_of_the_lowest_numbered_contributor():
    layout = make_layout(torch.float32)
    pending = PendingUpdate(lambda: new_views(layout))
    for worker in (2, 1, 3):
        gradient = make_gradient(layout, worker, 0.0)
        gradient.slot.counters[0].fill_(10 * worker)
        pending.give(gradient)
        gradient.slot.counters[0].fill_(-1)  # the worker continues with its next turn
    assert [int(flat[0]) for flat in pending.counters] == [10]


MISMATCHES = {
    "other samples": lambda given: [given[0]._replace(samples=2), given[1]],
    "other scale": lambda given: [given[0], given[1]._replace(scale=0.5)],
    "other worker": lambda given: [given[0]._replace(worker=7), given[1]],
    "other order": lambda given: given[::-1],
    "one too few": lambda given: given[:1],
    "one too many": lambda given: [*given, given[0]],
}


@pytest.mark.parametrize("is_early", [False, True])
@pytest.mark.parametrize("mismatch", MISMATCHES)
def test_update_decided_for_other_gradients_is_an_internal_error(mismatch, is_early):
    layout = make_layout(torch.float32)
    pending = PendingUpdate(lambda: new_views(layout))
    given = [make_gradient(layout, 0, 1.0), make_gradient(layout, 1, 2.0, samples=3)]
    for gradient in given:
        pending.give(gradient)
    if is_early:
        pending.add_early(inf)
    with pytest.raises(InternalError, match="decided for other gradients than were accepted"):
        pending.average(decide(1, MISMATCHES[mismatch](given)))


def test_weights_that_are_not_by_samples_are_an_internal_error():
    layout = make_layout(torch.float32)
    pending = PendingUpdate(lambda: new_views(layout))
    given = [make_gradient(layout, 0, 1.0), make_gradient(layout, 1, 2.0, samples=3)]
    for gradient in given:
        pending.give(gradient)
    right = decide(1, given)
    wrong = ApplyUpdate(1, right.contributions, (0.5, 0.5), right.scales, right.wanted)
    with pytest.raises(InternalError, match="don't match the samples and scales"):
        pending.average(wrong)
