# SPDX-License-Identifier: BSD-3-Clause
"""What docs/ says of the lab's results is what the tables in docs/results say."""

import re
import shutil
from pathlib import Path

import pytest

from paceline.lab.experiment import make_again
from paceline.lab.experiments import EXPERIMENTS

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
RESULTS = DOCS / "results"
PAGE = DOCS / "results.md"


def rows():
    """Of the tables of the page: the experiment of the section, what the paper says, what we do."""
    found = []
    for section in PAGE.read_text(encoding="utf-8").split("\n## ")[1:]:
        name = re.search(r"paceline lab run ([a-z-]+)", section)
        for line in section.splitlines():
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            if line.startswith("|") and not set(line) <= set("|- :") and cells[0] != "claim":
                found.append((name[1], *cells))
    return found


@pytest.mark.parametrize("name", sorted(path.name for path in RESULTS.iterdir()))
def test_a_paragraph_is_what_its_tables_say(name, tmp_path):
    folder = tmp_path / name
    shutil.copytree(RESULTS / name, folder)
    make_again(EXPERIMENTS[name], tmp_path)
    for file in ("README.md", "figure.png"):
        assert (folder / file).stat().st_size > 100
    assert (folder / "README.md").read_text() == (RESULTS / name / "README.md").read_text()


def test_every_number_of_ours_on_the_page_is_in_the_paragraph_of_its_experiment():
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


def test_every_claim_is_judged_and_explained_where_it_does_not_hold():
    for _, claim, paper, ours, verdict, why in rows():
        assert claim
        assert paper
        assert ours
        assert verdict in {"yes", "no", "in part", "not tried"}
        assert why or verdict == "yes", claim


def test_what_the_readme_says_of_the_race_is_in_its_paragraph():
    told = re.search(
        r"\n`paceline lab run inception`.*?\n\n", (ROOT / "README.md").read_text(), re.S
    )
    paragraph = (RESULTS / "inception" / "README.md").read_text(encoding="utf-8")
    numbers = re.findall(r"\d+(?:\.\d)? ± \d+(?:\.\d)?", told[0].replace("\n", " "))
    assert len(numbers) == 4
    assert [number for number in numbers if number not in paragraph] == []
