# SPDX-License-Identifier: BSD-3-Clause
"""Full synchronous training: every update takes the gradients of all W workers."""

from fakes import Cluster
from paceline.core.events import (
    Accept,
    ApplyUpdate,
    Cancel,
    Contribution,
    Drop,
    Fate,
    GradientArrived,
    Resume,
    SendParams,
    WorkerJoined,
)


def test_every_update_takes_all_gradients_weighted_by_samples(decide):
    decider = decide("sync", workers=2)
    assert decider.handle(WorkerJoined(0.0, 0)) == []
    assert decider.handle(WorkerJoined(0.0, 1)) == [
        Resume(),
        SendParams(0, turn=1, version=0),
        SendParams(1, turn=1, version=0),
    ]
    assert decider.handle(GradientArrived(1.0, 1, 1, 0, samples=3)) == [
        Accept(1, 0, update=1, samples=3)
    ]
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


def test_no_worker_continues_before_the_slowest_has_arrived():
    cluster = Cluster.of("sync", workers=5)
    for worker in (3, 1, 0, 4):
        assert cluster.arrive(worker) == [Accept(worker, 0, update=1)]
    assert cluster.working == [2]


def test_run_of_one_worker_is_plain_sgd():
    cluster = Cluster.of("sync", workers=1)
    for version in range(5):
        assert cluster.arrive(0) == [
            Accept(0, version, version + 1),
            ApplyUpdate(version + 1, (Contribution(0, version, 1),), (1.0,), (1.0,), 1),
            SendParams(0, version + 2, version + 1),
        ]


def test_update_does_without_a_worker_whose_gradients_are_never_finite():
    """It retries forever, and the update takes the other two."""
    cluster = Cluster.of("sync")
    for turn in (1, 2, 3):
        assert cluster.arrive(0, finite=False) == [
            Drop(0, 0, Fate.NON_FINITE),
            SendParams(0, turn + 1, version=0),
        ]
    assert cluster.arrive(1) == [Accept(1, 0, update=1)]
    assert cluster.arrive(2) == [
        Accept(2, 0, update=1),
        ApplyUpdate(1, (Contribution(1, 0, 1), Contribution(2, 0, 1)), (0.5, 0.5), (1.0, 1.0), 3),
        Cancel(0, turn=4),
        SendParams(1, turn=2, version=1),
        SendParams(2, turn=2, version=1),
    ]
    assert cluster.arrive(0) == [Drop(0, 0, Fate.LATE), SendParams(0, turn=5, version=1)]
    assert cluster.decider.ledger.outstanding() == 3, "it is excused of one update only"
