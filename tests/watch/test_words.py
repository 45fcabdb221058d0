# SPDX-License-Identifier: BSD-3-Clause
"""Numbers and lists as people read them."""

import pytest

from paceline.watch.words import (
    human_bytes,
    human_seconds,
    join_words,
    named_workers,
    percent,
    plural,
    three_digits,
    times,
)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (1.744, "1.74"),
        (51.23, "51.2"),
        (236.4, "236"),
        (6100, "6,100"),
        (1e7, "10,000,000"),
    ],
)
def test_three_digits_are_never_in_scientific_notation(value: float, text: str) -> None:
    assert three_digits(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 us"),
        (2.5e-6, "2.5 us"),
        (0.0512, "51.2 ms"),
        (1.0, "1 s"),
        (119.0, "119 s"),
        (120.0, "2 min"),
        (9000.0, "2.5 h"),
        (3 * 86_400.0, "3 d"),
    ],
)
def test_duration_has_a_fitting_unit(seconds: float, text: str) -> None:
    assert human_seconds(seconds) == text


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1 kB"), (12.5e6, "12.5 MB"), (2e9, "2 GB")],
)
def test_size_has_a_fitting_unit(size: float, text: str) -> None:
    assert human_bytes(size) == text


@pytest.mark.parametrize(
    ("share", "text"),
    [(0, "0 %"), (0.0001, "<0.1 %"), (0.034, "3.4 %"), (0.125, "12 %"), (1, "100 %")],
)
def test_small_share_is_not_rounded_to_zero(share: float, text: str) -> None:
    assert percent(share) == text


def test_counts_have_their_nouns() -> None:
    assert [plural(n, "update") for n in (0, 1, 1000)] == ["0 updates", "1 update", "1,000 updates"]
    assert [times(n) for n in (1, 2, 3, 1000)] == ["once", "twice", "3 times", "1,000 times"]


@pytest.mark.parametrize(
    ("words", "text"),
    [([], ""), (["a"], "a"), (["a", "b"], "a and b"), (["a", "b", "c"], "a, b and c")],
)
def test_lists_end_with_and(words: list[str], text: str) -> None:
    assert join_words(words) == text


def test_too_many_workers_are_only_counted() -> None:
    assert named_workers([3], 2) == "Worker 3"
    assert named_workers([3, 5], 2) == "Workers 3 and 5"
    assert named_workers([3, 5, 7], 2) == "3 workers"
