# SPDX-License-Identifier: BSD-3-Clause
"""Learning curves: means over seeds, and when they reach a target."""

from math import isnan

import pytest

from paceline.lab.experiments.curves import first_reached, mean_curve, times_to
from paceline.lab.training import Row


def rows_of(*accuracies):
    return [
        Row(10.0 * n, 4 * n, 0.1 * n, {"accuracy": accuracy})
        for n, accuracy in enumerate(accuracies)
    ]


def test_target_between_two_evaluations_is_interpolated():
    assert first_reached(rows_of(0.1, 0.5, 0.9, 0.7), 0.8) == pytest.approx((17.5, 7, 0.175))
    assert first_reached(rows_of(0.1, 0.5), 0.5) == pytest.approx((10, 4, 0.1))


def test_first_crossing_counts():
    assert first_reached(rows_of(0.1, 0.7, 0.5, 0.9), 0.7) == pytest.approx((10, 4, 0.1))


CURVES = [
    {"seed": 0, "seconds": 1.0, "y": 5.0},
    {"seed": 0, "seconds": 3.0, "y": 4.0},
    {"seed": 1, "seconds": 2.0, "y": 7.0},
    {"seed": 1, "seconds": 4.0, "y": 3.0},
    {"seed": 2, "seconds": 2.0, "y": 9.0},
]


def test_mean_curve_skips_seeds_that_ended_early():
    assert mean_curve(CURVES, "seconds", "y") == ([1.5, 3.5], [6.0, 3.5])


def test_each_seed_has_its_own_time_to_the_target():
    first, second, third = times_to(CURVES, "y", 4.0, is_high=False)
    assert (first, second) == (3.0, 3.5)
    assert isnan(third)
    assert times_to(CURVES[:2], "y", 4.5, is_high=True) == [1.0]


def test_target_that_is_never_reached_has_no_time():
    assert all(isnan(value) for value in first_reached(rows_of(0.1, 0.5), 0.8))
