# SPDX-License-Identifier: BSD-3-Clause
"""SoftSync: an update for every c gradients, from any workers, of any version."""

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
from paceline.core.policies import SoftSync
from paceline.errors import SpecError


def test_every_c_gradients_make_an_update_including_stale_ones(decide):
    decider = decide("softsync:2")
    for worker in range(3):
        decider.handle(WorkerJoined(0.0, worker))
    assert decider.handle(GradientArrived(1.0, 0, 1, 0)) == [
        Accept(0, 0, update=1),
        SendParams(0, turn=2, version=0),
    ]
    assert decider.handle(GradientArrived(2.0, 0, 2, 0, samples=3)) == [
        Accept(0, 0, update=1, samples=3),
        ApplyUpdate(1, (Contribution(0, 0, 1), Contribution(0, 0, 3)), (0.25, 0.75), (1.0, 1.0), 2),
        SendParams(0, turn=3, version=1),
    ]
    assert decider.handle(GradientArrived(3.0, 1, 1, 0)) == [
        Accept(1, 0, update=2),
        SendParams(1, turn=2, version=1),
    ]
    assert decider.handle(GradientArrived(4.0, 0, 3, 1)) == [
        Accept(0, 1, update=2),
        ApplyUpdate(2, (Contribution(1, 0, 1), Contribution(0, 1, 1)), (0.5, 0.5), (1.0, 1.0), 2),
        SendParams(0, turn=4, version=2),
    ]


def test_by_default_a_gradient_counts_by_its_staleness():
    cluster = Cluster.of("softsync:1", workers=2)
    for worker in (0, 0, 0, 1):
        cluster.arrive(worker)
    assert cluster.updates[-1].staleness == (3,)
    assert cluster.updates[-1].scales == (1 / 3,)


def test_lr_constant_counts_every_gradient_fully():
    cluster = Cluster.of("softsync:1,lr=constant", workers=2)
    for worker in (0, 0, 0, 1):
        cluster.arrive(worker)
    assert cluster.updates[-1].scales == (1.0,)


def test_staleness_is_about_w_over_c():
    cluster = Cluster.of("softsync:4", workers=8)
    cluster.run_until(20)
    late = [s for update in cluster.updates[5:] for s in update.staleness]
    assert 8 / 4 - 1 <= sum(late) / len(late) <= 8 / 4


def test_bound_refuses_older_gradients():
    cluster = Cluster.of("softsync:1,bound=0", workers=2)
    assert Cancel(1, turn=1) in cluster.arrive(0)
    assert cluster.arrive(1) == [Drop(1, 0, Fate.STALE), SendParams(1, 2, 1)]


def test_c_below_one_is_refused():
    with pytest.raises(SpecError, match="c must be >= 1, got 0"):
        SoftSync(0)


def test_settings_of_all_free_rules_are_checked():
    with pytest.raises(SpecError, match="bound must be >= 0"):
        SoftSync(2, bound=-2)
