# SPDX-License-Identifier: BSD-3-Clause
"""The `delay` experiment: its clock, its effects, and its report."""

from math import isnan

import pytest

from faults import check_failed_seed
from paceline.lab.experiments.delay import (
    DELAY,
    NETWORKS,
    NO_EXCHANGE,
    RULES,
    iterations_per_s,
    seconds_to,
)
from paceline.lab.experiments.tables import column


@pytest.fixture(scope="module")
def tables(tiny_imagenet, quick):
    """Tables of the quick version; skips tests if the data is missing."""
    del tiny_imagenet
    return DELAY.measure(quick)


@pytest.mark.parametrize("network", NETWORKS.values(), ids=list(NETWORKS))
def test_clock_matches_the_paper_with_and_without_exchange(network):
    for rule in (NO_EXCHANGE, "sync"):
        assert iterations_per_s(network, rule) == pytest.approx(network.paper[rule], rel=0.02)


@pytest.mark.parametrize("network", NETWORKS.values(), ids=list(NETWORKS))
def test_delay_hides_part_of_the_exchange(network):
    rates = [iterations_per_s(network, rule) for rule in (*RULES[1:], NO_EXCHANGE)]
    assert all(rate > 1.1 * network.paper["sync"] for rate in rates)
    assert max(rates) == rates[-1]


def test_delay_makes_updates_faster_and_gradients_staler(tables):
    sync, late = (
        [row for row in tables["final"] if row["rule"] == r] for r in ("sync", "delayed:3")
    )
    assert late[0]["updates"] == sync[0]["updates"]
    assert late[0]["seconds"] < 0.8 * sync[0]["seconds"]
    assert sync[0]["staleness"] == 0
    assert late[0]["staleness"] == pytest.approx(3, abs=0.1)


def test_delay_learns_less_from_the_same_number_of_updates(tables):
    sync, late = (
        column(tables["curves"], "loss", rule=rule, kind="same")[-1]
        for rule in ("sync", "delayed:3")
    )
    assert sync < late - 0.05


def test_figure_and_paragraph_follow_from_the_tables(tables):
    assert len(DELAY.draw(tables).axes) == 3
    text = DELAY.describe(tables)
    assert "alexnet: iterations per second" in text
    assert "(22.6)" in text
    assert "googlenet" not in text
    check_failed_seed(DELAY, tables)


def synthetic(late):
    """Tables in which `sync` reaches 0.4 in 40 s, and the delayed rule has the given curve."""
    curves, final = [], []
    for kind in ("same", "own"):
        for rule, points in {"sync": ((0, 0), (20, 0.2), (40, 0.4)), "delayed:1": late}.items():
            about = {"model": "m", "kind": kind, "rule": rule, "rate": 0.1, "seed": 0}
            curves += [{**about, "updates": s, "seconds": s, "accuracy": a} for s, a in points]
            final.append({**about, "updates": 9, "accuracy": points[-1][1]})
    rates = [{"model": "m", "rule": "sync", "paper": 1.0, "simulated": 1.0}]
    return {"rates": rates, "tried": [], "final": final, "curves": curves}


def test_rule_that_is_later_at_half_of_the_accuracy_is_named():
    tables = synthetic(late=((0, 0), (25, 0.2), (30, 0.4)))
    assert seconds_to(tables, "m", "same", "sync", 0.5) == [20]
    assert seconds_to(tables, "m", "same", "delayed:1", 0.5) == [25]
    assert "need more time than sync to half of its accuracy: all." in DELAY.describe(tables)


def test_rule_that_is_earlier_at_half_of_the_accuracy_is_not_named():
    tables = synthetic(late=((0, 0), (10, 0.2), (30, 0.3)))
    assert all(isnan(time) for time in seconds_to(tables, "m", "own", "delayed:1", 1.0))
    assert "need more time than sync to half of its accuracy: none." in DELAY.describe(tables)
