# SPDX-License-Identifier: BSD-3-Clause
"""Tables: rows of trials, columns, and summaries in words."""

from math import inf, nan

from paceline.lab.experiments.tables import column, curve_rows, final_row, mean_and_sd, seed_count
from paceline.lab.training import Row
from paceline.lab.trial import TrialResult


def test_mean_and_sd_skip_failed_seeds_and_say_how_many_are_left():
    assert mean_and_sd([1.0, 3.0]) == "2.00 ± 1.41"
    assert mean_and_sd([2.0], 0) == "2"
    assert mean_and_sd([1.0, nan, 3.0]) == "2.00 ± 1.41 (only 2 of 3)"
    assert mean_and_sd([nan, inf]) == "none of 2"


RESULT = TrialResult(
    rows=[Row(0.0, 0, 0.0, {"accuracy": 0.1}), Row(8.0, 4, 0.5, {"accuracy": 0.7})],
    is_diverged=False,
    updates=4,
    seconds=8.0,
    staleness=1.5,
    used=4,
    dropped=0,
    cancelled=0,
)


def test_rows_have_their_key_and_the_chosen_scores():
    key = {"rule": "sync", "seed": 0}
    assert final_row(key, RESULT, right="accuracy") == {
        **key,
        "updates": 4,
        "seconds": 8.0,
        "staleness": 1.5,
        "right": 0.7,
    }
    first, last = curve_rows(key, RESULT, right="accuracy")
    assert first == {**key, "updates": 0, "seconds": 0.0, "epochs": 0.0, "right": 0.1}
    assert last == {**key, "updates": 4, "seconds": 8.0, "epochs": 0.5, "right": 0.7}


def test_column_has_the_rows_that_match():
    rows = [{"rule": rule, "seed": seed, "x": 10 * seed} for rule in "ab" for seed in (1, 2)]
    assert column(rows, "x", rule="b") == [10.0, 20.0]
    assert column(rows, "x", rule="b", seed=2) == [20.0]
    assert seed_count(rows) == "2 seeds"
    assert seed_count(rows[:1]) == "1 seed"
