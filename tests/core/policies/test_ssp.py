# SPDX-License-Identifier: BSD-3-Clause
"""Stale synchronous parallel: no worker is more than s turns ahead of the slowest."""

from random import Random

import pytest

from fakes import Cluster, random_steps
from paceline.core.events import (
    Accept,
    ApplyUpdate,
    Contribution,
    Drop,
    Fate,
    GradientArrived,
    Resume,
    SendParams,
    WorkerJoined,
    WorkerLeft,
)
from paceline.core.policies import Ssp
from paceline.errors import SpecError


def test_worker_that_is_too_far_ahead_waits_for_the_slowest(decide):
    decider = decide("ssp:1", workers=2)
    assert decider.handle(WorkerJoined(0.0, 0)) == [Resume(), SendParams(0, turn=1, version=0)]
    assert decider.handle(WorkerJoined(0.0, 1)) == [SendParams(1, turn=1, version=0)]
    assert decider.handle(GradientArrived(1.0, 0, 1, 0)) == [
        Accept(0, 0, update=1),
        ApplyUpdate(1, (Contribution(0, 0, 1),), (1.0,), (1.0,), 1),
        SendParams(0, turn=2, version=1),
    ]
    assert decider.handle(GradientArrived(2.0, 0, 2, 1)) == [
        Accept(0, 1, update=2),
        ApplyUpdate(2, (Contribution(0, 1, 1),), (1.0,), (1.0,), 1),
    ]
    assert decider.handle(GradientArrived(3.0, 1, 1, 0)) == [
        Accept(1, 0, update=3),
        ApplyUpdate(3, (Contribution(1, 0, 1),), (1.0,), (1.0,), 1),
        SendParams(0, turn=3, version=3),
        SendParams(1, turn=2, version=3),
    ]


def test_ssp_0_is_a_barrier_in_every_turn():
    cluster = Cluster.of("ssp:0")
    for _ in range(3):
        for worker in (2, 0, 1):
            assert worker in cluster.working
            cluster.arrive(worker)
    assert cluster.version == 9


def test_death_of_the_slowest_frees_the_others(decide):
    decider = decide("ssp:0", workers=2)
    for worker in range(2):
        decider.handle(WorkerJoined(0.0, worker))
    decider.handle(GradientArrived(1.0, 0, 1, 0))
    assert decider.handle(WorkerLeft(2.0, 1)) == [SendParams(0, turn=2, version=1)]


def test_new_worker_starts_at_the_count_of_the_slowest():
    """The others don't wait for it to catch up, and it doesn't run ahead."""
    cluster = Cluster.of("ssp:0", workers=2)
    cluster.run_until(10)
    assert cluster.join(7) == [SendParams(7, turn=1, version=10)]
    assert cluster.decider.ledger.memory == {0: 5, 1: 5, 7: 5}
    cluster.arrive(0)
    cluster.arrive(1)
    assert cluster.working == [7]
    assert [a.worker for a in cluster.arrive(7)[2:]] == [0, 1, 7]


def test_worker_that_rejoins_starts_at_the_count_of_the_slowest():
    cluster = Cluster.of("ssp:0", workers=2)
    cluster.leave(1)
    cluster.run_until(6)
    cluster.join(1)
    assert cluster.decider.ledger.memory == {0: 6, 1: 6}


def test_first_worker_starts_at_zero():
    cluster = Cluster.of("ssp:2", joined=False)
    cluster.join(5)
    assert cluster.decider.ledger.memory == {5: 0}


def test_workers_that_left_are_forgotten_when_another_joins():
    """The state of a long run must not grow, nor may the run wait for dead workers."""
    cluster = Cluster.of("ssp:0", workers=2)
    cluster.arrive(0)
    cluster.leave(1)
    cluster.join(7)
    assert cluster.decider.ledger.memory == {0: 1, 7: 1}


def test_non_finite_gradient_counts_as_finished_but_an_abandoned_one_does_not():
    cluster = Cluster.of("ssp:0", workers=2)
    assert cluster.abandon(0) == [Drop(0, 0, Fate.CANCELLED), SendParams(0, 2, 0)]
    assert cluster.arrive(0, finite=False) == [Drop(0, 0, Fate.NON_FINITE)]


@pytest.mark.parametrize("s", [0, 1, 3])
def test_no_worker_is_more_than_s_ahead_of_the_slowest(s):
    cluster = Cluster.of(Ssp(s), workers=4)
    ledger = cluster.decider.ledger
    for _ in random_steps(cluster, Random(s), 300):
        finished = {worker: ledger.memory[worker] for worker in ledger.members}
        at_work = [finished[worker] for worker, member in ledger.members.items() if member.work]
        assert all(count - min(finished.values()) <= s for count in at_work)


def test_bound_and_lr_can_be_added():
    cluster = Cluster.of("ssp:3,bound=1,lr=inverse")
    cluster.arrive(0)
    cluster.arrive(0)
    assert cluster.cancelled == {1, 2}
    assert cluster.arrive(1)[0] == Drop(1, 0, Fate.STALE)


def test_s_below_zero_is_refused():
    with pytest.raises(SpecError, match="s must be >= 0, got -1; use 0 for a full barrier"):
        Ssp(-1)


def test_settings_of_all_free_rules_are_checked():
    with pytest.raises(SpecError, match="bound must be >= 0"):
        Ssp(2, bound=-2)
