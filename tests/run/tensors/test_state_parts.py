# SPDX-License-Identifier: BSD-3-Clause
"""The state of a shard is split over servers, and is whole again to the bit."""

from copy import deepcopy

import pytest
import torch
import torch._dynamo  # an optimizer loads it, and it sets an environment variable
from torch import nn

from paceline.run.net.in_process import InProcessStore
from paceline.run.tensors.layout import flat, gather
from paceline.run.tensors.partition import partition
from paceline.run.tensors.shard import Shard
from paceline.run.tensors.state_parts import merge_shard_state, split_shard_state
from paceline.run.tensors.sums import SlotGradient
from shard_updates import make_update
from split_training import is_same

UNIT = 32


class Training:
    """A shard with an optimizer that can be split and one that can't, after some updates."""

    def __init__(self, updates=2, **options):
        torch.manual_seed(0)
        self.model = nn.Sequential(
            nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6), nn.Linear(7, 5), nn.Linear(16, 16)
        ).to(memory_format=torch.channels_last)
        self.model[2].requires_grad_(False)  # its parameters are constants
        own = [p for one in self.model[:2] for p in one.parameters()]
        self.state = gather(
            [self.model],
            [
                torch.optim.Adam(own, lr=0.1),
                torch.optim.Adafactor(self.model[3].parameters()),
            ],
        )
        self.spec = self.state.spec
        self.store = InProcessStore(self.spec)
        self.shard = Shard(self.state, [], self.store, **options)
        for number in range(updates):
            make_update(self.shard, [self.gradient(number, index) for index in (0, 1)])

    def gradient(self, number, optimizer):
        slot = self.store.new_accumulator()
        generator = torch.Generator().manual_seed(number)
        for one in slot.flats[optimizer]:
            one.copy_(torch.randn(one.shape, generator=generator))
        return SlotGradient(number, optimizer, 1, 1.0, frozenset({1}), slot)

    def parts(self, servers):
        return partition(self.spec, servers, [True, False], UNIT)


@pytest.mark.parametrize("servers", range(1, 6))
@pytest.mark.parametrize("ema", [None, 0.9])
def test_split_state_is_whole_again(servers, ema):
    training = Training(ema=ema)
    parts = training.parts(servers)
    saved = deepcopy(training.shard.state_dict())
    states = split_shard_state(saved, training.spec, parts)
    merged = merge_shard_state(states, training.spec, parts)
    assert is_same(merged, training.shard.state_dict())
    assert list(merged["optimizers"][0]["state"]) == [0, 2, 3]  # 1 never had a gradient


def test_merged_state_is_loaded_by_a_shard():
    training, other = Training(ema=0.9), Training(updates=0, ema=0.9)
    states = split_shard_state(
        deepcopy(training.shard.state_dict()), training.spec, training.parts(3)
    )
    other.shard.load_state_dict(2, merge_shard_state(states, training.spec, training.parts(3)))
    assert is_same(other.shard.state_dict(), training.shard.state_dict())


def test_state_is_merged_and_split_again_for_another_number_of_servers():
    training = Training(ema=0.9)
    saved = deepcopy(training.shard.state_dict())
    for servers in (3, 2, 5, 1, 4):
        parts = training.parts(servers)
        states = split_shard_state(saved, training.spec, parts)
        saved = merge_shard_state(states, training.spec, parts)
    assert is_same(saved, training.shard.state_dict())


def test_each_server_has_its_slices_and_the_head_everything_else():
    training = Training(ema=0.9)
    saved = training.shard.state_dict()
    parts = training.parts(5)
    head, *others = split_shard_state(saved, training.spec, parts)
    for name in saved.keys() - {"parameters", "average", "optimizers"}:
        assert head[name] is saved[name]
    assert head["parameters"][1] is saved["parameters"][1]
    assert head["optimizers"][1] is not None
    for part, state in zip(parts[1:], others, strict=True):
        assert state.keys() == {"parameters", "average", "optimizers"}
        assert [one.dim() for one in state["parameters"][0]] == [1] * len(part.slices[0])
        assert [len(one) for one in state["average"][0]] == [b - a for _, a, b in part.slices[0]]
        assert state["parameters"][1] == state["average"][1] == []
        assert state["optimizers"][1] is None


def test_slices_are_views_and_the_merged_tensors_are_not():
    training = Training(ema=0.9)
    saved, parts = training.shard.state_dict(), training.parts(2)
    states = split_shard_state(saved, training.spec, parts)
    whole = saved["parameters"][0][0]
    assert states[0]["parameters"][0][0].data_ptr() == whole.data_ptr()
    exp_avg = saved["optimizers"][0]["state"][0]["exp_avg"]
    assert states[0]["optimizers"][0]["state"][0]["exp_avg"].data_ptr() == exp_avg.data_ptr()
    merged = merge_shard_state(states, training.spec, parts)
    flat(merged["parameters"][0][0]).zero_()
    assert whole.count_nonzero() > 0


def test_server_without_a_slice_has_no_optimizer():
    model = nn.Linear(2, 2)
    state = gather([model], [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)])
    shard = Shard(state, [], InProcessStore(state.spec))
    parts = partition(state.spec, 3, [True], UNIT)
    states = split_shard_state(shard.state_dict(), state.spec, parts)
    assert [one["optimizers"][0] is None for one in states] == [False, True, True]
    assert [one["average"] for one in states] == [None] * 3
    assert is_same(merge_shard_state(states, state.spec, parts), shard.state_dict())


def test_head_has_the_state_of_an_optimizer_of_empty_parameters():
    model = nn.ParameterList([nn.Parameter(torch.ones(0, 3))])
    state = gather([model], [torch.optim.Adagrad(model, lr=0.1)])
    shard = Shard(state, [], InProcessStore(state.spec))
    parts = partition(state.spec, 2, [True], UNIT)
    states = split_shard_state(shard.state_dict(), state.spec, parts)
    assert [one["optimizers"][0] is None for one in states] == [False, True]
    assert is_same(merge_shard_state(states, state.spec, parts), shard.state_dict())
