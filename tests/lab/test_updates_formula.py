# SPDX-License-Identifier: BSD-3-Clause
"""The fit of updates to a target recovers the formula behind synthetic counts."""

import numpy as np
import pytest

from paceline.lab.updates_formula import UpdatesToTarget

NEEDED = np.array([10.0, 50.0, 100.0] * 2)

SEEDS = np.repeat([0.0, 1.0], 3)


def test_fit_recovers_the_formula():
    law = UpdatesToTarget.fit(NEEDED, SEEDS, UpdatesToTarget(60.0, 150.0).updates(NEEDED))
    assert (law.floor, law.scale) == pytest.approx((60, 150), rel=1e-3)


def test_slower_seed_changes_only_the_floor():
    slower = np.where(SEEDS == 1, 1.21, 1.0)
    law = UpdatesToTarget.fit(NEEDED, SEEDS, slower * UpdatesToTarget(60.0, 150.0).updates(NEEDED))
    assert (law.floor, law.scale) == pytest.approx((66, 150), rel=1e-3)


def test_seed_with_missing_counts_does_not_bias_the_scale():
    kept = np.array([True, True, True, False, False, True])
    slower = np.where(SEEDS == 1, 2.0, 1.0)
    updates = slower * UpdatesToTarget(60.0, 150.0).updates(NEEDED)
    assert UpdatesToTarget.fit(NEEDED[kept], SEEDS[kept], updates[kept]).scale == pytest.approx(
        150, rel=1e-3
    )


def test_updates_proportional_to_one_over_n_can_be_fitted():
    law = UpdatesToTarget.fit(NEEDED, SEEDS, 1000 / NEEDED)
    assert law.updates(NEEDED) == pytest.approx(1000 / NEEDED, rel=1e-3)
