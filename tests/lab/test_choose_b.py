# SPDX-License-Identifier: BSD-3-Clause
"""Choosing b: a few backups pay, many do not, and the planner's choice costs little."""

import numpy as np
import pytest

from faults import check_misfortune
from paceline.lab.experiments.choose_b import CHOOSE_B
from paceline.lab.experiments.settings import picked


@pytest.mark.usefixtures("mnist")
def test_a_few_backups_pay_many_do_not_and_the_planner_knows(quick):
    tables = CHOOSE_B.measure(quick)
    half, whole = (picked(tables["updates"], "updates", needed=n)[0] for n in (10, 20))
    assert 1.3 * whole < half < 2.6 * whole  # fewer gradients, more updates
    for late in ("cancel", "finish"):
        seconds = picked(tables["predicted"], f"{late}_s")
        assert 0 < int(np.argmin(seconds)) < 5
    few, many = (picked(tables["direct"], "seconds", backups=b)[0] for b in (1, 10))
    assert few < 0.8 * many
    for row in tables["direct"]:
        assert row["seconds"] == pytest.approx(row["product_s"], rel=0.3)
    assert len(tables["choices"]) == 3
    for row in tables["choices"]:
        assert row["cost_percent"] < 10
    assert "the planner chooses" in CHOOSE_B.tell(tables)
    assert len(CHOOSE_B.draw(tables).axes) == 3
    check_misfortune(CHOOSE_B, tables)
