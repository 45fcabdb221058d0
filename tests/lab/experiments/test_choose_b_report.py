# SPDX-License-Identifier: BSD-3-Clause
"""The report of `choose-b` says what stored tables contain."""

from pathlib import Path

import pytest

from paceline.lab.experiment import read_tables
from paceline.lab.experiments.choose_b_report import describe, draw

RESULTS = Path(__file__).parents[3] / "docs" / "results" / "choose-b"


@pytest.fixture
def tables():
    return read_tables(RESULTS)


def test_paragraph_names_the_best_b_and_the_choices(tables):
    text = describe(tables)
    assert "smallest at b = 5: 191 s, against 281 s without backups" in text
    assert "- measured table, late work finished: b = 6, 6, 6 (best: 9;" in text


def test_figure_has_three_panels(tables):
    titles = [axes.get_title(loc="left") for axes in draw(tables).axes]
    assert sorted(titles) == [
        "Time per update, simulated",
        "Time to 93 % accuracy",
        "Updates to 93 % accuracy",
    ]
