# SPDX-License-Identifier: BSD-3-Clause
"""The quick versions of the experiments show the direction of each effect."""

from statistics import fmean

import pytest

from faults import check_misfortune
from paceline.lab.experiment import run_experiment
from paceline.lab.experiments.inception import INCEPTION
from paceline.lab.experiments.settings import picked
from paceline.lab.experiments.staleness import STALENESS


@pytest.mark.usefixtures("mnist")
def test_staleness_hurts(quick, tmp_path):
    tables = STALENESS.measure(quick)
    fresh, stale = (picked(tables["error"], "error_percent", staleness=s) for s in (0, 40))
    assert fmean(fresh) < fmean(stale) - 20
    (measured,) = picked(tables["error"], "measured_staleness", staleness=40)
    assert 30 < measured < 41
    bottom, *_, top = (float(row["mean"]) for row in tables["layers"])
    assert top < 10
    assert abs(bottom - 39) < 0.2  # of 40 workers all others
    assert tables["layers"][0]["min"] > 15
    assert "Expected" in run_experiment(STALENESS, quick, tmp_path)
    check_misfortune(STALENESS, tables)


@pytest.mark.usefixtures("cifar10")
def test_updates_with_backups_take_less_time_and_stale_gradients_bear_smaller_rates(
    quick, tmp_path
):
    tables = INCEPTION.measure(quick)
    updates, seconds, accuracy = (
        {
            rule: picked(tables["final"], column, rule=rule)[0]
            for rule in ("sync", "backup", "async")
        }
        for column in ("updates", "seconds", "accuracy")
    )
    assert seconds["backup"] / updates["backup"] < 0.95 * seconds["sync"] / updates["sync"]
    assert accuracy["async"] < accuracy["sync"] - 0.04
    assert picked(tables["final"], "staleness", rule="backup") == [0]
    assert 22 < picked(tables["final"], "staleness", rule="async")[0] < 25
    assert "25 workers" in run_experiment(INCEPTION, quick, tmp_path)
    check_misfortune(INCEPTION, tables)
