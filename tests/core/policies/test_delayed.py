# SPDX-License-Identifier: BSD-3-Clause
"""Delayed updates: all W gradients of a step, applied k steps late."""

import pytest

from fakes import Cluster
from paceline.core.events import (
    Accept,
    ApplyUpdate,
    Cancel,
    Contribution,
    Drop,
    Fate,
    GradientArrived,
    SendParams,
    WorkerJoined,
)
from paceline.core.policies import Delayed
from paceline.errors import SpecError


def test_workers_continue_while_an_update_is_incomplete(decide):
    decider = decide("delayed:1", workers=2)
    for worker in range(2):
        decider.handle(WorkerJoined(0.0, worker))
    assert decider.handle(GradientArrived(1.0, 0, 1, 0)) == [
        Accept(0, 0, update=1),
        SendParams(0, turn=2, version=0),  # for update 2, while update 1 waits for worker 1
    ]
    assert decider.handle(GradientArrived(2.0, 0, 2, 0)) == [Accept(0, 0, update=2)]
    assert decider.handle(GradientArrived(3.0, 1, 1, 0)) == [
        Accept(1, 0, update=1),
        ApplyUpdate(1, (Contribution(0, 0, 1), Contribution(1, 0, 1)), (0.5, 0.5), (1.0, 1.0), 2),
        SendParams(0, turn=3, version=1),  # for update 3
        SendParams(1, turn=2, version=0),  # for update 2, at the version that worker 0 had
    ]
    assert decider.handle(GradientArrived(4.0, 1, 2, 0)) == [
        Accept(1, 0, update=2),
        ApplyUpdate(2, (Contribution(0, 0, 1), Contribution(1, 0, 1)), (0.5, 0.5), (1.0, 1.0), 2),
        SendParams(1, turn=3, version=1),
    ]


@pytest.mark.parametrize("k", [0, 1, 2, 5])
def test_staleness_is_exactly_k_once_k_updates_are_made(k):
    cluster = Cluster.of(Delayed(k))
    cluster.run_until(10)
    assert [update.staleness for update in cluster.updates] == [
        (min(k, made),) * 3 for made in range(10)
    ]


def test_all_workers_see_the_same_sequence_of_versions():
    cluster = Cluster.of("delayed:2")
    cluster.run_until(12)
    shortest = min(len(versions) for versions in cluster.turns.values())
    [sequence] = {tuple(versions[:shortest]) for versions in cluster.turns.values()}
    assert sequence[:6] == (0, 0, 0, 1, 2, 3)


@pytest.mark.parametrize("k", [1, 2, 3])
def test_fast_worker_is_at_most_k_updates_ahead(k):
    cluster = Cluster.of(Delayed(k), workers=2)
    for _ in range(k + 1):
        cluster.arrive(0)
    assert cluster.working == [1]


def test_new_worker_joins_the_next_update_at_the_version_of_the_others():
    cluster = Cluster.of("delayed:2")
    cluster.run_until(6)
    turn = len(cluster.turns[0]) + 1
    cluster.leave(0)
    assert cluster.join(0) == [SendParams(0, turn, version=4)]


def test_worker_retries_the_same_update_after_a_non_finite_gradient():
    cluster = Cluster.of("delayed:1", workers=2)
    assert cluster.arrive(0, finite=False) == [Drop(0, 0, Fate.NON_FINITE), SendParams(0, 2, 0)]
    assert cluster.arrive(0) == [Accept(0, 0, update=1), SendParams(0, 3, 0)]
    assert cluster.arrive(0) == [Accept(0, 0, update=2)]


def test_worker_excused_from_one_update_is_needed_for_the_next():
    cluster = Cluster.of("delayed:1", workers=2)
    cluster.arrive(1, finite=False)
    assert cluster.arrive(0) == [
        Accept(0, 0, update=1),
        ApplyUpdate(1, (Contribution(0, 0, 1),), (1.0,), (1.0,), wanted=2),
        Cancel(1, turn=2),
        SendParams(0, turn=2, version=0),
    ]
    assert cluster.arrive(0) == [Accept(0, 0, update=2), SendParams(0, turn=3, version=1)]
    assert cluster.abandon(1) == [Drop(1, 0, Fate.CANCELLED), SendParams(1, turn=3, version=0)]
    assert cluster.arrive(1)[1].staleness == (1, 1)


def test_worker_that_rejoins_continues_with_the_updates_it_lacks():
    cluster = Cluster.of("delayed:1")
    cluster.arrive(0)
    cluster.leave(0)
    cluster.join(0)
    assert cluster.arrive(0) == [Accept(0, 0, update=2)]


def test_worker_beyond_w_is_a_backup_and_may_be_late():
    cluster = Cluster.of("delayed:1", workers=2)
    cluster.join(2)
    cluster.arrive(0)
    assert Cancel(2, turn=1) in cluster.arrive(1)
    assert cluster.arrive(2) == [Drop(2, 0, Fate.LATE), SendParams(2, turn=2, version=0)]


def test_k_below_zero_is_refused():
    with pytest.raises(SpecError, match="k must be >= 0, got -1; use 0 for sync"):
        Delayed(-1)
