# SPDX-License-Identifier: BSD-3-Clause
"""Trials: digests, gradients per update, and what a result says."""

from dataclasses import replace

import pytest

from paceline.errors import SpecError
from paceline.lab.recipe import Recipe
from paceline.lab.trial import Trial, gradients_per_update
from paceline.lab.trial_runner import train
from toys import Clouds

TRIAL = Trial(Clouds(), Recipe(0.1, ema=0.9), "backup:1", 4, "10ms + exp:10ms", epochs=1.0, rows=5)


@pytest.mark.parametrize(
    "change",
    [
        {"policy": "sync"},
        {"workers": 5},
        {"epochs": 2.0},
        {"latency": "10ms"},
        {"problem": Clouds(seed=1)},
        {"recipe": Recipe(0.2)},
        {"late": "finish"},
        {"network": "model=1MB,bandwidth=1GB"},
        {"target": "accuracy>=1"},
    ],
)
def test_every_field_changes_the_digest(change):
    assert replace(TRIAL, **change).digest() != TRIAL.digest()
    assert replace(TRIAL).digest() == TRIAL.digest()


def test_result_counts_stale_dropped_and_cancelled_gradients():
    stale = train(replace(TRIAL, policy="async"))
    assert 2 < stale.staleness < 3.5
    assert (stale.dropped, stale.cancelled) == (0, 0)
    backup = train(TRIAL)
    assert backup.staleness == 0
    assert backup.cancelled > 20
    assert train(replace(TRIAL, late="finish")).dropped > 20


@pytest.mark.parametrize(
    ("policy", "gradients"),
    [("sync", 8), ("backup:2", 6), ("batchsync:12", 12), ("softsync:3", 3), ("async", 1)],
)
def test_gradients_per_update_follow_from_the_rule(policy, gradients):
    assert gradients_per_update(policy, 8) == gradients


def test_rule_with_too_many_backups_is_refused():
    with pytest.raises(SpecError):
        gradients_per_update("backup:8", 8)


def test_digest_never_changes_between_releases():
    """Otherwise no stored result would be found again."""
    assert TRIAL.digest() == "a75d73b531a3fd1023f1"
