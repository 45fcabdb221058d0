# SPDX-License-Identifier: BSD-3-Clause
"""How the verbs print: JSON, tables and progress bars."""

import json
import sys

import pytest

from cli_fixtures import LATENCY, SMALL, Call
from paceline.cli import printing as show


def test_json_is_one_indented_document(capsys: pytest.CaptureFixture[str]) -> None:
    show.print_json({"rule": "sync", "updates": [1, 2]})
    out = capsys.readouterr().out
    assert json.loads(out) == {"rule": "sync", "updates": [1, 2]}
    assert out.startswith('{\n  "rule": "sync"')
    assert out.endswith("}\n")


def test_table_aligns_the_first_column_left_and_the_others_right(
    capsys: pytest.CaptureFixture[str],
) -> None:
    table = ("two rules", ["rule", "updates"], [["sync", "5"], ["backup:1", "1,000"]])
    lines = [line.rstrip() for line in show.table_text(*table).splitlines()]
    assert lines == [
        "two rules",
        "rule      updates",
        "sync            5",
        "backup:1    1,000",
        "",
    ]
    show.print_table(*table)
    assert capsys.readouterr().out == show.table_text(*table)


def test_table_is_never_cut_to_the_width_of_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    cells = [f"a long cell {i}" for i in range(10)]
    _, header, row, _ = show.table_text("wide", cells, [cells]).splitlines()
    for line in (header, row):
        assert all(cell in line for cell in cells)


# ---- progress bars ----


def test_progress_is_shown_on_standard_error_after_a_while(
    call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(show, "SHOW_AFTER_S", 0.0)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    answer = call("simulate", *SMALL, "-p", "sync", "--json")
    assert "simulating sync" in answer.err
    assert answer.json[0]["policy"] == "sync"
    answer = call("plan", "-w", "20", *LATENCY, "--json")
    assert "planning" in answer.err
    assert answer.json["sentence"].startswith("Use ")


@pytest.mark.parametrize("goal", [("--steps", "20"), ("--until", "2s")], ids=["steps", "until"])
def test_one_bar_shows_the_progress_of_all_rules(
    goal: tuple[str, str], call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[tuple[str, float]] = []
    monkeypatch.setattr(
        show.DelayedProgressBar, "show", lambda bar, done: shown.append((bar._title, done))
    )
    assert call("simulate", "-w", "3", *goal, *LATENCY, "-p", "sync", "-p", "async").code == 0
    assert {title for title, _ in shown} == {"simulating sync", "simulating async"}
    shares = [done for _, done in shown]
    assert shares == sorted(shares)
    assert 0 < shares[0] < 0.2
    assert 0.9 < shares[-1] <= 1


def test_progress_is_silent_without_a_terminal(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    """Standard error isn't a terminal here, as in a job whose output goes to a file."""
    monkeypatch.setattr(show, "SHOW_AFTER_S", 0.0)
    assert call("simulate", *SMALL, "-p", "sync").err == ""
