# SPDX-License-Identifier: BSD-3-Clause
"""A worker's optimizers follow the options and the schedulers of the server."""

import pytest
import torch
import torch._dynamo  # optimizers import it, and it sets an environment variable
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR

from paceline.run.tensors.state_spec import OptionChange
from paceline.run.worker.lr_schedulers import follow
from paceline.run.worker.optimizer import pace
from paceline.run.worker.optimizer_sync import OptimizerSettings


class NoPacer:
    """Optimizers don't step in these tests."""


@pytest.fixture
def optimizers():
    return [torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=lr) for lr in (1.0, 8.0)]


@pytest.fixture
def settings(optimizers):
    """Each optimizer has a scheduler that halves its learning rate."""
    schedulers = [ExponentialLR(optimizer, gamma=0.5) for optimizer in reversed(optimizers)]
    for number, optimizer in enumerate(optimizers):
        pace(optimizer, number, NoPacer())
    for scheduler in schedulers:
        follow(scheduler, server=True)
    return OptimizerSettings(optimizers, schedulers)


def rates(optimizers):
    return [optimizer.param_groups[0]["lr"] for optimizer in optimizers]


def test_schedulers_advance_as_often_as_the_servers_optimizers_have_stepped(optimizers, settings):
    settings.follow([1, 3], ())
    assert rates(optimizers) == [0.5, 1.0]
    settings.follow([3, 3], ())
    assert rates(optimizers) == [0.125, 1.0]


def test_schedulers_wait_for_a_restored_server_that_is_behind(optimizers, settings):
    settings.follow([3, 0], ())
    settings.follow([1, 0], ())
    settings.follow([3, 0], ())
    assert rates(optimizers) == [0.125, 8.0]
    settings.follow([4, 0], ())
    assert rates(optimizers) == [0.0625, 8.0]


def test_option_changed_by_the_server_is_not_returned_as_changed(optimizers, settings):
    settings.follow([1, 0], [OptionChange(1, 0, "lr", 0.25)])
    assert rates(optimizers) == [0.5, 0.25]
    assert settings.changed() == ()


def test_option_changed_by_the_script_is_returned_once(optimizers, settings):
    optimizers[1].param_groups[0]["momentum"] = 0.75
    assert settings.changed() == (OptionChange(1, 0, "momentum", 0.75),)
    assert settings.changed() == ()


def test_options_of_a_loaded_state_are_adopted_and_not_returned_as_changed(optimizers, settings):
    loaded = {"lr": 0.25, "momentum": 0.5, "params": [0]}
    settings.adopt(0, {"state": {}, "param_groups": [loaded]})
    group = optimizers[0].param_groups[0]
    assert (group["lr"], group["momentum"]) == (0.25, 0.5)
    assert isinstance(group["params"][0], nn.Parameter)
    assert settings.changed() == ()
