# SPDX-License-Identifier: BSD-3-Clause
"""A worker's optimizers follow the options and the schedulers of the server."""

import pytest
import torch
import torch._dynamo  # optimizers import it, and it sets an environment variable
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR

from paceline.errors import SpecError
from paceline.run.tensors.state_spec import OptionChange, SchedulerCalls
from paceline.run.worker.batch_stream import Batches
from paceline.run.worker.optimizer import pace
from paceline.run.worker.optimizer_sync import OptimizerSettings


class NoPacer:
    """Optimizers don't step in these tests."""


@pytest.fixture
def optimizers():
    return [torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=lr) for lr in (1.0, 8.0)]


@pytest.fixture
def schedulers(optimizers):
    return [ExponentialLR(optimizer, gamma=0.5) for optimizer in reversed(optimizers)]


@pytest.fixture
def settings(optimizers, schedulers):
    """Each optimizer has a scheduler that halves its learning rate."""
    for number, optimizer in enumerate(optimizers):
        pace(optimizer, number, NoPacer())
    return OptimizerSettings(optimizers, schedulers, worker=0, passes=Batches(2))


def rates(optimizers):
    return [optimizer.param_groups[0]["lr"] for optimizer in optimizers]


def test_schedulers_follow_the_servers(optimizers, settings):
    settings.follow(0, [3, 1], {}, ())
    assert rates(optimizers) == [0.5, 1.0]
    settings.follow(0, [3, 3], {}, ())
    assert rates(optimizers) == [0.125, 1.0]


def test_schedulers_wait_for_a_restored_server_that_is_behind(optimizers, settings):
    settings.follow(0, [0, 3], {}, ())
    settings.follow(0, [0, 1], {}, ())
    settings.follow(0, [0, 3], {}, ())
    assert rates(optimizers) == [0.125, 8.0]
    settings.follow(0, [0, 4], {}, ())
    assert rates(optimizers) == [0.0625, 8.0]


def test_option_changed_by_the_server_is_not_returned_as_changed(optimizers, settings):
    settings.follow(0, [0, 1], {}, [OptionChange(1, 0, "lr", 0.25)])
    assert rates(optimizers) == [0.5, 0.25]
    assert settings.changes(0) == ((), ())


def test_option_changed_by_the_script_is_returned_once(optimizers, settings):
    optimizers[1].param_groups[0]["momentum"] = 0.75
    assert settings.changes(0).options == (OptionChange(1, 0, "momentum", 0.75),)
    assert settings.changes(0).options == ()


def test_options_of_a_loaded_state_are_adopted_and_not_returned_as_changed(optimizers, settings):
    loaded = {"lr": 0.25, "momentum": 0.5, "params": [0]}
    settings.adopt(0, {"state": {}, "param_groups": [loaded]})
    group = optimizers[0].param_groups[0]
    assert (group["lr"], group["momentum"]) == (0.25, 0.5)
    assert isinstance(group["params"][0], nn.Parameter)
    assert settings.changes(0).options == ()


def test_step_of_a_scheduler_is_not_a_change_of_an_option(optimizers, schedulers, settings):
    optimizers[1].param_groups[0]["lr"] = 4.0  # by hand, before the call
    schedulers[0].step()
    assert rates(optimizers) == [1.0, 2.0]
    settings.count_push(1)
    changes = settings.changes(1)
    assert changes.options == (OptionChange(1, 0, "lr", 4.0),)
    assert changes.schedulers == (SchedulerCalls(0, "call", 1),)


def test_state_has_the_options_that_the_server_does_not_know(optimizers, schedulers, settings):
    """And no others: some optimizers keep state in their groups."""
    optimizers[1].param_groups[0]["lr"] = 4.0
    optimizers[0].param_groups[0]["momentum"] = 0.5
    schedulers[0].step()
    there = {"lr": 8.0, "momentum": 0.0, "weight_decay": 0.25, "k": 3}
    state = {"state": {}, "param_groups": [dict(there)]}
    settings.put_own_options(1, state)
    assert state["param_groups"] == [there | {"lr": 2.0}]
    settings.count_push(1)
    settings.changes(1)
    state = {"state": {}, "param_groups": [dict(there)]}
    settings.put_own_options(1, state)
    assert state["param_groups"] == [there]


def test_schedulers_go_back_with_a_restored_server(optimizers, schedulers, settings):
    settings.follow(0, [0, 3], {}, ())
    settings.join()
    settings.follow(0, [0, 1], {}, [OptionChange(0, 0, "lr", 0.5)])
    assert (rates(optimizers), schedulers[1].last_epoch) == ([0.5, 8.0], 1)
    settings.follow(0, [0, 3], {}, ())
    assert rates(optimizers) == [0.125, 8.0]


def test_server_with_other_schedulers_is_refused(settings):
    with pytest.raises(SpecError, match=r"got 2 schedulers here and 1 on the server"):
        settings.follow(0, [0], {}, ())
