# SPDX-License-Identifier: BSD-3-Clause
"""Races: the rates that are tried, and how results are summarized."""

from math import isnan, nan

import pytest

from paceline.lab.experiments.race_to_target import RATE, Entrant, mean_seconds, seconds_text


def test_seed_that_misses_the_target_is_counted_out():
    rows = [{"rule": "a", "seconds": nan, "seed": 0}, {"rule": "a", "seconds": 3.0, "seed": 1}]
    assert isnan(mean_seconds(rows, "a"))
    assert seconds_text(rows) == "a 3 (only 1 of 2)"


def test_mean_time_is_shown_with_its_deviation():
    rows = [{"rule": "a", "seconds": s, "seed": s} for s in (2.0, 4.0)]
    assert mean_seconds(rows, "a") == 3.0
    assert seconds_text(rows) == "a 3 ± 1"


def test_rate_grows_with_the_square_root_of_the_samples():
    whole, quarter = Entrant("sync", "1s"), Entrant("backup:12", "1s")
    assert whole.rate(1.0) == RATE
    assert quarter.rate(1.0) == RATE / 2
    assert Entrant("sync", "1s", batch=4).rate(3.0) == pytest.approx(3 * RATE / 2)


def test_label_says_if_late_work_is_finished():
    assert Entrant("backup:1", "1s").label == "backup:1"
    assert Entrant("backup:1", "1s", late="finish").label == "backup:1, finish"
