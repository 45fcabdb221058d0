# SPDX-License-Identifier: BSD-3-Clause
"""The server's tensors: nobody writes where somebody reads, and a step is a step of torch."""

import os

import pytest
import torch
import torch._dynamo  # an optimizer loads it, and it sets a variable of the environment
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils import clip_grad_norm_
from torch.optim.lr_scheduler import StepLR

from message_examples import unhurried
from paceline.errors import ProtocolError
from paceline.run.settings import Settings
from paceline.run.tensors.layout import gather
from paceline.run.tensors.shard import Shard
from paceline.run.tensors.sums import SlotGradient
from paceline.spec import RunSpec


class Bench:
    """A shard, workers' slots by hand, and the same model stepped by torch alone."""

    def __init__(self, versions_kept=1, **options):
        self.model, self.optimizer, self.scheduler = make()
        self.plain, self.plain_optimizer, self.plain_scheduler = make()
        common = gather([self.model], [self.optimizer])
        told = Settings(spec=RunSpec(workers=3), **options)
        self.shard = Shard(common, [self.scheduler], told, versions_kept)
        self.slots = {}

    def slot(self, worker):
        if worker not in self.slots:
            self.slots[worker], fd = self.shard.new_slot()
            os.close(fd)
        return self.slots[worker]

    def give(self, update, worker, *grads, samples=1, unused=()):
        """A worker gives these gradients."""
        slot = self.slot(worker)
        for view, grad in zip(slot.parameters[0], grads, strict=True):
            view.copy_(grad)
        self.shard.give(update, SlotGradient(worker, 0, samples, 1.0, frozenset(unused), slot))

    def same(self):
        """Whether both models are equal, to the bit."""
        pairs = zip(self.model.parameters(), self.plain.parameters(), strict=True)
        return all(torch.equal(a, b) for a, b in pairs)

    def close(self):
        for fd in (self.shard.constants_fd, *(place.fd for place in self.shard._places)):
            os.close(fd)


def make():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3, affine=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    return model, optimizer, StepLR(optimizer, step_size=2, gamma=0.1)


@pytest.fixture
def bench():
    made = []

    def build(**options):
        made.append(Bench(**options))
        return made[-1]

    yield build
    for one in made:
        one.close()


def grads_of(seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(3, 2, generator=generator), torch.randn(3, generator=generator)


# -------------------------------------------------------------------------------------- updates


def test_an_update_is_a_step_of_torch_along_the_average(bench):
    one = bench()
    for update in range(1, 6):
        for worker in (2, 0, 1):
            one.give(update, worker, *grads_of(10 * update + worker), samples=4)
        applied = one.shard.apply(update)
        for i, parameter in enumerate(one.plain.parameters()):
            parts = [grads_of(10 * update + w)[i] for w in range(3)]
            parameter.grad = (parts[0] + parts[1] + parts[2]) * (1 / 3)
        norm = sum(float(p.grad.square().sum()) for p in one.plain.parameters())
        one.plain_optimizer.step()
        one.plain_scheduler.step()
        assert one.same()
        assert applied.sq_norm == pytest.approx(norm)
        assert one.optimizer.param_groups[0]["lr"] == one.plain_optimizer.param_groups[0]["lr"]
        assert (one.shard.version, one.shard.steps) == (update, [update])
        assert one.shard.steps_at(update) == (update,)


@pytest.mark.parametrize("limit", [0.01, 1.0, 1000.0])
def test_an_average_is_clipped_as_torch_clips(bench, limit):
    one = bench(clip_norm=limit)
    one.give(1, 0, *grads_of(1))
    one.give(1, 1, *grads_of(2))
    unclipped = one.shard.apply(1).sq_norm
    for i, parameter in enumerate(one.plain.parameters()):
        parameter.grad = (grads_of(1)[i] + grads_of(2)[i]) / 2
    norm = clip_grad_norm_(one.plain.parameters(), limit)
    one.plain_optimizer.step()
    assert unclipped == pytest.approx(float(norm) ** 2)
    for ours, theirs in zip(one.model.parameters(), one.plain.parameters(), strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-5, atol=1e-7)


def test_a_parameter_that_nobody_used_is_not_stepped_at_all(bench):
    """Not even by its momentum, nor by weight decay: torch leaves it alone as well."""
    one = bench()
    for update, unused in ((1, ()), (2, (1,)), (3, (1,))):
        one.give(update, 0, *grads_of(update), unused=unused)
        one.shard.apply(update)
        for i, parameter in enumerate(one.plain.parameters()):
            parameter.grad = None if i in unused else grads_of(update)[i]
        one.plain_optimizer.step()
        one.plain_scheduler.step()
        assert one.same()


def test_a_parameter_that_one_worker_used_is_stepped(bench):
    one = bench()
    weight, bias = grads_of(1)
    one.give(1, 0, weight, torch.zeros(3), unused=(1,))
    one.give(1, 1, weight, bias)
    one.shard.apply(1)
    for parameter, grad in zip(one.plain.parameters(), (weight, bias / 2), strict=True):
        parameter.grad = grad
    one.plain_optimizer.step()
    assert one.same()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_an_average_that_is_not_finite_steps_nothing(bench, bad):
    one = bench(ema=0.5)
    one.give(1, 0, *grads_of(1))
    one.shard.apply(1)
    before = {name: value.clone() for name, value in one.model.state_dict().items()}
    state = str(one.optimizer.state_dict())
    average = [mean.clone() for mean in one.shard.state("average", 0)[0]]
    weight, bias = grads_of(2)
    weight[1, 1] = bad
    one.give(2, 0, weight, bias)
    one.give(2, 1, *grads_of(3))
    one.slots[0].buffers[0].fill_(bad)
    applied = one.shard.apply(2)
    assert not applied.is_sound
    assert (one.shard.version, one.shard.steps, one.shard.steps_at(2)) == (2, [1], (1,))
    assert str(one.optimizer.state_dict()) == state
    for name, value in one.model.state_dict().items():
        assert torch.equal(value, before[name])
    for mean, was in zip(one.shard.state("average", 0)[0], average, strict=True):
        assert torch.equal(mean, was)
    one.give(3, 0, *grads_of(4))  # and it goes on
    assert one.shard.apply(3).is_sound
    assert all(parameter.isfinite().all() for parameter in one.model.parameters())


def test_the_moving_average_follows_the_weights(bench):
    one = bench(ema=0.75)
    expected = [parameter.detach().clone() for parameter in one.model.parameters()]
    for update in range(1, 4):
        one.give(update, 0, *grads_of(update))
        one.shard.apply(update)
        for mean, parameter in zip(expected, one.model.parameters(), strict=True):
            mean.mul_(0.75).add_(parameter.detach(), alpha=0.25)
    for mean, ours in zip(expected, one.shard.state("average", 0)[0], strict=True):
        assert torch.allclose(mean, ours)


def test_buffers_are_averaged_and_counters_taken_from_the_first_worker(bench):
    one = bench()
    for worker, value in ((1, 2.0), (0, 6.0)):
        for buffer in one.slot(worker).buffers:
            buffer.fill_(value)
        one.slot(worker).counters[0].fill_(worker + 5)
        one.give(1, worker, *grads_of(worker), samples=1 + 2 * worker)
    one.shard.apply(1)
    views = one.shard.newest.views
    assert [buffer.tolist() for buffer in views.buffers] == [[3.0] * 3] * 2
    assert int(views.counters[0]) == 5


def test_a_worker_may_go_on_before_its_update_is_made(bench):
    """What lies in its slot is added up, and then it is free."""
    one, other = bench(), bench()
    for b in (one, other):
        for worker in range(3):
            b.give(1, worker, *grads_of(worker))
            if b is one:
                b.shard.free_slot(worker)
                b.slots[worker].flats[0][0].fill_(torch.nan)
        b.shard.apply(1)
    for ours, theirs in zip(one.model.parameters(), other.model.parameters(), strict=True):
        assert torch.allclose(ours, theirs)


def test_updates_can_be_in_the_making_side_by_side(bench):
    one = bench(versions_kept=2)
    one.give(2, 0, *grads_of(2))
    one.shard.free_slot(0)
    one.give(1, 0, *grads_of(1))
    assert [one.shard.optimizer_of(update) for update in (1, 2, 3)] == [0, 0, None]
    for update in (1, 2):
        one.shard.apply(update)
        for parameter, grad in zip(one.plain.parameters(), grads_of(update), strict=True):
            parameter.grad = grad
        one.plain_optimizer.step()
        one.plain_scheduler.step()
        assert one.same()


# --------------------------------------------------------------------------------------- places

steps = st.lists(
    st.one_of(
        st.tuples(st.just("read"), st.integers(0, 3), st.integers(0, 3)),
        st.tuples(st.just("leave"), st.integers(0, 3), st.just(0)),
        st.tuples(st.just("apply"), st.integers(0, 3), st.just(0)),
    ),
    max_size=30,
)


@pytest.mark.parametrize("kept", [1, 2, 3])
def test_nobody_writes_where_somebody_reads(kept):
    @settings(unhurried, max_examples=30)
    @given(steps)
    def keeps_all(steps):
        one = Bench(versions_kept=kept)
        shard, readers, most = one.shard, {}, 0
        versions = {0: content(shard.newest)}
        for what, worker, back in steps:
            if what == "leave":
                shard.leave(worker)
                readers.pop(worker, None)
            elif what == "read":
                version = max(max(versions) - min(back, kept - 1), 0)
                readers[worker] = (shard.read(worker, version), version)
            else:
                was, update = shard.newest, shard.version + 1
                is_read = any(place is was for place, _ in readers.values())
                one.give(update, worker, *grads_of(update))
                shard.apply(update)
                versions[update] = content(shard.newest)
                assert not torch.equal(versions[update], versions[update - 1])
                assert (shard.newest is was) == (not is_read and kept == 1)
            for place, version in readers.values():
                assert torch.equal(content(place), versions[version])
            most = max(most, len(readers))
            assert len(shard._places) <= most + kept + 1
        assert torch.equal(content(shard.newest), flat(one.model.parameters()))
        one.close()

    keeps_all()


def content(place):
    return flat(place.views.parameters[0])


def flat(tensors):
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


def test_where_all_wait_for_the_update_there_is_one_place(bench):
    one = bench()
    for update in range(1, 10):
        for worker in range(3):
            one.shard.read(worker, update - 1)
        for worker in range(3):
            one.shard.leave(worker)
            one.give(update, worker, *grads_of(update))
        one.shard.apply(update)
    assert len(one.shard._places) == 1


def test_a_straggler_costs_one_place_more_however_long_it_takes(bench):
    one = bench()
    place = one.shard.read(7, 0)
    before = content(place).clone()
    for update in range(1, 20):
        one.give(update, 0, *grads_of(update))
        one.shard.apply(update)
    assert len(one.shard._places) == 2
    assert torch.equal(content(place), before)


def test_accumulators_are_used_again(bench):
    one = bench()
    before = len(os.listdir("/proc/self/fd"))
    for update in range(1, 20):
        for worker in range(3):
            one.give(update, worker, *grads_of(worker))
            one.shard.free_slot(worker)
        one.shard.apply(update)
    assert len(one.shard._accumulators) == 1
    assert len(os.listdir("/proc/self/fd")) <= before + 4  # three slots, one accumulator


# ---------------------------------------------------------------------------------------- state


@pytest.mark.parametrize(
    ("state", "what"),
    [
        (None, "not the state of an optimizer"),
        ([], "not the state of an optimizer"),
        ({"state": {}}, "not the state of an optimizer"),
        ({"state": {}, "param_groups": []}, "cannot load this state: "),
        ({"state": {}, "param_groups": 3}, "cannot load this state: "),
        ({"state": {}, "param_groups": [3]}, "cannot load this state: "),
        ({"state": {}, "param_groups": [{}]}, "cannot load this state: "),
        ({"state": {}, "param_groups": [{"params": [0]}]}, "cannot load this state: "),
        ({"state": 3, "param_groups": [{"params": [0, 1]}]}, "cannot load this state: "),
        ({"state": [1], "param_groups": [{"params": [0, 1]}]}, "cannot load this state: "),
    ],
)
def test_what_is_no_state_is_not_loaded(bench, state, what):
    one = bench()
    before = str(one.optimizer.state_dict())
    with pytest.raises(ProtocolError, match=what):
        one.shard.load_state(0, state)
    assert str(one.optimizer.state_dict()) == before


def test_a_state_that_was_given_out_can_be_loaded_again(bench):
    one, other = bench(), bench()
    one.give(1, 0, *grads_of(1))
    one.shard.apply(1)
    other.shard.load_state(0, one.shard.state("optimizer", 0))
    assert str(other.optimizer.state_dict()) == str(one.optimizer.state_dict())


def test_what_is_not_there_cannot_be_given_out(bench):
    one = bench()
    with pytest.raises(ProtocolError, match="there is no optimizer 1"):
        one.shard.state("optimizer", 1)
    with pytest.raises(ProtocolError, match="this run keeps no average of the weights"):
        one.shard.state("average", 0)


def test_the_average_of_weights_in_half_precision_has_digits_enough():
    model = nn.Linear(2, 2).bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=2**-7)
    told = Settings(spec=RunSpec(workers=1), ema=0.999)
    shard = Shard(gather([model], [optimizer]), [], told, 1)
    slot, fd = shard.new_slot()
    os.close(fd)
    for view in slot.parameters[0]:
        view.fill_(1.0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1.0)
    expected = [mean.clone() for mean in shard.state("average", 0)[0]]
    for update in range(1, 21):
        shard.give(update, SlotGradient(0, 0, 1, 1.0, frozenset(), slot))
        shard.apply(update)
        for mean, parameter in zip(expected, model.parameters(), strict=True):
            mean.lerp_(parameter.detach().float(), 1 - 0.999)
    found = shard.state("average", 0)[0]
    assert all(mean.dtype == torch.float32 for mean in found)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    for one in (shard.constants_fd, *(place.fd for place in shard._places)):
        os.close(one)


def test_large_but_finite_gradients_are_stepped_and_clipped(bench):
    one = bench(clip_norm=1.0)
    before = [p.detach().clone() for p in one.model.parameters()]
    one.give(1, 0, torch.full((3, 2), 1e30), torch.zeros(3))
    applied = one.shard.apply(1)
    assert applied.is_sound
    assert applied.sq_norm == pytest.approx(6e60)
    moved = [b - p.detach() for b, p in zip(before, one.model.parameters(), strict=True)]
    norm = sum(m.double().square().sum() for m in moved) ** 0.5
    assert float(norm) == pytest.approx(0.5, rel=1e-3)  # the learning rate


def test_when_an_optimizer_raises_there_is_a_version_to_end_with(bench):
    one = bench()
    one.optimizer.param_groups[0]["lr"] = "a word"
    one.give(1, 0, *grads_of(1))
    with pytest.raises(TypeError):
        one.shard.apply(1)
    assert one.shard.version == 1
    assert one.shard.newest is one.shard.read(0, 1)
