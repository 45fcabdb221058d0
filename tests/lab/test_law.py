# SPDX-License-Identifier: BSD-3-Clause
"""The law of updates: it is found again in what was made from it."""

import numpy as np
import pytest

from paceline.lab.law import Law

NEEDED = np.array([10.0, 50.0, 100.0] * 2)
SEEDS = np.repeat([0.0, 1.0], 3)


def test_a_law_is_found_again():
    law = Law.of(NEEDED, SEEDS, Law(60.0, 150.0).updates(NEEDED))
    assert (law.floor, law.scale) == pytest.approx((60, 150), rel=1e-3)


def test_a_seed_that_is_slower_for_every_n_does_not_change_its_form():
    slower = np.where(SEEDS == 1, 1.21, 1.0)
    law = Law.of(NEEDED, SEEDS, slower * Law(60.0, 150.0).updates(NEEDED))
    assert (law.floor, law.scale) == pytest.approx((66, 150), rel=1e-3)


def test_a_seed_that_was_not_tried_everywhere_does_not_bend_it():
    kept = np.array([True, True, True, False, False, True])
    slower = np.where(SEEDS == 1, 2.0, 1.0)
    updates = slower * Law(60.0, 150.0).updates(NEEDED)
    assert Law.of(NEEDED[kept], SEEDS[kept], updates[kept]).scale == pytest.approx(150, rel=1e-3)


def test_where_every_gradient_counts_updates_go_with_one_over_n():
    law = Law.of(NEEDED, SEEDS, 1000 / NEEDED)
    assert law.updates(NEEDED) == pytest.approx(1000 / NEEDED, rel=1e-3)
