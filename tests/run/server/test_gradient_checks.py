# SPDX-License-Identifier: BSD-3-Clause
"""The report of a gradient is checked before it becomes an event."""

import pytest
import torch
import torch._dynamo  # an optimizer loads it, and it sets an environment variable
from torch import nn

from fakes import Cluster
from paceline.errors import ProtocolError
from paceline.run.net.in_process import InProcessStore
from paceline.run.net.messages import GradientReport
from paceline.run.server.gradient_checks import check_gradient, is_of_another_optimizer
from paceline.run.tensors.layout import gather
from paceline.run.tensors.shard import Shard
from paceline.run.tensors.sums import SlotGradient


@pytest.fixture
def shard():
    """Return a shard with two optimizers: of two parameters and of one."""
    models = [nn.Linear(1, 1), nn.Linear(1, 1, bias=False)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    state = gather(models, optimizers)
    return Shard(state, [], InProcessStore(state.spec))


def report(optimizer=0, **fields):
    return GradientReport(1, 0, optimizer, 1, 0.0, 1.0, **fields)


def add(shard, update, optimizer):
    slot = shard._store.new_accumulator()
    shard.add(update, SlotGradient(9, optimizer, 1, 1.0, frozenset(), slot))


@pytest.mark.parametrize(
    "good",
    [
        report(),
        report(1),
        report(unused=(0, 1)),
        report(1, unused=(0,)),
    ],
)
def test_gradient_of_this_run_passes(shard, good):
    check_gradient(Cluster.of("sync").decider, shard, 0, good)


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (report(2), "there is no optimizer 2"),
        (report(0, unused=(2,)), "there is no parameter 2"),
        (report(1, unused=(0, 1)), "there is no parameter 1"),
        (report(cancelled=True), "turn 1 was not cancelled"),
    ],
)
def test_other_gradient_breaks_the_protocol(shard, bad, reason):
    with pytest.raises(ProtocolError, match=reason):
        check_gradient(Cluster.of("sync").decider, shard, 0, bad)


def test_gradient_that_would_not_count_may_be_cancelled(shard):
    cluster = Cluster.of("backup:1")
    cluster.arrive(0)
    cluster.arrive(1)  # worker 2 is late now
    check_gradient(cluster.decider, shard, 2, report(cancelled=True))
    with pytest.raises(ProtocolError, match="was not cancelled"):
        check_gradient(cluster.decider, shard, 0, report(cancelled=True))


def test_update_is_made_of_gradients_of_one_optimizer(shard):
    decider = Cluster.of("sync").decider
    assert not is_of_another_optimizer(decider, shard, 0, report(0))
    add(shard, 1, optimizer=0)
    assert not is_of_another_optimizer(decider, shard, 0, report(0))
    assert is_of_another_optimizer(decider, shard, 0, report(1))


def test_rule_that_mixes_turns_may_mix_optimizers(shard):
    decider = Cluster.of("softsync:2").decider
    assert decider.policy.repeats
    add(shard, 1, optimizer=0)
    assert not is_of_another_optimizer(decider, shard, 0, report(1))


def test_worker_without_work_has_no_update_to_compare(shard):
    cluster = Cluster.of("sync")
    cluster.arrive(0)
    add(shard, 1, optimizer=0)
    assert not is_of_another_optimizer(cluster.decider, shard, 0, report(1))
    assert not is_of_another_optimizer(cluster.decider, shard, 7, report(1))
