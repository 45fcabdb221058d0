# SPDX-License-Identifier: BSD-3-Clause
"""Races and curves: what is told of them."""

from math import inf, isnan, nan

import pytest

from paceline.lab.experiments.curves import mean_curve, reached, times_to
from paceline.lab.experiments.race import mean_seconds, outcome_words
from paceline.lab.experiments.settings import spread
from paceline.lab.training import Row


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
    assert outcome_words(rows) == "a 3 (only 1 of 2)"


def test_the_mean_of_times_is_told_with_its_spread():
    rows = [{"rule": "a", "seconds": s, "seed": s} for s in (2.0, 4.0)]
    assert mean_seconds(rows, "a") == 3.0
    assert outcome_words(rows) == "a 3 ± 1"


CURVES = [
    {"seed": 0, "seconds": 1.0, "y": 5.0},
    {"seed": 0, "seconds": 3.0, "y": 4.0},
    {"seed": 1, "seconds": 2.0, "y": 7.0},
    {"seed": 1, "seconds": 4.0, "y": 3.0},
    {"seed": 2, "seconds": 2.0, "y": 9.0},
]


def test_a_mean_curve_is_of_the_seeds_that_came_to_the_end():
    assert mean_curve(CURVES, "seconds", "y") == ([1.5, 3.5], [6.0, 3.5])


def test_each_seed_says_when_it_was_good_enough():
    first, second, third = times_to(CURVES, "y", 4.0, is_high=False)
    assert (first, second) == (3.0, 3.5)
    assert isnan(third)
    assert times_to(CURVES[:2], "y", 4.5, is_high=True) == [1.0]


def test_a_spread_is_of_those_that_came_to_something_and_says_how_many():
    assert spread([1.0, 3.0]) == "2.00 ± 1.41"
    assert spread([2.0], 0) == "2"
    assert spread([1.0, nan, 3.0]) == "2.00 ± 1.41 (only 2 of 3)"
    assert spread([nan, inf]) == "none of 2"
