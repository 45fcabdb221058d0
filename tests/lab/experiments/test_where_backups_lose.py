# SPDX-License-Identifier: BSD-3-Clause
"""The quick `losing` experiment shows the direction of each effect."""

import pytest

from faults import check_failed_seed
from paceline.lab.experiment import run_experiment
from paceline.lab.experiments.race_to_target import mean_seconds
from paceline.lab.experiments.tables import column
from paceline.lab.experiments.where_backups_lose import LOSING


@pytest.mark.usefixtures("mnist")
def test_backups_lose_if_there_are_too_few_or_too_many_or_slow_workers_own_data(quick, tmp_path):
    tables = LOSING.measure(quick)
    majority, small, large, owned = (
        tables[name] for name in ("majority", "small", "large", "own_data")
    )
    sync, few, enough = (mean_seconds(majority, f) for f in ("sync", "backup:4", "backup:12"))
    assert 0.8 * sync < few  # it still waits for eight slow workers
    assert enough < 0.85 * sync
    assert mean_seconds(small, "backup:12") > 1.4 * mean_seconds(small, "sync")
    assert mean_seconds(large, "sync") < 0.7 * mean_seconds(large, "backup:14")
    accuracy = {rule: column(owned, "reserved", rule=rule)[0] for rule in _rules(owned)}
    assert accuracy["backup:4"] < 0.05 < accuracy["sync"]
    assert accuracy["backup:4, all data everywhere"] > 0.6
    (alike,) = column(tables["requeue"], "forgotten_without", machines="alike", workers="others")
    assert 0.04 < alike < 0.09
    used, tries = (
        column(tables["requeue"], name, machines="4 slow", workers="0-3")[0]
        for name in ("used", "tries_with")
    )
    assert used < 10
    assert tries > 50
    assert "8 and 9" in run_experiment(LOSING, quick, tmp_path)
    check_failed_seed(LOSING, tables)


def _rules(rows):
    return list(dict.fromkeys(str(row["rule"]) for row in rows))
