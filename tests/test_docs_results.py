# SPDX-License-Identifier: BSD-3-Clause
"""Every number about the lab in docs/ is in the tables under docs/results."""

import re
import shutil
from pathlib import Path

import pytest

from figure_checks import check_figure
from paceline.lab.experiment import read_tables, rebuild_report
from paceline.lab.experiments import EXPERIMENTS

ROOT = Path(__file__).parents[1]

DOCS = ROOT / "docs"

RESULTS = DOCS / "results"

PAGE = DOCS / "results.md"


def rows():
    """Return the rows of the page's tables, each after the experiment of its section."""
    found = []
    for section in PAGE.read_text(encoding="utf-8").split("\n## ")[1:]:
        name = re.search(r"paceline lab run ([a-z-]+)", section)
        for line in section.splitlines():
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            if line.startswith("|") and not set(line) <= set("|- :") and cells[0] != "claim":
                found.append((name[1], *cells))
    return found


@pytest.mark.parametrize("name", sorted(path.name for path in RESULTS.iterdir()))
def test_report_follows_from_its_tables(name, tmp_path):
    folder = tmp_path / name
    shutil.copytree(RESULTS / name, folder)
    rebuild_report(EXPERIMENTS[name], tmp_path)
    for file in ("README.md", "figure.png"):
        assert (folder / file).stat().st_size > 100
    assert (folder / "README.md").read_text() == (RESULTS / name / "README.md").read_text()


@pytest.mark.parametrize("name", sorted(path.name for path in RESULTS.iterdir()))
def test_figure_is_labelled_and_nothing_covers_its_data(name):
    check_figure(EXPERIMENTS[name].draw(read_tables(RESULTS / name)))


def test_every_measured_number_on_the_page_is_in_its_report():
    checked = 0
    for name, claim, _, ours, *_ in rows():
        paragraph = (RESULTS / name / "README.md").read_text(encoding="utf-8")
        numbers = re.findall(r"\d+(?:\.\d+)?(?: ± \d+(?:\.\d+)?)?", ours)
        missing = [
            n for n in numbers if not re.search(rf"(?<![\d.]){re.escape(n)}(?![\d])", paragraph)
        ]
        assert missing == [], f"{claim}: {missing} in {name}"
        checked += len(numbers)
    assert checked > 50


def test_every_number_of_the_summary_is_on_the_rest_of_the_page():
    _, summary, rest = re.split(r"\n## (?:Summary|How to read the tables)\n", PAGE.read_text())
    numbers = re.findall(r"\d+\.\d+", summary)
    assert len(numbers) > 5
    assert [number for number in numbers if not re.search(rf"(?<!\d){number}(?!\d)", rest)] == []


def test_every_claim_has_a_verdict_and_an_explanation_if_it_does_not_hold():
    for _, claim, paper, ours, verdict, why in rows():
        assert claim
        assert paper
        assert ours
        assert verdict in {"yes", "no", "in part", "not tried"}
        assert why or verdict == "yes", claim


def test_numbers_about_inception_in_the_readme_are_in_its_report():
    calls = re.search(
        r"\n`paceline lab run inception`.*?\n\n", (ROOT / "README.md").read_text(), re.S
    )
    paragraph = (RESULTS / "inception" / "README.md").read_text(encoding="utf-8")
    numbers = re.findall(r"\d+(?:\.\d)? ± \d+(?:\.\d)?", calls[0].replace("\n", " "))
    assert len(numbers) == 4
    assert [number for number in numbers if number not in paragraph] == []
