# SPDX-License-Identifier: BSD-3-Clause
"""A state from which no run can continue is recognized, and nothing else."""

from math import inf, nan

import pytest
import torch
import torch._dynamo  # an optimizer loads it, and it sets an environment variable
from torch import nn

from paceline.run.net.in_process import InProcessStore
from paceline.run.tensors.finite_check import first_spoiled
from paceline.run.tensors.layout import gather
from paceline.run.tensors.shard import Shard


@pytest.fixture
def shard():
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    state = gather([model], [optimizer])
    return Shard(state, [], InProcessStore(state.spec))


def test_usual_state_is_fine(shard):
    assert first_spoiled(shard.state_dict()) == ""


@pytest.mark.parametrize("bad", [nan, inf])
def test_parameter_must_be_finite(shard, bad):
    shard.newest.views.parameters[0][1][1] = bad
    assert first_spoiled(shard.state_dict()) == "parameter '0.bias'"


def test_mask_that_is_infinite_from_the_start_is_fine():
    model = nn.Linear(3, 2)
    model.mask = nn.Parameter(torch.full((2, 2), -inf).triu(1), requires_grad=False)
    state = gather([model], [torch.optim.SGD(model.parameters())])
    shard = Shard(state, [], InProcessStore(state.spec))
    assert first_spoiled(shard.state_dict()) == ""
    shard.newest.views.parameters[0][0][0, 0] = inf
    assert first_spoiled(shard.state_dict()) == "parameter 'weight'"


@pytest.mark.parametrize(("bad", "what"), [(nan, "the state of optimizer 0"), (inf, "")])
def test_state_of_an_optimizer_must_not_contain_nan(shard, bad, what):
    state = shard.state_dict()
    state["optimizers"][0]["state"][0]["exp_avg"][0, 0] = bad
    assert first_spoiled(state) == what


@pytest.mark.parametrize("bad", [nan, inf])
def test_buffer_may_be_anything(shard, bad):
    shard.newest.views.buffers[0].fill_(bad)
    assert first_spoiled(shard.state_dict()) == ""


def test_large_numbers_are_finite(shard):
    shard.newest.views.parameters[0][0].fill_(3e38)
    assert first_spoiled(shard.state_dict()) == ""
