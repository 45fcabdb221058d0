# SPDX-License-Identifier: BSD-3-Clause
"""A server that holds a part has only that part of the script's own tensors."""

import pytest
import torch
import torch._dynamo  # an optimizer loads it, and it sets an environment variable
from torch import nn

from paceline.run.tensors.layout import flat, gather
from paceline.run.tensors.part_tensors import dense, take_part
from paceline.run.tensors.partition import partition

UNIT = 32


def make():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(33, 5), nn.BatchNorm1d(5), nn.Linear(7, 9))
    own = [*model[0].parameters(), *model[1].parameters()]
    optimizers = [torch.optim.SGD(own, lr=0.5), torch.optim.Adafactor(model[2].parameters())]
    return model, gather([model], optimizers)


def take(server, servers=3):
    model, state = make()
    part = partition(state.spec, servers, [True, False], UNIT)[server]
    before = [[p.detach().clone() for p in own] for own in state.parameters]
    return model, part, before, take_part(state, part)


@pytest.mark.parametrize("server", range(3))
def test_parameters_shrink_to_slices_with_the_values_of_the_whole(server):
    _, part, before, taken = take(server)
    assert taken.spec == part.spec
    slices = part.slices[0]
    assert len(taken.parameters[0]) == len(slices)
    for own, (i, begin, end) in zip(taken.parameters[0], slices, strict=True):
        assert torch.equal(own, flat(before[0][i])[begin:end])


def test_parameters_of_others_are_empty_and_optimizers_skip_them():
    model, part, _, taken = take(2)
    held = {one.parameter for one in part.slices[0]}
    everything = [*model[0].parameters(), *model[1].parameters()]
    for i, parameter in enumerate(everything):
        assert (parameter.numel() > 0) == (i in held)
    for own in taken.parameters[0]:
        own.grad = torch.ones_like(own)
    values = [own.detach().clone() for own in taken.parameters[0]]
    taken.optimizers[0].step()
    for own, before in zip(taken.parameters[0], values, strict=True):
        assert torch.equal(own, before - 0.5)


@pytest.mark.parametrize("server", range(3))
def test_optimizer_that_cannot_be_split_is_whole_on_the_head_and_empty_elsewhere(server):
    _, _, before, taken = take(server)
    if server == 0:
        assert all(map(torch.equal, taken.parameters[1], before[1]))
    else:
        assert taken.parameters[1] == []


@pytest.mark.parametrize("server", range(3))
def test_only_the_head_has_buffers(server):
    _, _, _, taken = take(server)
    assert len(taken.buffers) == (2 if server == 0 else 0)
    assert len(taken.counters) == (1 if server == 0 else 0)


def test_only_server_has_everything_as_it_was():
    _, state = make()
    before = [[p.data_ptr() for p in own] for own in state.parameters]
    [part] = partition(state.spec, 1, [True, False])
    taken = take_part(state, part)
    assert [[p.data_ptr() for p in own] for own in taken.parameters] == before


def test_dense_tensors_are_not_copied():
    _, state = make()
    found = dense(state)
    pairs = zip(found, state.parameters, strict=True)
    assert all(a.data_ptr() == b.data_ptr() for own in pairs for a, b in zip(*own, strict=True))
    assert not any(one.requires_grad for own in found for one in own)


def test_parameter_with_gaps_is_copied_to_memory_without_gaps():
    _, state = make()
    gapped = nn.Parameter(torch.arange(12.0).view(3, 4)[:, :2])
    state.parameters[0][0] = gapped
    found = dense(state)[0][0]
    assert torch.equal(found, gapped)
    assert found.stride() == (2, 1)
