# SPDX-License-Identifier: BSD-3-Clause
"""Refused connections are reported, but a flood of them isn't."""

import pytest

from paceline.run.server.refusals import PERIOD_S, REPORTS_MAX, Refusals

LAST = "further refused connections are only counted for a while"


@pytest.fixture
def printed():
    return []


@pytest.fixture
def refusals(printed):
    return Refusals(printed.append)


def test_few_refusals_are_reported_one_by_one(refusals, printed):
    for number in range(3):
        refusals.add(f"reason {number}", now=100.0 + number)
    refusals.report_rest()
    assert printed == [f"refused a connection: reason {number}" for number in range(3)]


def test_flood_is_counted(refusals, printed):
    for _ in range(12_345):
        refusals.add("garbage", now=100.0)
    assert printed == ["refused a connection: garbage"] * REPORTS_MAX + [LAST]
    refusals.report_rest()
    assert printed[-1] == f"refused {12_345 - REPORTS_MAX:,} more connections"
    refusals.report_rest()
    assert len(printed) == REPORTS_MAX + 2


def test_next_period_begins_with_the_count_of_the_last(refusals, printed):
    for _ in range(REPORTS_MAX + 5):
        refusals.add("garbage", now=100.0)
    del printed[:]
    refusals.add("garbage", now=99.9 + PERIOD_S)
    assert printed == []
    refusals.add("the token is wrong", now=100.0 + PERIOD_S)
    assert printed == ["refused 6 more connections", "refused a connection: the token is wrong"]
