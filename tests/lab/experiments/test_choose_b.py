# SPDX-License-Identifier: BSD-3-Clause
"""The quick `choose-b` experiment shows each effect, and the planner's choice is cheap."""

import numpy as np
import pytest

from faults import check_failed_seed
from paceline.lab.experiments.choose_b import CHOOSE_B
from paceline.lab.experiments.tables import column


@pytest.mark.usefixtures("mnist")
def test_few_backups_pay_and_the_planner_finds_them(quick):
    tables = CHOOSE_B.measure(quick)
    half, whole = (column(tables["updates"], "updates", needed=n)[0] for n in (10, 20))
    assert 1.3 * whole < half < 2.6 * whole  # fewer gradients, more updates
    for late in ("cancel", "finish"):
        seconds = column(tables["predicted"], f"{late}_s")
        assert 0 < int(np.argmin(seconds)) < 5
    few, many = (column(tables["direct"], "seconds", backups=b)[0] for b in (1, 10))
    assert few < 0.8 * many
    for row in tables["direct"]:
        assert row["seconds"] == pytest.approx(row["product_s"], rel=0.3)
    assert len(tables["choices"]) == 4
    for row in tables["choices"]:
        assert row["cost_percent"] < 10
    assert "the planner chooses the following b" in CHOOSE_B.describe(tables)
    assert len(CHOOSE_B.draw(tables).axes) == 3
    check_failed_seed(CHOOSE_B, tables)
