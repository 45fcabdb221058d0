# SPDX-License-Identifier: BSD-3-Clause
"""A shard makes updates in phases, and a step is a step of torch."""

import gc
import os
import weakref
from math import isfinite

import pytest
import torch
import torch._dynamo  # an optimizer loads it, and it sets an environment variable
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.utils import clip_grad_norm_
from torch.optim.lr_scheduler import StepLR

from paceline.errors import InternalError, ProtocolError
from paceline.run.net.in_process import InProcessStore
from paceline.run.net.shared_memory import SharedMemoryStore
from paceline.run.tensors.layout import gather
from paceline.run.tensors.shard import Shard
from paceline.run.tensors.state_spec import SchedulerCalls
from paceline.run.tensors.sums import SlotGradient
from shard_updates import decide, make_update


class Bench:
    """A shard, workers' slots, and the same model stepped by torch alone."""

    def __init__(self, store_type=InProcessStore, **options):
        self.model, self.optimizer, self.scheduler = make_training()
        self.plain, self.plain_optimizer, self.plain_scheduler = make_training()
        state = gather([self.model], [self.optimizer])
        self.store = store_type(state.spec)
        self.shard = Shard(state, [self.scheduler], self.store, **options)
        self.slots = {}

    def slot(self, worker):
        if worker not in self.slots:
            self.slots[worker] = self.store.new_accumulator()
        return self.slots[worker]

    def gradient(self, worker, *grads, samples=1, unused=()):
        """Put gradients into a worker's slot; return what the server accepts."""
        slot = self.slot(worker)
        for view, grad in zip(slot.parameters[0], grads, strict=True):
            view.copy_(grad)
        return SlotGradient(worker, 0, samples, 1.0, frozenset(unused), slot)

    def update(self, *gradients, scale=1.0):
        """Make the next version."""
        return make_update(self.shard, gradients, scale)

    def step_plainly(self, *grads):
        """Let torch alone step along these gradients."""
        for parameter, grad in zip(self.plain.parameters(), grads, strict=True):
            parameter.grad = grad
        self.plain_optimizer.step()
        self.plain_scheduler.step()

    def is_equal(self):
        """Return whether both models are equal to the bit."""
        pairs = zip(self.model.parameters(), self.plain.parameters(), strict=True)
        return all(torch.equal(a, b) for a, b in pairs)


def make_training():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3, affine=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    return model, optimizer, StepLR(optimizer, step_size=2, gamma=0.1)


def grads_of(seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(3, 2, generator=generator), torch.randn(3, generator=generator)


def content(buffer):
    return torch.cat([tensor.detach().flatten() for tensor in buffer.views.parameters[0]])


# --------------------------------------------------------------------------------------- phases


def test_reduce_returns_the_squared_norm_of_the_average():
    bench = Bench()
    given = [bench.gradient(worker, *grads_of(worker), samples=worker + 1) for worker in (0, 1)]
    for gradient in given:
        bench.shard.add(1, gradient)
    average = [(a + 2 * b) / 3 for a, b in zip(grads_of(0), grads_of(1), strict=True)]
    expected = sum(float(part.square().sum()) for part in average)
    assert bench.shard.reduce(decide(1, given)) == pytest.approx(expected)


def test_step_multiplies_the_reduced_gradient_by_its_scale():
    bench = Bench()
    bench.update(bench.gradient(0, *grads_of(1)), scale=0.25)
    bench.step_plainly(*[grad * 0.25 for grad in grads_of(1)])
    assert bench.is_equal()


def test_publish_makes_the_version():
    bench = Bench()
    given = [bench.gradient(0, *grads_of(1))]
    bench.shard.add(1, given[0])
    bench.shard.reduce(decide(1, given))
    bench.shard.step(1)
    assert bench.shard.version == 0
    with pytest.raises(KeyError):
        bench.shard.add_reader(0, 1)
    bench.shard.publish(1)
    assert (bench.shard.version, bench.shard.schedules.contributions) == (1, [1])
    assert bench.shard.add_reader(0, 1) is bench.shard.newest


def test_skip_makes_the_version_without_a_step():
    bench = Bench(ema=0.5)
    before = content(bench.shard.newest).clone()
    state = str(bench.optimizer.state_dict())
    average = [mean.clone() for mean in bench.shard.average[0]]
    given = [bench.gradient(0, *grads_of(1))]
    bench.slots[0].buffers[0].fill_(7.0)
    bench.slots[0].counters[0].fill_(7)
    bench.shard.add(1, given[0])
    bench.shard.reduce(decide(1, given))
    bench.shard.skip(1)
    assert (bench.shard.version, bench.shard.schedules.contributions) == (1, [0])
    assert torch.equal(content(bench.shard.add_reader(0, 1)), before)
    assert str(bench.optimizer.state_dict()) == state
    assert all(torch.equal(a, b) for a, b in zip(bench.shard.average[0], average, strict=True))
    assert not bench.shard.newest.views.buffers[0].any()
    assert not bench.shard.newest.views.counters[0].any()
    assert bench.shard.optimizers_of(1) == []  # the gradients are forgotten


@pytest.mark.parametrize("kept", [1, 2])
def test_readers_see_nothing_before_publish(kept):
    bench = Bench(versions_kept=kept, ema=0.5)
    shard = bench.shard
    buffer = shard.add_reader(9, 0)
    views = buffer.views
    before = content(buffer).clone()
    average = [mean.clone() for mean in shard.average[0]]
    given = [bench.gradient(worker, *grads_of(worker)) for worker in (0, 1)]
    for gradient in given:
        gradient.slot.buffers[0].fill_(7.0)
        gradient.slot.counters[0].fill_(7)

    def assert_nothing_is_visible():
        assert torch.equal(content(buffer), before)
        assert not views.buffers[0].any()
        assert not views.counters[0].any()
        assert shard.version == 0
        assert all(torch.equal(a, b) for a, b in zip(shard.average[0], average, strict=True))
        with pytest.raises(KeyError):
            shard.add_reader(8, 1)

    for gradient in given:
        shard.add(1, gradient)
        shard.release_slot(gradient.worker)
        assert_nothing_is_visible()
    shard.reduce(decide(1, given))
    assert_nothing_is_visible()
    shard.step(1)
    assert_nothing_is_visible()
    shard.publish(1)
    assert torch.equal(content(buffer), before)
    new = shard.add_reader(8, 1)
    assert not torch.equal(content(new), before)
    assert float(new.views.buffers[0][0]) == 7.0
    assert int(new.views.counters[0]) == 7
    assert not torch.equal(shard.average[0][0], average[0])


# -------------------------------------------------------------------------------------- updates


def test_update_is_a_step_of_torch_along_the_average():
    bench = Bench()
    bench.shard.schedules.note_calls(0, [SchedulerCalls(0, "mini-batch", calls=1, steps=3)])
    for update in range(1, 6):
        given = [
            bench.gradient(worker, *grads_of(10 * update + worker), samples=4)
            for worker in (2, 0, 1)
        ]
        sq_norm = bench.update(*given)
        parts = [grads_of(10 * update + worker) for worker in range(3)]
        average = [(a + b + c) * (1 / 3) for a, b, c in zip(*parts, strict=True)]
        bench.step_plainly(*average)
        assert bench.is_equal()
        assert sq_norm == pytest.approx(sum(float(part.square().sum()) for part in average))
        lr = bench.plain_optimizer.param_groups[0]["lr"]
        assert bench.optimizer.param_groups[0]["lr"] == lr
        assert (bench.shard.version, bench.shard.schedules.steps) == (update, (update,))


@pytest.mark.parametrize("limit", [0.01, 1.0, 1000.0])
def test_scale_can_clip_as_torch_clips(limit):
    bench = Bench()
    average = [(a + b) / 2 for a, b in zip(grads_of(1), grads_of(2), strict=True)]
    for parameter, grad in zip(bench.plain.parameters(), average, strict=True):
        parameter.grad = grad
    norm = float(clip_grad_norm_(bench.plain.parameters(), limit))
    bench.plain_optimizer.step()
    scale = min(1.0, limit / (norm + 1e-6))
    given = [bench.gradient(0, *grads_of(1)), bench.gradient(1, *grads_of(2))]
    assert bench.update(*given, scale=scale) == pytest.approx(norm**2)
    for ours, theirs in zip(bench.model.parameters(), bench.plain.parameters(), strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-5, atol=1e-7)


def test_parameter_without_any_gradient_is_not_stepped():
    """Not even by its momentum or by weight decay: torch leaves it alone, too."""
    bench = Bench()
    bench.shard.schedules.note_calls(0, [SchedulerCalls(0, "mini-batch", calls=1, steps=1)])
    for update, unused in ((1, ()), (2, (1,)), (3, (1,))):
        grads = grads_of(update)
        bench.update(bench.gradient(0, *grads, unused=unused))
        bench.step_plainly(*[None if i in unused else grad for i, grad in enumerate(grads)])
        assert bench.is_equal()


def test_parameter_with_a_gradient_from_one_worker_is_stepped():
    bench = Bench()
    weight, bias = grads_of(1)
    bench.update(
        bench.gradient(0, weight, torch.zeros(3), unused=(1,)), bench.gradient(1, weight, bias)
    )
    bench.step_plainly(weight, bias / 2)
    assert bench.is_equal()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_norm_of_a_non_finite_average_is_not_finite_and_a_skip_changes_nothing(bad):
    bench = Bench(ema=0.5)
    bench.update(bench.gradient(0, *grads_of(1)))
    before = {name: value.clone() for name, value in bench.model.state_dict().items()}
    state = str(bench.optimizer.state_dict())
    average = [mean.clone() for mean in bench.shard.average[0]]
    weight, bias = grads_of(2)
    weight[1, 1] = bad
    given = [bench.gradient(0, weight, bias), bench.gradient(1, *grads_of(3))]
    bench.slots[0].buffers[0].fill_(bad)
    assert not isfinite(bench.update(*given))
    assert (bench.shard.version, bench.shard.schedules.contributions) == (2, [1])
    assert str(bench.optimizer.state_dict()) == state
    for name, value in bench.model.state_dict().items():
        assert torch.equal(value, before[name])
    assert all(torch.equal(a, b) for a, b in zip(bench.shard.average[0], average, strict=True))
    assert isfinite(bench.update(bench.gradient(0, *grads_of(4))))
    assert all(parameter.isfinite().all() for parameter in bench.model.parameters())


def test_moving_average_follows_the_weights():
    bench = Bench(ema=0.75)
    expected = [parameter.detach().clone() for parameter in bench.model.parameters()]
    for update in range(1, 4):
        bench.update(bench.gradient(0, *grads_of(update)))
        for mean, parameter in zip(expected, bench.model.parameters(), strict=True):
            mean.mul_(0.75).add_(parameter.detach(), alpha=0.25)
    for mean, ours in zip(expected, bench.shard.average[0], strict=True):
        assert torch.allclose(mean, ours)


def test_buffers_are_averaged_and_counters_are_those_of_the_lowest_worker():
    bench, given = Bench(), []
    for worker, value in ((1, 2.0), (0, 6.0)):
        for buffer in bench.slot(worker).buffers:
            buffer.fill_(value)
        bench.slot(worker).counters[0].fill_(worker + 5)
        given.append(bench.gradient(worker, *grads_of(worker), samples=1 + 2 * worker))
    bench.update(*given)
    views = bench.shard.newest.views
    assert [buffer.tolist() for buffer in views.buffers] == [[3.0] * 3] * 2
    assert int(views.counters[0]) == 5


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("workers", [1, 2])
def test_buffers_that_would_become_non_finite_keep_their_values(bad, workers):
    bench = Bench()
    given = [bench.gradient(worker, *grads_of(worker)) for worker in range(workers)]
    for one in given:
        for buffer in one.slot.buffers:
            buffer.fill_(3.0)
    bench.slots[0].buffers[0][1] = bad
    before = bench.shard.newest.views.buffers[0][1].item()
    for gradient in given:
        bench.shard.add(1, gradient)
    bench.shard.reduce(decide(1, given))
    bench.shard.step(1)
    assert bench.shard.publish(1) == [0]
    assert bench.shard.newest.views.buffers[0].tolist() == [3.0, before, 3.0]
    assert bench.shard.newest.views.buffers[1].tolist() == [3.0] * 3


def test_buffer_that_was_infinite_from_the_start_may_stay_so():
    """As the mask of an attention layer is."""
    bench = Bench()
    bench.shard.newest.views.buffers[0][2] = float("-inf")
    given = [bench.gradient(worker, *grads_of(worker)) for worker in range(2)]
    for one in given:
        one.slot.buffers[0].copy_(torch.tensor([1.0, 2.0, float("-inf")]))
        bench.shard.add(1, one)
    bench.shard.reduce(decide(1, given))
    bench.shard.step(1)
    assert bench.shard.publish(1) is None
    assert bench.shard.newest.views.buffers[0].tolist() == [1.0, 2.0, float("-inf")]


def test_worker_may_reuse_its_slot_before_its_update_is_made():
    bench, other = Bench(), Bench()
    given = [bench.gradient(worker, *grads_of(worker)) for worker in range(3)]
    for gradient in given:
        bench.shard.add(1, gradient)
        bench.shard.release_slot(gradient.worker)
        gradient.slot.flats[0][0].fill_(torch.nan)
    bench.shard.reduce(decide(1, given))
    bench.shard.step(1)
    bench.shard.publish(1)
    other.update(*[other.gradient(worker, *grads_of(worker)) for worker in range(3)])
    for ours, theirs in zip(bench.model.parameters(), other.model.parameters(), strict=True):
        assert torch.allclose(ours, theirs)


def test_several_updates_can_be_pending():
    bench = Bench(versions_kept=2)
    second = bench.gradient(0, *grads_of(2))
    bench.shard.add(2, second)
    bench.shard.release_slot(0)
    first = bench.gradient(0, *grads_of(1))
    bench.shard.add(1, first)
    assert [bench.shard.optimizers_of(update) for update in (1, 2, 3)] == [[0], [0], []]
    for update, gradient in ((1, first), (2, second)):
        bench.shard.reduce(decide(update, [gradient]))
        bench.shard.step(update)
        bench.shard.publish(update)
        bench.step_plainly(*grads_of(update))
        assert bench.is_equal()


def test_large_finite_gradients_are_stepped():
    bench = Bench()
    before = content(bench.shard.newest).clone()
    gradient = bench.gradient(0, torch.full((3, 2), 1e30), torch.zeros(3))
    sq_norm = bench.update(gradient, scale=1e-30)
    assert sq_norm == pytest.approx(6e60)
    moved = before - content(bench.shard.newest)
    assert float(moved.double().norm()) == pytest.approx(0.5 * 6**0.5, rel=1e-3)


def test_decided_weights_that_do_not_match_are_an_internal_error():
    bench = Bench()
    given = [bench.gradient(0, *grads_of(1)), bench.gradient(1, *grads_of(2), samples=3)]
    for gradient in given:
        bench.shard.add(1, gradient)
    with pytest.raises(InternalError):
        bench.shard.reduce(decide(1, [given[0], given[1]._replace(samples=2)]))


def test_skip_makes_the_last_version_after_an_optimizer_raised():
    bench = Bench()
    bench.optimizer.param_groups[0]["lr"] = "a word"
    with pytest.raises(TypeError):
        bench.update(bench.gradient(0, *grads_of(1)))
    bench.shard.skip(1)
    assert bench.shard.version == 1
    assert bench.shard.newest is bench.shard.add_reader(0, 1)


# --------------------------------------------------------------------------------------- memory


def test_accumulators_are_reused():
    bench = Bench(SharedMemoryStore)
    gc.collect()  # earlier tests may have left mappings, which hold descriptors
    before = len(os.listdir("/proc/self/fd"))
    for update in range(1, 20):
        given = [bench.gradient(worker, *grads_of(worker)) for worker in range(3)]
        for gradient in given:
            bench.shard.add(update, gradient)
            bench.shard.release_slot(gradient.worker)
        bench.shard.reduce(decide(update, given))
        bench.shard.step(update)
        bench.shard.publish(update)
    assert len(bench.shard._free_accumulators) == 1
    assert len(os.listdir("/proc/self/fd")) <= before + 4  # three slots, one accumulator
    bench.store.close()


@pytest.mark.parametrize("ends", ["publish", "skip"])
@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("is_released", [False, True])
def test_slot_of_a_worker_that_left_is_freed_with_its_update(workers, is_released, ends):
    """At once and not by the garbage collector: a slot is as large as the model."""
    bench = Bench()
    given = [bench.gradient(worker, *grads_of(worker)) for worker in range(workers)]
    slots = [gradient.slot for gradient in given]
    references = [weakref.ref(slot) for slot in slots]
    references += [weakref.ref(flat) for slot in slots for flat in slot.flats[0]]
    memory = [StorageWeakRef(flat.untyped_storage()) for slot in slots for flat in slot.flats[0]]
    decided = decide(1, given)
    for gradient in given:
        bench.shard.add(1, gradient)
        if is_released:
            bench.shard.release_slot(gradient.worker)
    del gradient, given, slots
    bench.slots.clear()
    gc.disable()
    try:
        bench.shard.reduce(decided)
        if ends == "publish":
            bench.shard.step(1)
            bench.shard.publish(1)
        else:
            bench.shard.skip(1)
        assert [reference() for reference in references] == [None] * len(references)
        assert all(storage.expired() for storage in memory)
    finally:
        gc.enable()


# ---------------------------------------------------------------------------------------- state


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        (None, r"expected the state_dict\(\) of an optimizer"),
        ([], r"expected the state_dict\(\) of an optimizer"),
        ({"state": {}}, r"expected the state_dict\(\) of an optimizer"),
        ({"state": {}, "param_groups": []}, "cannot load this state: "),
        ({"state": {}, "param_groups": 3}, "cannot load this state: "),
        ({"state": {}, "param_groups": [3]}, "cannot load this state: "),
        ({"state": {}, "param_groups": [{}]}, "cannot load this state: "),
        ({"state": {}, "param_groups": [{"params": [0]}]}, "cannot load this state: "),
        ({"state": 3, "param_groups": [{"params": [0, 1]}]}, "cannot load this state: "),
        ({"state": [1], "param_groups": [{"params": [0, 1]}]}, "cannot load this state: "),
    ],
)
def test_invalid_state_is_refused_and_changes_nothing(state, reason):
    bench = Bench()
    before = str(bench.optimizer.state_dict())
    with pytest.raises(ProtocolError, match=reason):
        bench.shard.load_optimizer_state(0, state)
    assert str(bench.optimizer.state_dict()) == before


def test_optimizer_state_can_be_loaded_again():
    bench, other = Bench(), Bench()
    bench.update(bench.gradient(0, *grads_of(1)))
    other.shard.load_optimizer_state(0, bench.shard.optimizer_state(0))
    assert str(other.optimizer.state_dict()) == str(bench.optimizer.state_dict())


def test_state_of_an_unknown_optimizer_is_refused():
    bench = Bench()
    with pytest.raises(ProtocolError, match="there is no optimizer 1"):
        bench.shard.optimizer_state(1)
    with pytest.raises(ProtocolError, match="there is no optimizer 1"):
        bench.shard.load_optimizer_state(1, {"state": {}, "param_groups": []})
    assert bench.shard.average is None


def test_average_of_half_precision_weights_is_kept_in_single_precision():
    model = nn.Linear(2, 2).bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=2**-7)
    state = gather([model], [optimizer])
    store = InProcessStore(state.spec)
    shard = Shard(state, [], store, ema=0.999)
    slot = store.new_accumulator()
    for view in slot.parameters[0]:
        view.fill_(1.0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1.0)
    expected = [mean.clone() for mean in shard.average[0]]
    for _ in range(20):
        make_update(shard, [SlotGradient(0, 0, 1, 1.0, frozenset(), slot)])
        for mean, parameter in zip(expected, model.parameters(), strict=True):
            mean.lerp_(parameter.detach().float(), 1 - 0.999)
    found = shard.average[0]
    assert all(mean.dtype == torch.float32 for mean in found)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
