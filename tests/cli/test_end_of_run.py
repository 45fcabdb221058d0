# SPDX-License-Identifier: BSD-3-Clause
"""The report after a run, with the planner's advice."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec import structs

from cli_fixtures import SLOW, Call, Simulate, one_line
from gapped import with_gap
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


def test_trace_without_two_updates_in_a_row_has_a_report_without_a_rate(
    simulated: Simulate, printed_report: Callable[[], str], tmp_path: Path
) -> None:
    write_trace(with_gap(simulated("sync"), 0, 199), tmp_path / "trace.jsonl")
    words = printed_report()
    assert words.startswith("sync with 8 workers: 1 of 200 updates (the trace has gaps) in ")
    assert "/s)" not in words
    assert "No advice on the number of backups: a plan needs at least 30 updates" in words


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
    assert (
        "the best number of backups is 1: another number of backups would not save more than 2 %"
        in words
    )


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


# ---- the same advice everywhere ----

SAME = {
    "sync": ("sync", "cancel", SLOW),
    "backups, cancelled": ("backup:1", "cancel", "45ms + exp:5ms; workers 6-7 x20"),
    "backups, kept": ("backup:2", "cancel", SLOW),
    "backups, finished": ("backup:4", "finish", SLOW),
    "no stragglers": ("sync", "cancel", "50ms"),
    "no barrier": ("async", "cancel", SLOW),
}


@pytest.mark.parametrize("has_norms", [False, True])
@pytest.mark.parametrize("case", SAME)
def test_report_and_plan_give_the_same_advice(
    case: str, has_norms: bool, call: Call, tmp_path: Path, printed_report: Callable[[], str]
) -> None:
    policy, late, latency = SAME[case]
    steps = 3000 if policy == "async" else 800
    spec = RunSpec(workers=8, steps=steps, late=late, seed=5)
    trace = simulate(policy, Cluster.parse(latency), spec)
    write_trace(with_norms(trace, 1.7, 1.0) if has_norms else trace, tmp_path / "trace.jsonl")

    report, shown = printed_report(), call("trace", "show", "trace.jsonl").words
    result = call("plan", "--trace", "trace.jsonl", "--json").json["plan"]

    best, baseline, gain = (result[name] for name in ("best", "baseline", "gain"))
    advice = report.partition("Judging by these times, ")[2].partition(" Details:")[0]
    assert advice in shown
    if best == baseline:
        assert advice.startswith(f"the best number of backups is {best['backups']}: ")
    else:
        assert advice.startswith(f"{best['rule']} (waiting for {best['needed']} of 8 workers)")
        assert f"{gain['least']:.2f}" in advice
        assert f"times as fast as {baseline['rule']}" in advice
    assert baseline["rule"] == (policy if policy != "async" else "sync")


@pytest.mark.parametrize(
    ("changes", "steps", "reason"),
    [
        ({"optimizers": 2}, 100, "the script has 2 optimizers"),
        (
            {"cores": 0.5},
            100,
            "the 4 workers share 0.5 cores and keep them busy for 100 % of the time",
        ),
        ({}, 20, "a plan needs at least 30 updates"),
    ],
    ids=["several optimizers", "shared cores", "few updates"],
)
def test_report_and_plan_refuse_for_the_same_reason(
    changes: dict[str, float],
    steps: int,
    reason: str,
    call: Call,
    tmp_path: Path,
    printed_report: Callable[[], str],
) -> None:
    trace = simulate("sync", Cluster.parse("50ms"), RunSpec(workers=4, steps=steps))
    records = [
        structs.replace(r, cpu_s=r.compute_s) if isinstance(r, Gradient) else r
        for r in with_norms(trace, 1.0, 1.0).records
    ]
    header = structs.replace(trace.header, **changes)
    write_trace(Trace(header, records), tmp_path / "trace.jsonl")

    assert f"No advice on the number of backups: {reason}" in printed_report()
    assert reason in call("trace", "show", "trace.jsonl").words
    assert reason in one_line(call("plan", "--trace", "trace.jsonl"), 2)
    network = ("--network", "model=1MB,bandwidth=1GB")
    assert reason in one_line(call("plan", "--trace", "trace.jsonl", *network), 2)


# ---- traces that can't be reported ----


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
    show(tmp_path, as_json=False)
    lines = capsys.readouterr().out.splitlines()
    heading = next(line for line in lines if line.startswith("worker "))
    assert heading.split("  ")[-1] == "waited for"
    assert all(len(line) <= 30 or "  " in line for line in lines)
