# SPDX-License-Identifier: BSD-3-Clause
"""The quick `models` experiment shows the direction of each effect."""

import pytest

from faults import check_failed_seed
from paceline.lab.experiment import run_experiment
from paceline.lab.experiments.other_models import MODELS, TASKS
from paceline.lab.experiments.tables import column


@pytest.mark.usefixtures("mnist", "shakespeare")
def test_every_model_learns_and_the_transformer_suffers_from_staleness(quick, tmp_path):
    tables = MODELS.measure(quick)
    for task in TASKS:
        first, *_ = column(tables["curves"], "score", task=task, rule="sync")
        (last,) = column(tables["final"], "score", task=task, rule="sync")
        assert (last > first) == TASKS[task].is_high
        assert 13 < column(tables["final"], "staleness", task=task, rule="async")[0] < 16
    fresh, stale = (
        column(tables["final"], "score", task="transformer", rule=rule)[0]
        for rule in ("sync", "async")
    )
    assert fresh < stale - 0.3
    assert "GAN" in run_experiment(MODELS, quick, tmp_path)
    check_failed_seed(MODELS, tables)
