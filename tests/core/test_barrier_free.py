# SPDX-License-Identifier: BSD-3-Clause
"""What the rules without a barrier have in common: scaling by staleness, and a bound on it."""

import pytest

from fakes import Cluster
from paceline.core.events import (
    Accept,
    ApplyUpdate,
    Cancel,
    Contribution,
    Drop,
    Fate,
    SendParams,
)
from paceline.core.policies import Async
from paceline.errors import SpecError


def test_nothing_is_cancelled_without_a_bound():
    cluster = Cluster.of("async")
    cluster.run_until(30, silent={2})
    assert not cluster.cancelled
    assert cluster.arrive(2)[0] == Accept(2, 0, update=31)


def test_lr_inverse_counts_a_gradient_by_its_staleness():
    """A fresh gradient, and one that is a single update old, count fully."""
    cluster = Cluster.of("async:lr=inverse", workers=2)
    for worker in (0, 0, 0, 0, 1, 1, 0):
        cluster.arrive(worker)
    assert [u.staleness for u in cluster.updates] == [(0,), (0,), (0,), (0,), (4,), (0,), (2,)]
    assert [u.scales for u in cluster.updates] == [(1.0,)] * 4 + [(0.25,), (1.0,), (0.5,)]


def test_work_beyond_the_bound_is_cancelled_and_stale():
    cluster = Cluster.of("async:bound=1")
    cluster.arrive(0)
    assert cluster.arrive(1) == [
        Accept(1, 0, update=2),
        ApplyUpdate(2, (Contribution(1, 0, 1),), (1.0,), (1.0,), 1),
        Cancel(2, turn=1),
        SendParams(1, turn=2, version=2),
    ]
    assert cluster.arrive(2) == [Drop(2, 0, Fate.STALE), SendParams(2, turn=2, version=2)]


def test_gradient_just_within_the_bound_counts():
    cluster = Cluster.of("async:bound=2")
    cluster.arrive(0)
    cluster.arrive(1)
    assert cluster.arrive(2)[0] == Accept(2, 0, update=3)


def test_unknown_learning_rate_rule_is_refused():
    with pytest.raises(SpecError, match="lr must be 'constant' or 'inverse', got 'linear'"):
        Async(lr="linear")


def test_bound_below_zero_is_refused():
    with pytest.raises(SpecError, match="bound must be >= 0, got -1"):
        Async(bound=-1)
