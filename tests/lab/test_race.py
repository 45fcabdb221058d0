# SPDX-License-Identifier: BSD-3-Clause
"""Races and curves: what is told of them."""

from math import isnan, nan

import pytest

from paceline.lab.experiments.curves import mean_curve, reached, when
from paceline.lab.experiments.race import mean_seconds, outcome_words
from paceline.lab.train import Row


def rows_of(*accuracies):
    return [
        Row(10.0 * n, 4 * n, 0.1 * n, {"accuracy": accuracy})
        for n, accuracy in enumerate(accuracies)
    ]


def test_who_gets_there_between_two_looks_is_placed_on_the_line_between_them():
    assert reached(rows_of(0.1, 0.5, 0.9, 0.7), 0.8) == pytest.approx((17.5, 7, 0.175))
    assert reached(rows_of(0.1, 0.5), 0.5) == pytest.approx((10, 4, 0.1))


def test_the_first_time_counts():
    assert reached(rows_of(0.1, 0.7, 0.5, 0.9), 0.7) == pytest.approx((10, 4, 0.1))


def test_who_never_gets_there_has_no_time():
    assert all(isnan(value) for value in reached(rows_of(0.1, 0.5), 0.8))
    rows = [{"rule": "a", "seconds": nan, "seed": 0}, {"rule": "a", "seconds": 3.0, "seed": 1}]
    assert isnan(mean_seconds(rows, "a"))
    assert outcome_words(rows) == "a not with 1 of 2 seeds"


def test_the_mean_of_times_is_told_with_its_spread():
    rows = [{"rule": "a", "seconds": s, "seed": s} for s in (2.0, 4.0)]
    assert mean_seconds(rows, "a") == 3.0
    assert outcome_words(rows) == "a 3 ± 1 s"


def test_a_mean_curve_ends_where_the_first_of_its_seeds_ends():
    rows = [
        {"seed": 0, "t": 1.0, "y": 5.0},
        {"seed": 0, "t": 3.0, "y": 4.0},
        {"seed": 1, "t": 2.0, "y": 7.0},
    ]
    assert mean_curve(rows, "t", "y") == ([1.5], [6.0])


def test_a_curve_says_when_it_is_good_enough():
    falling = [0.0, 1.0, 2.0], [9.0, 5.0, 6.0]
    assert when(falling, 5.5, is_high=False) == 1.0
    assert isnan(when(falling, 4.0, is_high=False))
    assert when(falling, 8.0, is_high=True) == 0.0
