# SPDX-License-Identifier: BSD-3-Clause
"""The quick `staleness` experiment shows the direction of each effect."""

from statistics import fmean

import pytest

from faults import check_failed_seed
from paceline.lab.experiment import run_experiment
from paceline.lab.experiments.staleness import STALENESS
from paceline.lab.experiments.tables import column


@pytest.mark.usefixtures("mnist")
def test_staleness_hurts(quick, tmp_path):
    tables = STALENESS.measure(quick)
    fresh, stale = (column(tables["error"], "error_percent", staleness=s) for s in (0, 40))
    assert fmean(fresh) < fmean(stale) - 20
    (measured,) = column(tables["error"], "measured_staleness", staleness=40)
    assert 30 < measured < 41
    bottom, *_, top = (float(row["mean"]) for row in tables["layers"])
    assert top < 10
    assert abs(bottom - 39) < 0.2  # all other workers
    assert tables["layers"][0]["min"] > 15
    assert "Expected" in run_experiment(STALENESS, quick, tmp_path)
    check_failed_seed(STALENESS, tables)
