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
from paceline.run.server.gradient_checks import CATCHING_UP, OptimizerPhases, check_gradient
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
    phases = OptimizerPhases(Cluster.of("sync").decider, shard)
    assert not phases.is_out_of_step(0, report(0))
    add(shard, 1, optimizer=0)
    assert not phases.is_out_of_step(0, report(0))
    assert phases.is_out_of_step(0, report(1))


def test_worker_that_does_not_catch_up_is_accepted_with_its_own_optimizer(shard):
    phases = OptimizerPhases(Cluster.of("sync").decider, shard)
    add(shard, 1, optimizer=0)
    refused = [phases.is_out_of_step(0, report(1)) for _ in range(CATCHING_UP + 2)]
    assert refused == [True] * CATCHING_UP + [False] * 2
    assert phases.is_out_of_step(1, report(1)), "each worker has its own patience"
    add(shard, 1, optimizer=1)  # now the update is for both
    assert not phases.is_out_of_step(1, report(1))
    assert not phases.is_out_of_step(0, report(0))


def test_patience_with_a_worker_that_has_caught_up_starts_over(shard):
    phases = OptimizerPhases(Cluster.of("sync").decider, shard)
    add(shard, 1, optimizer=0)
    for _ in range(3):
        refused = [phases.is_out_of_step(0, report(1)) for _ in range(CATCHING_UP)]
        assert all(refused)
        assert not phases.is_out_of_step(0, report(0))


def test_rule_that_mixes_turns_may_mix_optimizers(shard):
    decider = Cluster.of("softsync:2").decider
    assert decider.policy.repeats
    add(shard, 1, optimizer=0)
    assert not OptimizerPhases(decider, shard).is_out_of_step(0, report(1))


def test_worker_without_work_has_no_update_to_compare(shard):
    cluster = Cluster.of("sync")
    cluster.arrive(0)
    add(shard, 1, optimizer=0)
    phases = OptimizerPhases(cluster.decider, shard)
    assert not phases.is_out_of_step(0, report(1))
    assert not phases.is_out_of_step(7, report(1))
