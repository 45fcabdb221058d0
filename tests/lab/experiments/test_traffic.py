# SPDX-License-Identifier: BSD-3-Clause
"""The quick `traffic` experiment counts transfers correctly."""

from math import isnan

import pytest

from faults import check_failed_seed
from paceline.lab.experiment import rebuild_report, run_experiment
from paceline.lab.experiments.traffic import TRAFFIC


@pytest.mark.usefixtures("mnist")
def test_late_gradients_waste_pushes_unless_cancelled(quick, tmp_path):
    tables = TRAFFIC.measure(quick)
    counts = {str(row["rule"]): row for row in tables["counts"]}
    assert (counts["sync"]["pulls"], counts["sync"]["pushes"]) == (1, 1)
    assert counts["backup:4"]["pulls"] == pytest.approx(16 / 12, rel=0.02)
    assert counts["backup:4"]["pushes"] == pytest.approx(1, rel=0.02)
    assert counts["backup:4, finish"]["pushes"] == pytest.approx(16 / 12, rel=0.1)
    assert not any(isnan(float(row["megabytes"])) for row in tables["race"])
    assert not any("megabytes" in row for row in tables["tried"])  # each table has its own columns
    check_failed_seed(TRAFFIC, tables)
    paragraph = run_experiment(TRAFFIC, quick, tmp_path)
    assert rebuild_report(TRAFFIC, tmp_path, quick=True) == paragraph
