# SPDX-License-Identifier: BSD-3-Clause
"""The first k mini-batches of a version, from any workers."""

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
from paceline.core.policies import BatchSync
from paceline.errors import SpecError


def test_fast_worker_contributes_several_gradients_of_one_version(decide):
    decider = decide("batchsync:3", workers=2)
    for worker in range(2):
        decider.handle(WorkerJoined(0.0, worker))
    assert decider.handle(GradientArrived(1.0, 0, 1, 0)) == [
        Accept(0, 0, update=1),
        SendParams(0, turn=2, version=0),
    ]
    assert decider.handle(GradientArrived(2.0, 0, 2, 0, samples=2)) == [
        Accept(0, 0, update=1, samples=2),
        SendParams(0, turn=3, version=0),
    ]
    assert decider.handle(GradientArrived(3.0, 0, 3, 0)) == [
        Accept(0, 0, update=1),
        ApplyUpdate(
            update=1,
            contributions=(Contribution(0, 0, 1), Contribution(0, 0, 2), Contribution(0, 0, 1)),
            weights=(0.25, 0.5, 0.25),
            scales=(1.0, 1.0, 1.0),
            wanted=3,
        ),
        Cancel(1, turn=1),
        SendParams(0, turn=4, version=1),
    ]


def test_work_on_a_closed_version_is_late():
    cluster = Cluster.of("batchsync:1")
    cluster.arrive(0)
    assert cluster.arrive(1) == [Drop(1, 0, Fate.LATE), SendParams(1, 2, 1)]


def test_k_larger_than_w_takes_several_rounds():
    cluster = Cluster.of("batchsync:5", workers=2)
    cluster.run_until(2)
    assert [len(update.contributions) for update in cluster.updates] == [5, 5]


def test_one_worker_alone_contributes_all_k():
    cluster = Cluster.of("batchsync:4")
    cluster.leave(0)
    cluster.leave(1)
    cluster.run_until(1)
    assert [c.worker for c in cluster.updates[0].contributions] == [2, 2, 2, 2]


def test_contributions_of_dead_workers_still_count():
    cluster = Cluster.of("batchsync:2")
    cluster.arrive(0)
    cluster.leave(0)
    cluster.arrive(1)
    assert [c.worker for c in cluster.updates[0].contributions] == [0, 1]


def test_k_below_one_is_refused():
    with pytest.raises(SpecError, match="k must be >= 1, got 0"):
        BatchSync(0)
