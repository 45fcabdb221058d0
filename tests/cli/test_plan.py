# SPDX-License-Identifier: BSD-3-Clause
"""`paceline plan`: its table, recommendation, JSON and figure, and wrong input."""

import re
from pathlib import Path

import msgspec
import numpy as np
import pytest

from cli_fixtures import LATENCY, Call, one_line, refuse_wrong_input
from paceline.sim.cluster import Cluster
from paceline.sim.simulate import simulate
from paceline.spec import RunSpec
from paceline.trace.schema import Gradient, Trace, Update, write_trace

PLAN = ("plan", "--trace", "pilot.jsonl")
"""A plan for the three workers of `pilot`, which takes no time."""


@pytest.mark.usefixtures("pilot")
def test_plan_prints_a_row_for_every_n_and_a_recommendation(call: Call) -> None:
    answer = call(*PLAN)
    assert answer.code == 0
    assert re.findall(r"^(\d)[ *]+(\d) ", answer.out, re.MULTILINE) == [
        ("3", "0"),
        ("2", "1"),
        ("1", "2"),
    ]
    assert answer.out.count("*") == 1
    assert re.search(r"^Use (sync|backup:\d)", answer.out, re.MULTILINE)
    assert "Assumed: every gradient counts the same" in answer.words
    assert "Intervals: how much the answer depends on the recorded period" in answer.words
    assert "Recording: all 177 computation times are as recorded." in answer.words
    assert re.search(r"Check: an update of the recorded run took .* ms on average", answer.words)


@pytest.mark.usefixtures("pilot")
def test_plan_json_has_the_options_the_best_and_the_sentence(call: Call) -> None:
    answer = call(*PLAN, "--json")
    result = answer.json
    assert answer.code == 0
    assert result.keys() == {"plan", "sentence", "policies"}
    assert result["plan"].keys() >= {
        "late",
        "options",
        "best",
        "best_backups",
        "baseline",
        "gain",
        "gain_interval",
        "flat",
        "cheapest",
        "assumptions",
    }
    assert [option["needed"] for option in result["plan"]["options"]] == [1, 2, 3]
    for option in result["plan"]["options"]:
        assert option.keys() >= {"machines", "needed", "step_s", "updates", "seconds", "interval"}
        assert option["step_s"].keys() == {"cancel", "finish"}
    assert result["plan"]["best"] in result["plan"]["options"]
    assert result["plan"]["gain"].keys() == {"least", "most"}
    assert result["plan"]["gain_interval"].keys() == {"low", "high"}
    assert result["plan"]["baseline"]["rule"] == "sync"
    assert result["plan"]["origin"][0].startswith("Recording: ")
    assert result["plan"]["origin"][1].startswith("Check: ")
    assert result["sentence"].startswith("Use ")
    assert result["policies"] == []


@pytest.mark.usefixtures("pilot")
def test_plan_compares_other_rules(call: Call) -> None:
    rules = ("sync", "backup", "softsync:4,lr=constant", "async")
    answer = call(*PLAN, *(word for rule in rules for word in ("-p", rule)), "--json")
    best = answer.json["plan"]["best"]
    assert [each["policy"] for each in answer.json["policies"]] == [
        "sync",
        f"backup:{best['machines'] - best['needed']}",
        "softsync:4,lr=constant",
        "async",
    ]
    shown = call(*PLAN, "--policy", "sync", "--policy", "async")
    assert "throughput" in shown.out
    assert "Warning: throughput is not convergence" in shown.words


@pytest.mark.usefixtures("pilot")
def test_plan_draws_a_figure(call: Call) -> None:
    assert call(*PLAN, "--plot", "plan.svg").code == 0
    assert Path("plan.svg").stat().st_size > 1000


def test_the_same_seed_gives_the_same_output(call: Call) -> None:
    words = ("plan", "-w", "20", *LATENCY)
    first, again = call(*words, "--seed", "4"), call(*words, "--seed", "4")
    assert first.code == 0
    assert first == again
    assert call(*words, "--seed", "5").out != first.out


def test_plan_works_without_a_trace(call: Call) -> None:
    answer = call("plan", "--workers", "20", "--updates", "500", *LATENCY, "--json")
    assert answer.code == 0
    assert len(answer.json["plan"]["options"]) == 20
    assert answer.json["plan"]["options"][-1]["updates"] == 500
    assert answer.json["plan"]["gain"]["least"] > 1
    assert answer.json["plan"]["origin"] == []


def test_plan_with_zero_computation_time_works_or_is_refused(call: Call) -> None:
    answer = call("plan", "--workers", "20", "--latency", "0ms")
    if answer.code != 0:
        one_line(answer, 2)


@pytest.mark.usefixtures("recorded")
def test_plan_from_a_trace_says_what_was_estimated(call: Call) -> None:
    """A run that cancelled late work is not compared with waiting for more workers."""
    answer = call("plan", "--trace", "run.jsonl")
    assert answer.code == 0
    assert "3 workers" in answer.out
    assert "cut short by cancellation" in answer.words
    assert "every gradient counts the same" in answer.words  # no norms were recorded
    rows = re.findall(r"^(\d)[ *]+(\d) ", answer.out, re.MULTILINE)
    assert rows == [("2", "1"), ("1", "2")]
    assert "x backup:1" in answer.out
    assert "can't tell, because late work was cancelled" in answer.words


@pytest.mark.usefixtures("recorded")
@pytest.mark.parametrize(("workers", "needed"), [(2, [1]), (1, [1])])
def test_fewer_workers_than_were_recorded_leave_fewer_that_finished(
    workers: int, needed: list[int], call: Call
) -> None:
    """Of two workers, one was cancelled in some versions, so only one is always known."""
    result = call("plan", "--trace", "run.jsonl", "-w", workers, "--json").json
    assert [option["needed"] for option in result["plan"]["options"]] == needed


@pytest.mark.usefixtures("recorded")
def test_plan_with_a_network_leaves_out_the_recorded_one(call: Call) -> None:
    network = ("--network", "model=1MB,bandwidth=1GB")
    result = call("plan", "--trace", "run.jsonl", *network, "--json").json
    assert [line.partition(":")[0] for line in result["plan"]["origin"]] == ["Recording", "Check"]


@pytest.mark.parametrize("late", ["cancel", "finish"])
def test_late_work_is_handled_as_in_the_trace_unless_given(late: str, call: Call) -> None:
    spec = RunSpec(workers=3, steps=60, late=late)
    write_trace(simulate("sync", Cluster.parse("50ms + 10% exp:300ms"), spec), "pilot.jsonl")
    assert call(*PLAN, "--json").json["plan"]["late"] == late
    assert call(*PLAN, "--late", "cancel", "--json").json["plan"]["late"] == "cancel"


# ---- arrivals ----


def write_arrivals(path: str, *, is_shared: bool) -> None:
    """Write 60 updates of 4 workers: in every tenth all are slow, or in each a different one is."""
    fast, slow = ["0.05"] * 4, ["0.5"] * 4
    lines = ["worker 0,worker 1,worker 2,worker 3"]
    for update in range(60):
        one = update % 4
        single = [*fast[:one], slow[one], *fast[one + 1 :]]
        lines.append(",".join((slow if update % 10 == 0 else fast) if is_shared else single))
    Path(path).write_text("\n".join(lines) + "\n")


@pytest.mark.parametrize(("is_shared", "rule"), [(True, "sync"), (False, "backup:1")])
def test_plan_from_arrivals(is_shared: bool, rule: str, call: Call) -> None:
    write_arrivals("arrivals.csv", is_shared=is_shared)
    answer = call("plan", "--trace", "arrivals.csv", "--json")
    assert answer.code == 0
    assert answer.json["plan"]["best"]["rule"] == rule
    gain = 1.0 if is_shared else 10 * 3 / 4
    assert answer.json["plan"]["gain"]["least"] == pytest.approx(gain)
    assert answer.json["plan"]["origin"] == [
        "Recording: all 240 computation times are as recorded."
    ]


def test_plan_from_arrivals_uses_the_noise_scale_and_compares_rules(call: Call) -> None:
    write_arrivals("arrivals.csv", is_shared=False)
    words = ("--noise-scale", "100", "-p", "sync", "-p", "backup", "--late", "finish")
    result = call("plan", "--trace", "arrivals.csv", *words, "--json").json
    assert implied_noise_scale(result["plan"], batch=32) == pytest.approx(100)
    assert [each["policy"] for each in result["policies"]] == [
        "sync",
        result["plan"]["best"]["rule"],
    ]


def test_wrong_arrivals_are_refused_with_the_line(call: Call) -> None:
    Path("wrong.csv").write_text("1,2\n1,two\n")
    assert "wrong.csv:2 must have seconds" in one_line(call("plan", "--trace", "wrong.csv"), 2)


def test_arrivals_include_the_network(call: Call) -> None:
    write_arrivals("arrivals.csv", is_shared=True)
    answer = call("plan", "--trace", "arrivals.csv", "--network", "model=1MB,bandwidth=1GB")
    assert "leave --network out" in one_line(answer, 2)


# ---- pilots that are refused ----


@pytest.mark.parametrize(
    ("latency", "steps", "reason"),
    [
        ("50ms", 20, "a plan needs at least 30 updates"),
        ("0s", 100, "took no time, so there is nothing to plan"),
    ],
)
def test_pilot_that_says_nothing_is_refused(
    latency: str, steps: int, reason: str, call: Call
) -> None:
    trace = simulate("sync", Cluster.parse(latency), RunSpec(workers=4, steps=steps))
    write_trace(trace, "pilot.jsonl")
    assert reason in one_line(call(*PLAN), 2)


def test_wrong_options_are_refused_before_the_trace_is_read(call: Call) -> None:
    for words in (("--plot", "x.xyz"), ("--policy", "nonsense")):
        assert words[1] in one_line(call("plan", "--trace", "missing", *words), 2)


# ---- the updates that each N needs ----


@pytest.mark.usefixtures("pilot")
def test_plan_uses_the_updates_of_a_table(call: Call) -> None:
    Path("table.csv").write_text("N,updates\n1,900\n2,500\n3,300\n")
    result = call(*PLAN, "--updates-table", "table.csv", "--json").json
    updates = {option["needed"]: option["updates"] for option in result["plan"]["options"]}
    assert updates == pytest.approx({1: 900, 2: 500, 3: 300})


def implied_noise_scale(plan: dict[str, list[dict[str, float]]], batch: int) -> float:
    """Compute B in updates ∝ 1 + B/(N·batch) from the first and last option of the plan."""
    first, last = plan["options"][0], plan["options"][-1]
    ratio = first["updates"] / last["updates"]
    return (ratio - 1) / (1 / batch - ratio / (last["needed"] * batch))


@pytest.mark.usefixtures("pilot")
def test_plan_uses_the_noise_scale(call: Call) -> None:
    result = call(*PLAN, "--noise-scale", "500", "--batch", "16", "--updates", "70", "--json").json
    assert implied_noise_scale(result["plan"], batch=16) == pytest.approx(500)
    assert result["plan"]["options"][-1]["updates"] == 70


def with_norms(trace: Trace, noise_scale: float) -> Trace:
    """Return the trace with gradient norms that have this noise scale."""
    rng, dimensions = np.random.default_rng(12), 1000
    truth = rng.standard_normal(dimensions)
    noise = np.sqrt(noise_scale * (truth @ truth) / dimensions)  # of one sample, one coordinate
    records, waiting = [], []
    for record in trace.records:
        norm = None
        if isinstance(record, Gradient) and record.fate == "accepted":
            spread = noise / np.sqrt(record.samples)
            waiting.append(truth + spread * rng.standard_normal(dimensions))
            norm = float(waiting[-1] @ waiting[-1])
        elif isinstance(record, Update):
            mean = np.mean(waiting, axis=0)
            norm = float(mean @ mean)
            waiting.clear()
        records.append(record if norm is None else msgspec.structs.replace(record, sq_norm=norm))
    return Trace(trace.header, records)


@pytest.mark.parametrize(("policy", "noise_scale"), [("sync", 1000.0), ("backup:2", 100.0)])
def test_plan_estimates_the_noise_scale_from_a_trace(
    policy: str, noise_scale: float, call: Call
) -> None:
    spec = RunSpec(workers=8, steps=300)
    trace = simulate(policy, Cluster.parse("50ms + 10% exp:300ms", batch=32), spec)
    write_trace(with_norms(trace, noise_scale), "pilot.jsonl")
    assert call("trace", "check", "pilot.jsonl").code == 0
    result = call("plan", "--trace", "pilot.jsonl", "--batch", "32", "--json").json
    assert implied_noise_scale(result["plan"], batch=32) == pytest.approx(noise_scale, rel=0.08)
    assert "noise scale" in result["plan"]["assumptions"][0]


def test_plan_from_a_trace_uses_its_batch(call: Call) -> None:
    """Without --batch, a gradient has as many samples as in the pilot run."""
    spec = RunSpec(workers=4, steps=300)
    trace = simulate("sync", Cluster.parse("50ms + 10% exp:300ms", batch=256), spec)
    write_trace(with_norms(trace, 1000.0), "pilot.jsonl")
    result = call("plan", "--trace", "pilot.jsonl", "--json").json
    assert implied_noise_scale(result["plan"], batch=256) == pytest.approx(1000.0, rel=0.08)


# ---- wrong input ----

WRONG = {
    "a negative latency to plan with": ("plan --latency=-5ms", 2, "-5ms"),
    "a plan for zero workers": ("plan -w 0", 2, "workers"),
    "a plan for negative workers": ("plan -w -1", 2, "-1"),
    "zero samples in a plan": ("plan --batch 0", 2, "batch"),
    "a negative seed of a plan": ("plan --seed -1", 2, "seed"),
    "an invalid network in a plan": ("plan --network fast", 2, "fast"),
    "a fault of a missing worker in a plan": ("plan -w 3 --faults 'kill 3 at 1s'", 2, "kill 3"),
    "a plan figure of an unknown kind": ("plan --trace run.jsonl --plot x.xyz", 2, "x.xyz"),
    "a missing trace to plan from": ("plan --trace missing", 3, "missing"),
    "an empty trace to plan from": ("plan --trace empty", 3, "empty"),
    "a trace to plan from with only a header": ("plan --trace header", 3, "gradient"),
    "more workers than were recorded": ("plan --trace run.jsonl -w 9", 2, "recording"),
    "two sources for the updates": (
        "plan --noise-scale 3 --updates-table table",
        2,
        "--noise-scale",
    ),
    "a negative noise scale": ("plan --noise-scale -3", 2, "-3"),
    "a noise scale that is not a number": ("plan --noise-scale nan", 2, "nan"),
    "zero updates": ("plan --updates 0", 2, "--updates"),
    "negative updates": ("plan --updates -1", 2, "--updates"),
    "updates that are not a number": ("plan --updates nan", 2, "--updates"),
    "infinite updates": ("plan --updates inf", 2, "--updates"),
    "a missing table": ("plan --updates-table missing", 2, "missing"),
    "an empty table": ("plan --updates-table empty", 2, "empty"),
    "a table of words": ("plan --updates-table words", 2, "words:2"),
    "a table of garbage": ("plan --updates-table garbage", 2, "garbage"),
    "a table with N = 0": ("plan --updates-table zero", 2, "N must be >= 1"),
    "unknown rules to compare": ("plan --trace run.jsonl --policy nonsense", 2, "nonsense"),
    "impossible rules to compare": ("plan --trace run.jsonl --policy backup:3", 2, "b=3"),
}


@pytest.mark.usefixtures("files")
@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_input_gives_one_line_and_an_exit_code(
    wrong: str, call: Call, tmp_path: Path
) -> None:
    refuse_wrong_input(call, tmp_path, WRONG[wrong])
