# SPDX-License-Identifier: BSD-3-Clause
"""Full synchronous training: all W, one update."""

from fakes import Cluster
from paceline.core.events import (
    Accept,
    ApplyUpdate,
    Contribution,
    GradientArrived,
    Resume,
    SendParams,
    WorkerJoined,
)


def test_every_update_takes_all_weighted_by_their_samples(decide):
    decider = decide("sync", workers=2)
    assert decider.handle(WorkerJoined(0.0, 0)) == []
    assert decider.handle(WorkerJoined(0.0, 1)) == [
        Resume(),
        SendParams(0, turn=1, version=0),
        SendParams(1, turn=1, version=0),
    ]
    assert decider.handle(GradientArrived(1.0, 1, 1, 0, samples=3)) == [Accept(1, 0, update=1)]
    assert decider.handle(GradientArrived(2.0, 0, 1, 0, samples=1)) == [
        Accept(0, 0, update=1),
        ApplyUpdate(
            update=1,
            contributions=(Contribution(1, 0, 3), Contribution(0, 0, 1)),
            weights=(0.75, 0.25),
            scales=(1.0, 1.0),
            wanted=2,
        ),
        SendParams(1, turn=2, version=1),
        SendParams(0, turn=2, version=1),
    ]


def test_nobody_goes_on_before_the_slowest_is_in():
    cluster = Cluster.of("sync", workers=5)
    for worker in (3, 1, 0, 4):
        assert cluster.arrive(worker) == [Accept(worker, 0, update=1)]
    assert cluster.working == [2]


def test_a_run_of_one_worker_is_plain_sgd():
    cluster = Cluster.of("sync", workers=1)
    for version in range(5):
        assert cluster.arrive(0) == [
            Accept(0, version, version + 1),
            ApplyUpdate(version + 1, (Contribution(0, version, 1),), (1.0,), (1.0,), 1),
            SendParams(0, version + 2, version + 1),
        ]
