# SPDX-License-Identifier: BSD-3-Clause
"""The report after a run, with the planner's advice."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec import structs

from cli_fixtures import SLOW, Simulate
from paceline.cli.end_of_run import print_report
from paceline.cli.trace import show
from paceline.sim.cluster import Cluster
from paceline.sim.simulate import simulate
from paceline.spec import RunSpec
from paceline.trace.schema import (
    Ended,
    Gradient,
    Header,
    Joined,
    Resumed,
    Trace,
    Update,
    write_trace,
)


@pytest.fixture
def printed_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[[], str]:
    """Return a function that prints the report of the trace and returns it in one line."""

    def print_it() -> str:
        print_report(tmp_path / "trace.jsonl")
        return " ".join(capsys.readouterr().out.split())

    return print_it


def test_report_ends_with_the_best_b(
    simulated: Simulate, printed_report: Callable[[], str]
) -> None:
    simulated("sync")
    words = printed_report()
    assert words.startswith("sync with 8 workers: 200 updates in ")
    assert "Worker 7 is always slow" in words
    assert "Judging by these times, backup:2 (waiting for 6 of 8 workers) would reach" in words
    assert "times as fast as sync. Assumed: every gradient counts the same" in words


def test_advice_compares_with_the_rule_that_ran_and_counts_estimates(
    simulated: Simulate, printed_report: Callable[[], str]
) -> None:
    """The pilot waits for one of the two slow workers."""
    simulated("backup:1", "45ms + exp:5ms; workers 6-7 x20")
    words = printed_report()
    assert "Judging by these times, backup:2 (waiting for 6 of 8 workers) would reach" in words
    assert "times as fast as backup:1." in words
    assert "199 of 1,592 times were cut short and are estimates." in words


def test_run_that_cancelled_late_work_is_not_sent_back_to_sync(
    simulated: Simulate, printed_report: Callable[[], str]
) -> None:
    simulated("backup:5")
    words = printed_report()
    assert "the best number of backups is 5: more backups would not save more than 2 %" in words
    assert "whether fewer would, this recording can't tell" in words
    assert "as fast as" not in words.partition("Judging")[2]


def test_best_choice_is_confirmed(simulated: Simulate, printed_report: Callable[[], str]) -> None:
    simulated("sync", "50ms")
    words = printed_report()
    assert "the best number of backups is 0: backups would not save more than 2 % of" in words


def test_good_number_of_backups_is_confirmed(
    tmp_path: Path, printed_report: Callable[[], str]
) -> None:
    """If late work is finished, all numbers of backups can be compared."""
    spec = RunSpec(workers=8, steps=400, late="finish")
    trace = simulate("backup:1", Cluster.parse("45ms + exp:5ms; worker 7 x20"), spec)
    write_trace(trace, tmp_path / "trace.jsonl")
    words = printed_report()
    assert "the best number of backups is 1: no other is certain to save more than 2 %" in words


def test_rule_without_b_is_compared_with_sync(
    simulated: Simulate, printed_report: Callable[[], str]
) -> None:
    simulated("async", steps=800)
    assert "times as fast as sync." in printed_report()


@pytest.mark.parametrize(
    ("workers", "steps", "latency"),
    [(1, 200, SLOW), (8, 10, SLOW), (4, 100, "0ms")],
    ids=["one worker", "too short", "no time at all"],
)
def test_no_advice_if_nothing_can_be_planned(
    workers: int, steps: int, latency: str, simulated: Simulate, printed_report: Callable[[], str]
) -> None:
    simulated("sync", latency.partition(";")[0], workers, steps)
    words = printed_report()
    assert words.startswith("sync with")
    assert "Judging" not in words
    assert ("No advice on the number of backups: " in words) == (workers > 1)


def test_advice_for_many_workers_is_left_to_the_planner(
    simulated: Simulate, printed_report: Callable[[], str]
) -> None:
    simulated("sync", workers=101, steps=25)
    assert "To find the best b: paceline plan --trace " in printed_report()


def with_norms(trace: Trace, gradient: float, average: float) -> Trace:
    """Return the trace with these squared norms of all gradients, and of all averages."""
    norms = {Gradient: gradient, Update: average}
    records = [
        structs.replace(r, sq_norm=norms[type(r)]) if type(r) in norms else r for r in trace.records
    ]
    return Trace(trace.header, records)


def test_advice_uses_the_noise_scale_of_the_trace(
    simulated: Simulate, tmp_path: Path, printed_report: Callable[[], str]
) -> None:
    """It is only the least that the noise scale can be, so the gain is a range."""
    write_trace(with_norms(simulated("sync"), 1.7, 1.0), tmp_path / "trace.jsonl")
    words = printed_report()
    # S = (1.7 - 1)/(1/32 - 1/256) = 25.6 and |G|² = 1 - 25.6/256 = 0.9
    assert "is at least the 28.44 samples of the recording, and perhaps much larger" in words
    assert re.search(r"[\d.]+ to [\d.]+ times as fast as sync, depending on the noise scale", words)


def test_norms_without_noise_are_not_used(
    simulated: Simulate, tmp_path: Path, printed_report: Callable[[], str]
) -> None:
    """Gradients always have noise, so an estimate of none is wrong."""
    write_trace(with_norms(simulated("sync"), 1.0, 1.0), tmp_path / "trace.jsonl")
    assert "Assumed: every gradient counts the same" in printed_report()


def test_report_of_a_run_without_updates(tmp_path: Path, printed_report: Callable[[], str]) -> None:
    header = Header(source="run", policy="sync", workers=1)
    records = [Joined(0.0, 0), Resumed(0.0), Ended(9.0, 0, reason="stopped")]
    write_trace(Trace(header, records), tmp_path / "trace.jsonl")
    assert printed_report() == "The run made no updates (stopped)."


@pytest.mark.parametrize("text", [None, "", "nonsense\n", '{"type":"header"'], ids=str)
def test_unreadable_trace_does_not_fail_the_run(
    text: str | None, tmp_path: Path, printed_report: Callable[[], str]
) -> None:
    if text is not None:
        (tmp_path / "trace.jsonl").write_text(text)
    assert printed_report().startswith("No report: ")


def test_large_trace_is_left_to_the_user(
    simulated: Simulate, tmp_path: Path, printed_report: Callable[[], str]
) -> None:
    simulated("sync", steps=10)
    with (tmp_path / "trace.jsonl").open("ab") as file:
        file.truncate(200_000_000)  # a sparse file takes no space
    assert printed_report().startswith("The trace is large. For a report: paceline trace show ")


def test_prose_is_wrapped_but_tables_are_not(
    simulated: Simulate,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "30")
    simulated("backup:1", steps=15)
    show(tmp_path)
    lines = capsys.readouterr().out.splitlines()
    heading = next(line for line in lines if line.startswith("worker "))
    assert heading.split("  ")[-1] == "waited for"
    assert all(len(line) <= 30 or "  " in line for line in lines)
