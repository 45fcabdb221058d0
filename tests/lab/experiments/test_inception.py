# SPDX-License-Identifier: BSD-3-Clause
"""The quick `inception` experiment shows the direction of each effect."""

import pytest

from faults import check_failed_seed
from paceline.lab.experiment import run_experiment
from paceline.lab.experiments.inception import INCEPTION
from paceline.lab.experiments.tables import column


@pytest.mark.usefixtures("cifar10")
def test_backups_make_updates_faster_and_staleness_lowers_accuracy(quick, tmp_path):
    tables = INCEPTION.measure(quick)
    updates, seconds, accuracy = (
        {rule: column(tables["final"], name, rule=rule)[0] for rule in ("sync", "backup", "async")}
        for name in ("updates", "seconds", "accuracy")
    )
    assert seconds["backup"] / updates["backup"] < 0.95 * seconds["sync"] / updates["sync"]
    assert accuracy["async"] < accuracy["sync"] - 0.04
    assert column(tables["final"], "staleness", rule="backup") == [0]
    assert 22 < column(tables["final"], "staleness", rule="async")[0] < 25
    assert "25 workers" in run_experiment(INCEPTION, quick, tmp_path)
    check_failed_seed(INCEPTION, tables)
