# SPDX-License-Identifier: BSD-3-Clause
"""`paceline trace show`, `trace check`, and the report after a run with the planner's advice."""

from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec import structs

from paceline.cli.report import print_report
from paceline.cli.trace import check, show
from paceline.errors import TraceError
from paceline.run.launch.run_folder import is_locked, lock
from paceline.sim.cluster import Cluster
from paceline.sim.simulate import simulate
from paceline.spec import RunSpec
from paceline.trace.schema import Ended, Header, Joined, Restored, Resumed, Trace, write_trace

SLOW = "45ms + exp:5ms + 5% exp:500ms; worker 7 x1.8"

Simulate = Callable[..., Trace]


@pytest.fixture
def simulated(tmp_path: Path) -> Simulate:
    """Return a function that simulates a run and writes its trace to the folder."""

    def simulate_it(policy: str, latency: str = SLOW, workers: int = 8, steps: int = 200) -> Trace:
        trace = simulate(policy, Cluster.parse(latency), RunSpec(workers=workers, steps=steps))
        write_trace(trace, tmp_path / "trace.jsonl")
        return trace

    return simulate_it


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
    simulated("backup:5")
    words = printed_report()
    assert "times as fast as backup:5." in words
    assert "1,000 of 1,600 times were cut short and are estimates." in words


def test_best_choice_is_confirmed(simulated: Simulate, printed_report: Callable[[], str]) -> None:
    simulated("sync", "50ms")
    assert "no b is better than sync by more than 2 %." in printed_report()


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


def test_advice_for_many_workers_is_left_to_the_planner(
    simulated: Simulate, printed_report: Callable[[], str]
) -> None:
    simulated("sync", workers=101, steps=25)
    assert "To find the best b: paceline plan --trace " in printed_report()


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


def test_run_folder_can_be_given_instead_of_its_trace(
    simulated: Simulate, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    simulated("sync", steps=10)  # too short for planning, which would take time
    show(tmp_path / "trace.jsonl")
    by_file = capsys.readouterr().out
    show(tmp_path)
    assert capsys.readouterr().out == by_file
    check(tmp_path, as_json=False)
    assert capsys.readouterr().out.startswith(f"{tmp_path}/trace.jsonl is consistent: sim of sync,")


def test_folder_without_a_trace_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"trace\.jsonl"):
        show(tmp_path)


def test_check_says_which_updates_were_lost(
    simulated: Simulate, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = simulated("sync", "50ms", 2, 5)
    *records, end = trace.records
    restored = Restored(end.t, 3, trace.header, turns={0: 3, 1: 3})
    resumed = structs.replace(restored, resumed=True)
    write_trace(Trace(trace.header, [*records, restored, resumed]), tmp_path / "trace.jsonl")
    check(tmp_path, as_json=False)
    out = capsys.readouterr().out
    assert "is consistent so far (the trace breaks off)" in out
    assert (
        "3 updates in 250 ms; the run was resumed 1 x, nothing lost; "
        "the server was restored 1 x, updates 4-5 lost; gradients: 6 accepted, 4 lost." in out
    )


# ---- a run that is still going on ----


@pytest.fixture
def half(simulated: Simulate, tmp_path: Path) -> Path:
    """Return a trace with ten of twenty updates and half of the next line."""
    trace = simulated("sync", "50ms + exp:5ms", 2, 20)
    tenth = next(i for i, r in enumerate(trace.records, 1) if getattr(r, "update", 0) == 10)
    path = tmp_path / "trace.jsonl"
    write_trace(Trace(trace.header, trace.records[:tenth]), path)
    with path.open("ab") as file:
        file.write(b'{"type":"gradient","t":')
    return path


def test_running_run_is_described_so_far(half: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with lock(half.parent):
        show(half.parent)
        check(half, as_json=False)
    words = " ".join(capsys.readouterr().out.split())
    assert "; still running at update 10 of 20." in words
    assert f"{half} is consistent so far (still running): " in words
    with pytest.raises(TraceError, match="truncated"):  # nobody is writing it
        show(half)


def test_running_run_may_be_in_the_middle_of_an_event(
    half: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = half.read_bytes().splitlines(keepends=True)[:-1]
    half.write_bytes(b"".join(lines[:-1]))  # without the update that the gradients complete
    with lock(half.parent):
        check(half, as_json=False)
    assert "is consistent so far (still running): " in capsys.readouterr().out
    with pytest.raises(TraceError, match="ends before the record"):
        check(half, as_json=False)


@pytest.mark.parametrize("count", [1, 2], ids=["header", "one joined"])
def test_run_that_just_started_has_no_update_yet(
    count: int, half: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    half.write_bytes(b"".join(half.read_bytes().splitlines(keepends=True)[:count]))
    with lock(half.parent):
        show(half)
        check(half, as_json=False)
    words = capsys.readouterr().out
    assert words.startswith("The run is still running and has made no updates yet.\n")
    assert words.endswith("is consistent so far (still running): no update yet.\n")


def test_reading_a_run_does_not_lock_it(half: Path) -> None:
    with lock(half.parent):
        assert is_locked(half.parent)
    assert not is_locked(half.parent)
    with lock(half.parent):
        assert is_locked(half.parent)
    assert not is_locked(half.parent / "nowhere")


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


def test_advice_uses_the_noise_scale_of_the_trace(
    simulated: Simulate, tmp_path: Path, printed_report: Callable[[], str]
) -> None:
    """If the norms are pure signal, a smaller N needs no more updates."""
    trace = simulated("sync")
    records = [
        structs.replace(r, sq_norm=1.0) if hasattr(r, "sq_norm") else r for r in trace.records
    ]
    write_trace(Trace(trace.header, records), tmp_path / "trace.jsonl")
    assert "a gradient noise scale of 0 samples" in printed_report()
