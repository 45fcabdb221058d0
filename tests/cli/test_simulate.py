# SPDX-License-Identifier: BSD-3-Clause
"""`paceline simulate`: its tables, JSON, figures and traces, and wrong input."""

import re
import resource
from pathlib import Path

import pytest

from cli_fixtures import LATENCY, SMALL, Call, call_script, refuse_wrong_input
from paceline.trace.reader import read_trace
from paceline.trace.schema import Trace

SUMMARY_KEYS = {
    "policy",
    "workers",
    "updates",
    "updates_per_s",
    "seconds",
    "step_s",
    "contributions",
    "staleness_mean",
    "staleness",
    "fates",
    "lost_gradients",
    "samples",
    "acceptance",
    "idle_share",
    "wasted_share",
    "traffic",
    "traffic_per_update",
    "by_worker",
    "pauses",
    "ended",
    "lost_updates",
    "restorations",
    "skipped_updates",
    "missing",
}


def test_simulate_compares_one_rule_of_each_kind_by_default(call: Call) -> None:
    answer = call("simulate", *SMALL)
    assert (answer.code, answer.err) == (0, "")
    assert re.findall(r"^([a-z]+(?::\d+)?) +\d", answer.out, re.MULTILINE) == [
        "sync",
        "backup:1",
        "batchsync:3",
        "deadline",
        "ssp:3",
        "delayed:1",
        "softsync:1",
        "async",
    ]


def test_simulate_prints_a_row_for_each_requested_rule(call: Call) -> None:
    answer = call("simulate", *SMALL, "-p", "backup:2", "-p", "deadline:after=60ms")
    assert "backup:2" in answer.out
    assert "deadline:after=0.06" in answer.out
    assert "async" not in answer.out
    for heading in ("updates/s", "staleness", "accepted", "idle", "wasted"):
        assert heading in answer.out
    assert "pulled" not in answer.out  # there is no network


def test_simulate_with_a_network_prints_the_traffic(call: Call) -> None:
    network = "model=100MB,bandwidth=1GB,delay=0.5ms"
    answer = call("simulate", *SMALL, "-p", "sync", "--network", network)
    assert "pulled/update  pushed/update  unused/update" in answer.out
    assert re.search(r"300 MB +300 MB +-$", answer.out, re.MULTILINE)  # for three workers


def test_simulate_prints_the_workers_of_a_single_rule(call: Call) -> None:
    answer = call("simulate", *SMALL, "-p", "sync")
    assert "by worker" in answer.out
    assert re.findall(r"^(\d) +20 ", answer.out, re.MULTILINE) == ["0", "1", "2"]


def test_stale_gradients_give_a_warning(call: Call) -> None:
    assert "stale" in call("simulate", *SMALL, "-p", "async").out.splitlines()[-1]
    assert "stale gradient" not in call("simulate", *SMALL, "-p", "sync").out


def test_simulate_json_is_a_list_of_summaries(call: Call) -> None:
    answer = call("simulate", *SMALL, "-p", "sync", "-p", "backup:1", "--json")
    assert (answer.code, answer.err) == (0, "")
    assert [each["policy"] for each in answer.json] == ["sync", "backup:1"]
    for each in answer.json:
        assert each.keys() == SUMMARY_KEYS
        assert each["updates"] == 20
        assert len(each["by_worker"]) == 3
        assert each["step_s"].keys() == {"mean", "p50", "p90", "p99", "max"}


def test_simulate_stops_at_the_given_time(call: Call) -> None:
    words = ("simulate", "-p", "sync", "-w", "2", "-l", "100ms", "--json")
    [summary] = call(*words, "--until", "1s").json
    assert (summary["updates"], summary["seconds"]) == (10, pytest.approx(1.0))
    [summary] = call(*words, "--until", "1s", "--steps", "3").json
    assert summary["updates"] == 3


@pytest.mark.parametrize("how", [("--json",), ()], ids=["json", "table"])
def test_the_same_seed_gives_the_same_output(how: tuple[str, ...], call: Call) -> None:
    words = ("simulate", *SMALL, *how)
    first, again = call(*words, "--seed", "4"), call(*words, "--seed", "4")
    assert first.code == 0
    assert first == again
    assert call(*words, "--seed", "5").out != first.out


def test_simulate_draws_a_figure(call: Call) -> None:
    answer = call("simulate", *SMALL, "-p", "sync", "-p", "async", "--plot", "rules.png")
    assert (answer.code, answer.err) == (0, "")
    assert Path("rules.png").stat().st_size > 1000


def test_trace_of_a_long_run_is_read_in_full(call: Call) -> None:
    call("simulate", "-w", "5", "--steps", "400", *LATENCY, "-p", "sync", "--out", "run.jsonl")
    trace = read_trace("run.jsonl")
    assert sum(1 for _ in trace.updates()) == 400
    assert sum(1 for _ in trace.gradients()) == 2000


# ---- runs that don't finish ----


def test_stalled_simulation_reports_it_and_fails(call: Call) -> None:
    words = ("simulate", "-w", "2", "-l", "50ms", "--faults", "kill 0 at 1s; kill 1 at 1s")
    answer = call(*words, "-p", "sync")
    assert answer.code == 1
    assert re.fullmatch(r"paceline: sync: stalled: 0 workers .*\n", answer.err)
    assert "sync" in answer.out  # what there was is shown
    [summary] = call(*words, "-p", "sync", "--json").json
    assert summary["ended"].startswith("stalled")


def test_simulation_stalled_before_its_first_update_reports_it(call: Call) -> None:
    answer = call("simulate", "-w", "1", "-l", "50ms", "-p", "sync", "--faults", "kill 0 at 10ms")
    assert answer.code == 1
    assert re.fullmatch(r"paceline: sync: stalled: .*\n", answer.err)


@pytest.mark.parametrize("how", [(), ("--json",), ("--plot", "rules.png")], ids=str)
def test_simulation_stopped_before_its_first_update_reports_it(
    how: tuple[str, ...], call: Call
) -> None:
    answer = call("simulate", "-w", "2", "-l", "100ms", "-p", "sync", "--until", "1ms", *how)
    assert answer.code != 0
    assert "update" in answer.err
    assert "Traceback" not in answer.err


def test_zero_computation_time_can_be_simulated() -> None:
    """The resource limits stop an endless simulation before it fills the memory."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_CPU, (8, 8))
        resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))

    words = ("simulate", "-w", "2", "-l", "0ms", "-p", "async", "--steps", "10", "--json")
    answer = call_script(*words, preexec_fn=limit)
    assert answer.code == 0
    assert answer.json[0]["updates"] == 10


# ---- what if ----


@pytest.mark.parametrize("latency", ["50ms", "50ms + 10% exp:300ms", "exp:20ms; worker 1 x3"])
def test_sync_run_replayed_under_sync_takes_exactly_the_same_time(latency: str, call: Call) -> None:
    words = ("simulate", "-p", "sync", "--json", "--steps", "40")
    result = call(*words, "-w", "4", "-l", latency, "--out", "run.jsonl", "--seed", "6").json
    replayed = call(*words, "--trace", "run.jsonl").json
    assert replayed[0]["seconds"] == result[0]["seconds"]
    assert replayed == result


def test_replay_of_a_sync_run_uses_only_recorded_times(call: Call) -> None:
    call("simulate", *SMALL, "-p", "sync", "--out", "run.jsonl")
    answer = call("simulate", "-p", "backup:1", "--steps", "20", "--trace", "run.jsonl")
    assert answer.code == 0
    assert "all 60 computation times are as recorded" in answer.words


def test_replay_says_how_many_times_were_cut_short(recorded: Trace, call: Call) -> None:
    cut = sum(g.fate == "cancelled" for g in recorded.gradients())
    total = sum(1 for _ in recorded.gradients())
    answer = call("simulate", "-p", "sync", "--steps", "20", "--trace", "run.jsonl")
    assert answer.code == 0
    assert f"{cut} of {total} computation times were cut short" in answer.words
    assert "cut short by cancellation" in answer.words


# ---- wrong input ----

WRONG = {
    "a negative latency": ("simulate --latency=-5ms", 2, "-5ms"),
    "a negative mean": ("simulate -l exp:-5ms", 2, "-5ms"),
    "an invalid latency": ("simulate -l soon", 2, "soon"),
    "an unknown distribution": ("simulate -l cauchy:1s", 2, "cauchy"),
    "an empty latency": ("simulate -l ''", 2, "latency must be"),
    "an infinite latency": ("simulate -l inf", 2, "inf"),
    "as many backups as workers": ("simulate -w 4 -p backup:4", 2, "b=4"),
    "more backups than workers": ("simulate -w 4 -p backup:9", 2, "b=9"),
    "N > W": ("simulate -w 4 -p deadline:n_min=5", 2, "n_min"),
    "negative backups": ("simulate -p backup:-1", 2, "-1"),
    "backups that are not a number": ("simulate -p backup:two", 2, "two"),
    "an unknown rule": ("simulate -p nonsense", 2, "nonsense"),
    "one unknown rule of two": ("simulate -p sync -p nonsense --steps 5", 2, "nonsense"),
    "an empty rule": ("simulate -p ''", 2, "policy"),
    "zero steps": ("simulate --steps 0", 2, "steps"),
    "negative steps": ("simulate --steps -3", 2, "-3"),
    "zero workers": ("simulate -w 0", 2, "workers"),
    "negative workers": ("simulate -w -1", 2, "-1"),
    "zero samples": ("simulate --batch 0", 2, "batch"),
    "more required workers than there are": ("simulate -w 3 --min-workers 4", 2, "min_workers"),
    "a negative seed": ("simulate --seed -1", 2, "seed"),
    "a negative stop time": ("simulate --until=-3s", 2, "-3s"),
    "an invalid stop time": ("simulate --until soon", 2, "soon"),
    "an invalid network": ("simulate --network fast", 2, "fast"),
    "a network without bandwidth": ("simulate --network model=1MB", 2, "bandwidth"),
    "a negative delay": ("simulate --network model=1,bandwidth=1,delay=-1s", 2, "-1s"),
    "an invalid fault": ("simulate --faults 'eat 3'", 2, "eat 3"),
    "a fault of a missing worker": ("simulate -w 3 --faults 'kill 3 at 1s'", 2, "kill 3"),
    "a fault before the start": ("simulate --faults 'kill 0 at -1s'", 2, "-1s"),
    "a trace of several rules": ("simulate --out x.jsonl -p sync -p async", 2, "--out"),
    "a trace of all default rules": ("simulate --out x.jsonl", 2, "--out"),
    "a trace in a missing folder": ("simulate -p sync --out no/x.jsonl", 3, "no/x.jsonl"),
    "a trace in a file": ("simulate -p sync --out empty/x.jsonl", 3, "empty/x.jsonl"),
    "a trace that is a directory": ("simulate -p sync --out .", 3, "cannot write ."),
    "a figure of an unknown kind": ("simulate -p sync --plot x.xyz", 2, "x.xyz"),
    "a figure without an extension": ("simulate -p sync --plot figure", 2, "figure"),
    "a figure in a missing directory": ("simulate -p sync --plot no/x.png", 2, "no/x.png"),
    "a missing trace to replay": ("simulate --trace missing", 3, "missing"),
    "an empty trace to replay": ("simulate --trace empty", 3, "empty"),
    "text instead of a trace to replay": ("simulate --trace words", 3, "words:1"),
    "a trace to replay with only a header": ("simulate --trace header", 3, "gradient"),
    "a missing trace as latency": ("simulate -l trace:missing", 3, "missing"),
}


@pytest.mark.usefixtures("files")
@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_input_gives_one_line_and_an_exit_code(
    wrong: str, call: Call, tmp_path: Path
) -> None:
    refuse_wrong_input(call, tmp_path, WRONG[wrong])
