# SPDX-License-Identifier: BSD-3-Clause
"""The `pixelcnn` experiment: its time, its effects, and its report."""

from math import isnan

import pytest

from faults import check_failed_seed
from paceline.lab.experiments.pixelcnn import PIXELCNN, RULES, seconds_to_serial, updates_within
from paceline.lab.experiments.tables import column


@pytest.fixture(scope="module")
def tables(cifar10, quick):
    """Tables of the quick version; skips tests if the data is missing."""
    del cifar10
    return PIXELCNN.measure(quick)


def last(tables, label):
    return column(tables["final"], "bits", rule=label)[0]


def test_backups_learn_more_than_one_worker_in_the_same_time(tables):
    assert last(tables, "7+1") < last(tables, "serial") - 0.1


def test_backups_learn_more_than_the_same_number_of_asynchronous_workers(tables):
    assert last(tables, "7+1") < last(tables, "async 8") - 0.1


def test_every_rule_trains_for_the_same_time(tables):
    seconds = column(tables["final"], "seconds")
    assert max(seconds) < 1.05 * min(seconds)
    assert column(tables["final"], "staleness", rule="7+1") == [0]
    assert 6 < column(tables["final"], "staleness", rule="async 8")[0] < 8


def test_figure_and_paragraph_follow_from_the_tables(tables):
    assert len(PIXELCNN.draw(tables).axes) == 2
    text = PIXELCNN.describe(tables)
    assert f"7+1: {last(tables, '7+1'):.2f}" in text
    assert "async 16" not in text
    check_failed_seed(PIXELCNN, tables)


def test_updates_within_a_time_grow_with_the_workers():
    one, many = (updates_within(100.0, RULES[label], 0) for label in ("serial", "async 16"))
    assert 50 < one < 65
    assert many == pytest.approx(16 * one, rel=0.05)


def test_time_to_serial_is_the_time_to_its_mean_final_score():
    curves = [
        {"rule": rule, "seed": seed, "seconds": seconds, "bits": bits + seed}
        for rule, all_bits in {"serial": (8, 7, 6), "good": (8, 6, 4), "bad": (8, 8, 8)}.items()
        for seed in (0, 1)
        for seconds, bits in zip((0, 10, 20), all_bits, strict=True)
    ]
    assert seconds_to_serial({"curves": curves}, "good") == [7.5, 12.5]
    assert all(isnan(time) for time in seconds_to_serial({"curves": curves}, "bad"))
