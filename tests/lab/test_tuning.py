# SPDX-License-Identifier: BSD-3-Clause
"""Rates: the best of those that were tried is taken; where it may not be the best is said."""

import pytest

from paceline.errors import SpecError
from paceline.lab.bench import Bench
from paceline.lab.experiment import Lab
from paceline.lab.experiments.tuning import edges, highest, lowest, tuned
from paceline.lab.recipe import Recipe
from paceline.lab.trial import Trial, gradients_of
from toys import Clouds


@pytest.fixture
def lab(tmp_path):
    bench = Bench(tmp_path / ".trials", 1)
    return Lab(tmp_path, tmp_path, bench, (0,), True, lambda done, of, share: None)


def trial(policy, rate, seed):
    return Trial(Clouds(seed=seed), Recipe(rate), policy, 2, "10ms", epochs=1.0, rows=1)


def test_each_rule_has_the_rate_that_is_best_for_it(lab):
    rates = (1e-9, 0.1, float("inf"))
    choices = dict.fromkeys(("sync", "async"), rates)
    best, found = tuned(lab, (0, 1), choices, trial, highest("accuracy"))
    assert best == {"sync": 0.1, "async": 0.1}
    assert set(found) == {(rule, rate, seed) for rule in best for rate in rates for seed in (0, 1)}
    assert found["sync", float("inf"), 0].is_diverged
    worst, _ = tuned(lab, (0,), {"sync": rates[:2]}, trial, lowest("accuracy"))
    assert worst == {"sync": 1e-9}


def test_the_mean_over_the_seeds_decides(lab):
    values = iter([1.0, 4.0, 2.0, 2.0])  # of 0.1 with both seeds, then of 0.2
    best, _ = tuned(lab, (0, 1), {"sync": (0.1, 0.2)}, trial, lambda *_: (next(values),))
    assert best == {"sync": 0.2}


def rows(**rates):
    return [{"rule": rule, "rate": rate} for rule, own in rates.items() for rate in own]


def test_a_rate_at_the_edge_of_what_was_tried_is_told():
    tried = rows(a=(1, 2, 3), b=(2, 4), c=(5, 6, 7), d=(8,))
    final = rows(a=(1, 1), b=(4,), c=(6,), d=(8,))
    assert edges(tried, final, "rule") == (
        " Of the rates that were tried, the best is the smallest for a and the largest for b."
    )
    assert edges(tried, rows(c=(6,)), "rule") == ""


@pytest.mark.parametrize(
    ("policy", "gradients"),
    [("sync", 8), ("backup:2", 6), ("batchsync:12", 12), ("softsync:3", 3), ("async", 1)],
)
def test_the_gradients_of_an_update_are_those_that_the_rule_waits_for(policy, gradients):
    assert gradients_of(policy, 8) == gradients


def test_a_rule_that_does_not_fit_is_refused():
    with pytest.raises(SpecError):
        gradients_of("backup:8", 8)
