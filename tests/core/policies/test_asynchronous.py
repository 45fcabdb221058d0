# SPDX-License-Identifier: BSD-3-Clause
"""Asynchronous training: every gradient is an update of its own."""

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


def test_every_gradient_is_applied_immediately(decide):
    decider = decide("async", workers=2)
    assert decider.handle(WorkerJoined(0.0, 0)) == [Resume(), SendParams(0, turn=1, version=0)]
    assert decider.handle(WorkerJoined(0.0, 1)) == [SendParams(1, turn=1, version=0)]
    assert decider.handle(GradientArrived(1.0, 1, 1, 0, samples=9)) == [
        Accept(1, 0, update=1, samples=9),
        ApplyUpdate(1, (Contribution(1, 0, 9),), (1.0,), (1.0,), 1),
        SendParams(1, turn=2, version=1),
    ]
    assert decider.handle(GradientArrived(2.0, 0, 1, 0)) == [
        Accept(0, 0, update=2),
        ApplyUpdate(2, (Contribution(0, 0, 1),), (1.0,), (1.0,), 1),
        SendParams(0, turn=2, version=2),
    ]


def test_with_equal_workers_a_gradient_is_w_minus_1_updates_old():
    cluster = Cluster.of("async", workers=4)
    cluster.run_until(20)
    assert {update.staleness for update in cluster.updates[4:]} == {(3,)}
