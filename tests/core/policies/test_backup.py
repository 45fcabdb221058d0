# SPDX-License-Identifier: BSD-3-Clause
"""Backup workers: the first W - b gradients of a version; the rest are late."""

import pytest

from fakes import Cluster, make_decider
from paceline.core.events import (
    Accept,
    ApplyUpdate,
    Cancel,
    Contribution,
    Drop,
    Fate,
    GradientArrived,
    SendParams,
    WorkAbandoned,
    WorkerJoined,
)
from paceline.core.policies import Backup
from paceline.errors import SpecError


def test_first_n_make_the_update_and_the_rest_are_cancelled(decide):
    decider = decide("backup:1")
    for worker in range(3):
        decider.handle(WorkerJoined(0.0, worker))
    assert decider.handle(GradientArrived(1.0, 2, 1, 0)) == [Accept(2, 0, update=1)]
    assert decider.handle(GradientArrived(2.0, 0, 1, 0)) == [
        Accept(0, 0, update=1),
        ApplyUpdate(1, (Contribution(2, 0, 1), Contribution(0, 0, 1)), (0.5, 0.5), (1.0, 1.0), 2),
        Cancel(1, turn=1),
        SendParams(2, turn=2, version=1),
        SendParams(0, turn=2, version=1),
    ]
    assert decider.handle(WorkAbandoned(3.0, 1, 1)) == [
        Drop(1, 0, Fate.CANCELLED),
        SendParams(1, turn=2, version=1),
    ]


def test_late_gradient_is_dropped_and_its_worker_continues_with_the_newest_version():
    cluster = Cluster.of("backup:1")
    cluster.run_until(5, silent={2})
    assert cluster.arrive(2) == [Drop(2, 0, Fate.LATE), SendParams(2, turn=2, version=5)]


def test_late_worker_is_cancelled_once_even_over_several_updates():
    cluster = Cluster.of("backup:1")
    cluster.run_until(5, silent={2})
    told = [action for actions in cluster.actions for action in actions if action == Cancel(2, 1)]
    assert len(told) == 1


def test_late_worker_may_be_first_next_time():
    cluster = Cluster.of("backup:2")
    cluster.arrive(0)
    cluster.abandon(2)
    assert cluster.arrive(2)[:2] == [
        Accept(2, 1, update=2),
        ApplyUpdate(2, (Contribution(2, 1, 1),), (1.0,), (1.0,), 1),
    ]


@pytest.mark.parametrize("b", [0, 1, 2, 4])
def test_update_takes_w_minus_b(b):
    cluster = Cluster.of(Backup(b), workers=5)
    cluster.run_until(4)
    assert [len(update.contributions) for update in cluster.updates] == [5 - b] * 4
    assert {update.wanted for update in cluster.updates} == {5 - b}


def test_n_falls_only_when_fewer_than_n_workers_are_alive():
    cluster = Cluster.of("backup:1")
    cluster.leave(0)
    cluster.run_until(1)
    cluster.leave(1)
    cluster.run_until(2)
    assert [len(update.contributions) for update in cluster.updates] == [2, 1]


def test_worker_with_a_non_finite_gradient_may_still_be_among_the_first():
    """Its first gradient is non-finite; its second arrives before that of the silent worker."""
    cluster = Cluster.of("backup:1")
    assert cluster.arrive(0, finite=False) == [Drop(0, 0, Fate.NON_FINITE), SendParams(0, 2, 0)]
    assert cluster.arrive(1) == [Accept(1, 0, update=1)]
    assert cluster.arrive(0) == [
        Accept(0, 0, update=1),
        ApplyUpdate(1, (Contribution(1, 0, 1), Contribution(0, 0, 1)), (0.5, 0.5), (1.0, 1.0), 2),
        Cancel(2, turn=1),
        SendParams(1, turn=2, version=1),
        SendParams(0, turn=3, version=1),
    ]


def test_update_does_not_wait_for_the_retry_of_a_non_finite_gradient():
    cluster = Cluster.of("backup:1", workers=4)
    cluster.arrive(0, finite=False)
    cluster.arrive(1, finite=False)
    assert cluster.arrive(2) == [Accept(2, 0, update=1)]
    assert cluster.arrive(3) == [
        Accept(3, 0, update=1),
        ApplyUpdate(1, (Contribution(2, 0, 1), Contribution(3, 0, 1)), (0.5, 0.5), (1.0, 1.0), 3),
        Cancel(0, turn=2),
        Cancel(1, turn=2),
        SendParams(2, turn=2, version=1),
        SendParams(3, turn=2, version=1),
    ]


def test_b_equal_to_the_number_of_workers_is_refused():
    with pytest.raises(SpecError, match="got b=3 of 3"):
        make_decider("backup:3")


def test_negative_b_is_refused():
    with pytest.raises(SpecError, match="b must be >= 0, got -1; use 0"):
        Backup(-1)
