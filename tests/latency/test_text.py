# SPDX-License-Identifier: BSD-3-Clause
"""Numbers, durations, percentages and worker ids: every formatted value parses back."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import SpecError
from paceline.latency.text import (
    format_ids,
    format_number,
    format_percent,
    format_seconds,
    parse_ids,
    split_percent,
)
from paceline.spec import parse_seconds


@pytest.mark.parametrize(
    ("text", "ids"), [("7", (7,)), ("0,3-5", (0, 3, 4, 5)), (" 4 , 2 - 3", (4, 2, 3))]
)
def test_worker_ids_are_numbers_and_ranges(text, ids):
    assert parse_ids(text) == ids


@pytest.mark.parametrize("text", ["", "a", "-1", "5-3", "1,,2", "1234567"])
def test_bad_worker_ids_are_refused(text):
    with pytest.raises(SpecError, match="worker ids must be like 0,3-5"):
        parse_ids(text)


@given(st.sets(st.integers(0, 999_999), min_size=1, max_size=12).map(sorted))
def test_worker_ids_read_back(ids):
    word, _, text = format_ids(ids).partition(" ")
    assert word == ("worker" if len(ids) == 1 else "workers")
    assert list(parse_ids(text)) == ids


@given(st.floats(0, 1e12))
def test_durations_and_numbers_read_back(value):
    assert parse_seconds(format_seconds(value), "time") == value
    assert float(format_number(value)) == value


@pytest.mark.parametrize(("seconds", "text"), [(0.05, "50ms"), (90.0, "90s"), (0.0, "0s")])
def test_durations_are_printed_in_the_shorter_unit(seconds, text):
    assert format_seconds(seconds) == text


@given(st.floats(0, 1))
def test_percentages_read_back(share):
    assert split_percent(f"{format_percent(share)} exp:1s") == (share, "exp:1s")


def test_text_without_a_percentage_is_returned_as_it_is():
    assert split_percent(" exp:1s ") == (None, "exp:1s")


@pytest.mark.parametrize("text", ["105% 1s", "-1% 1s", "some% 1s", "nan% 1s"])
def test_bad_percentages_are_refused(text):
    with pytest.raises(SpecError, match="percentage must be from 0% to 100%"):
        split_percent(text)
