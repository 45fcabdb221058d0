# SPDX-License-Identifier: BSD-3-Clause
"""The exit codes that the help of each verb lists."""

import re
from pathlib import Path

import pytest

from cli_fixtures import Call
from paceline.cli.exit_codes import EVERY_CODE, VERB_CODES, exit_codes_of

PAGE = Path(__file__).parents[2] / "docs" / "runtime.md"

every_verb = pytest.mark.parametrize("verb", VERB_CODES)


@every_verb
def test_help_lists_the_codes_that_the_verb_can_return(verb: str, call: Call) -> None:
    answer = call(*verb.split(), "--help")
    assert answer.code == 0
    assert answer.words.endswith(exit_codes_of(verb))
    assert re.findall(r"\b\d+\b", exit_codes_of(verb)) == list(VERB_CODES[verb])


@every_verb
def test_codes_of_a_verb_are_among_those_of_all(verb: str) -> None:
    assert set(VERB_CODES[verb]) <= set(re.findall(r"\b\d+\b", EVERY_CODE))


def test_documentation_explains_every_code() -> None:
    section = PAGE.read_text().partition("\n## Exit codes\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (\d+)", section, re.MULTILINE)
    assert rows == ["0", "1", "2", "3", "4", "5", "6", "70", "128"]
    assert {*rows, "130"} == set(re.findall(r"\b\d+\b", EVERY_CODE))
