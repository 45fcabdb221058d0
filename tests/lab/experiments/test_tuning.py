# SPDX-License-Identifier: BSD-3-Clause
"""The best of the tried rates is taken, and rates at the edge are mentioned."""

import pytest

from paceline.lab.experiment import Lab
from paceline.lab.experiments.tuning import edge_note, prefer_high, prefer_low, tune
from paceline.lab.recipe import Recipe
from paceline.lab.trial import Trial
from paceline.lab.trial_pool import TrialPool
from toys import Clouds


@pytest.fixture
def lab(tmp_path):
    bench = TrialPool(tmp_path / ".trials", 1)
    return Lab(tmp_path, tmp_path, bench, (0,), True, lambda done, of, share: None)


def trial(policy, rate, seed):
    return Trial(Clouds(seed=seed), Recipe(rate), policy, 2, "10ms", epochs=1.0, rows=1)


def test_each_rule_gets_its_best_rate(lab):
    rates = (1e-9, 0.1, float("inf"))
    choices = dict.fromkeys(("sync", "async"), rates)
    best, found = tune(lab, (0, 1), choices, trial, prefer_high("accuracy"))
    assert best == {"sync": 0.1, "async": 0.1}
    assert set(found) == {(rule, rate, seed) for rule in best for rate in rates for seed in (0, 1)}
    assert found["sync", float("inf"), 0].is_diverged
    worst, _ = tune(lab, (0,), {"sync": rates[:2]}, trial, prefer_low("accuracy"))
    assert worst == {"sync": 1e-9}


def test_best_rate_has_the_best_mean_over_the_seeds(lab):
    values = iter([1.0, 4.0, 2.0, 2.0])  # of 0.1 with both seeds, then of 0.2
    best, _ = tune(lab, (0, 1), {"sync": (0.1, 0.2)}, trial, lambda *_: (next(values),))
    assert best == {"sync": 0.2}


def rows(**rates):
    return [{"rule": rule, "rate": rate} for rule, own in rates.items() for rate in own]


def test_best_rate_at_the_edge_is_mentioned():
    tried = rows(a=(1, 2, 3), b=(2, 4), c=(5, 6, 7), d=(8,))
    final = rows(a=(1, 1), b=(4,), c=(6,), d=(8,))
    assert edge_note(tried, final, "rule") == (
        " The best rate is the smallest one tried for: a."
        " The best rate is the largest one tried for: b."
    )
    assert edge_note(tried, rows(c=(6,)), "rule") == ""
