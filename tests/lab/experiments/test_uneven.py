# SPDX-License-Identifier: BSD-3-Clause
"""The quick `uneven` experiment shows the direction of each effect."""

from math import isnan

import pytest

from faults import check_failed_seed
from paceline.lab.experiment import run_experiment
from paceline.lab.experiments.race_to_target import mean_seconds
from paceline.lab.experiments.uneven import UNEVEN


@pytest.mark.usefixtures("mnist")
def test_slow_half_is_waited_for_dropped_or_used(quick, tmp_path):
    tables = UNEVEN.measure(quick)
    pace = {str(row["rule"]): row for row in tables["pace"]}
    assert pace["sync"]["update_s"] > 1.8 * pace["backup:8"]["update_s"]
    assert pace["sync"]["from_slow"] == 0.5
    assert pace["backup:8"]["from_slow"] < 0.01
    assert pace["batchsync:24"]["gradients_per_s"] > 1.3 * pace["backup:8"]["gradients_per_s"]
    assert pace["async"]["lost"] < 0.01  # only those under way at the end
    assert not any(isnan(mean_seconds(tables["race"], rule)) for rule in pace)
    assert mean_seconds(tables["race"], "backup:8") < 0.85 * mean_seconds(tables["race"], "sync")
    assert "slow half" in run_experiment(UNEVEN, quick, tmp_path)
    check_failed_seed(UNEVEN, tables)
