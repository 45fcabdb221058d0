# SPDX-License-Identifier: BSD-3-Clause
"""The table of pilots in docs/planning.md follows from the measurements in bench/pilots.csv."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def table():
    """Return the lines that the script prints."""
    words = [ROOT / "bench" / "pilots.py", "--table", "--file", ROOT / "bench" / "pilots.csv"]
    return subprocess.check_output([sys.executable, *words], text=True).splitlines()


def test_page_has_the_table_of_the_measurements(table):
    page = (ROOT / "docs" / "planning.md").read_text(encoding="utf-8")
    assert "\n".join(table) in page


def test_every_choice_is_within_3_percent_of_the_best_or_within_the_noise(table):
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table[2:]]
    assert len(rows) == 6
    for *_, result, _, _ in rows:
        if not result.startswith("the best"):
            above, noise = re.match(r"([\d.]+) ± ([\d.]+) % slower", result).groups()
            assert float(above) <= max(3.0, float(noise)), result
