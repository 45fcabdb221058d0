# SPDX-License-Identifier: BSD-3-Clause
"""The command line: what each verb prints, and that wrong input gives one line and an exit code."""

import json
import re
import resource
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from shlex import split
from types import ModuleType
from typing import NamedTuple

import msgspec
import numpy as np
import pytest

from paceline.cli import main
from paceline.errors import InternalError, PacelineError, PeerLost, ProtocolError
from paceline.sim.cluster import Cluster
from paceline.sim.simulate import simulate
from paceline.spec import RunSpec
from paceline.trace.reader import read_trace
from paceline.trace.schema import Gradient, Trace, Update, write_trace

SCRIPT = Path(sys.executable).parent / "paceline"

LATENCY = ("--latency", "50ms + 10% exp:300ms")
SMALL = ("--workers", "3", "--steps", "20", *LATENCY)
"""Options for a simulation that takes no time."""

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
    "sent_bytes_per_update",
    "vain_bytes_per_update",
    "by_worker",
    "pauses",
    "ended",
    "lost_updates",
    "restorations",
}


class Answer(NamedTuple):
    """The result of a call of the command line."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> object:
        return json.loads(self.out)

    @property
    def words(self) -> str:
        """Standard output in one line."""
        return " ".join(self.out.split())


Call = Callable[..., Answer]


@pytest.fixture
def call(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Call:
    """Return a function that calls the command line in a temporary folder."""
    monkeypatch.chdir(tmp_path)

    def call_it(*words: str) -> Answer:
        monkeypatch.setattr(sys, "argv", ["paceline", *words])
        with pytest.raises(SystemExit) as end:
            main()
        code = end.value.code or 0
        assert isinstance(code, int)
        return Answer(code, *capsys.readouterr())

    return call_it


def call_script(*words: str, **options: object) -> Answer:
    """Call the installed script in a subprocess."""
    done = subprocess.run([SCRIPT, *words], capture_output=True, text=True, check=False, **options)
    return Answer(done.returncode, done.stdout, done.stderr)


@pytest.fixture
def recorded(tmp_path: Path) -> Trace:
    """Write a trace to the file run.jsonl and return it."""
    spec = RunSpec(workers=3, steps=20, seed=2)
    trace = simulate("backup:1", Cluster.parse("50ms + 10% exp:300ms"), spec)
    write_trace(trace, tmp_path / "run.jsonl")
    return trace


def one_line(answer: Answer, code: int) -> str:
    """Check that the answer is one line of error, and return it."""
    assert answer.code == code
    assert answer.out == ""
    assert re.fullmatch(r"paceline: [^\n]+\n", answer.err), answer.err
    assert "Traceback" not in answer.err
    return answer.err


# ---- help ----

OPTIONS = {
    "simulate": "--policy --workers --latency --steps --until --replay --network --faults --late "
    "--batch --min-workers --seed --save --plot --json",
    "plan": "--workers --latency --trace --noise-scale --updates-table --updates --policies "
    "--network --faults --late --batch --seed --plot --json",
    "trace check": "--json",
}


@pytest.mark.parametrize("verb", OPTIONS)
def test_help_lists_the_options_of_a_verb(verb: str, call: Call) -> None:
    answer = call(*verb.split(), "--help")
    assert answer.code == 0
    mentioned = set(re.findall(r"--[a-z-]+", answer.out))
    assert mentioned >= {*OPTIONS[verb].split(), "--help"}


KINDS = PacelineError.__subclasses__()


@pytest.mark.parametrize("verb", ["", *OPTIONS])
def test_help_lists_the_exit_codes(verb: str, call: Call) -> None:
    _, _, codes = call(*verb.split(), "--help").words.partition("Exit codes: ")
    found = re.findall(r"\b\d+\b", codes)
    assert found == ["0", "1", "2", "3", "4", "5", "6", "70", "128", "130"]
    assert {str(kind.exit_code) for kind in KINDS} <= set(re.findall(r"\d+", codes))


def test_help_lists_the_verbs(call: Call) -> None:
    answer = call("--help")
    assert (answer.code, answer.err) == (0, "")
    for verb in ("simulate", "plan", "trace"):
        assert re.search(rf"^ +{verb} +[A-Z]", answer.out, re.MULTILINE)
    assert re.search(r"^ +check +[A-Z]", call("trace", "--help").out, re.MULTILINE)


@pytest.mark.parametrize("words", [(), ("trace",)], ids=str)
def test_call_without_a_verb_prints_help_and_fails(words: tuple[str, ...], call: Call) -> None:
    answer = call(*words)
    assert answer.code == 2
    assert "Usage: paceline" in answer.out + answer.err


def test_every_kind_of_error_has_its_own_exit_code() -> None:
    assert len({kind.exit_code for kind in (PacelineError, *KINDS)}) == 1 + len(KINDS)


# ---- simulate ----


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
    assert "sent/update" not in answer.out  # there is no network


def test_simulate_with_a_network_prints_the_traffic(call: Call) -> None:
    network = "model=100MB,bandwidth=1GB,delay=0.5ms"
    answer = call("simulate", *SMALL, "-p", "sync", "--network", network)
    assert "sent/update" in answer.out
    assert "600 MB" in answer.out  # there and back, for three workers


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


@pytest.mark.parametrize(
    "words",
    [("simulate", *SMALL, "--json"), ("simulate", *SMALL), ("plan", "-w", "20", *LATENCY)],
    ids=["json", "simulate", "plan"],
)
def test_the_same_seed_gives_the_same_output(words: tuple[str, ...], call: Call) -> None:
    first, again = call(*words, "--seed", "4"), call(*words, "--seed", "4")
    assert first.code == 0
    assert first == again
    assert call(*words, "--seed", "5").out != first.out


def test_simulate_draws_a_figure(call: Call) -> None:
    answer = call("simulate", *SMALL, "-p", "sync", "-p", "async", "--plot", "rules.png")
    assert (answer.code, answer.err) == (0, "")
    assert Path("rules.png").stat().st_size > 1000


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


# ---- traces ----

RULES = ["sync", "backup:1", "batchsync:4", "deadline", "async", "softsync:2", "ssp:1", "delayed:1"]


@pytest.mark.parametrize("rule", RULES)
def test_saved_trace_is_consistent(rule: str, call: Call) -> None:
    assert call("simulate", *SMALL, "-p", rule, "--save", "run.jsonl").code == 0
    answer = call("trace", "check", "run.jsonl")
    assert (answer.code, answer.err) == (0, "")
    assert f"run.jsonl is consistent: sim of {rule}, 3 workers, 20 updates in " in answer.words
    assert " accepted" in answer.out


def test_trace_check_json_equals_the_summary_of_simulate(call: Call) -> None:
    result = call("simulate", *SMALL, "-p", "backup:1", "--save", "run.jsonl", "--json")
    assert call("trace", "check", "run.jsonl", "--json").json == result.json[0]


@pytest.mark.usefixtures("recorded")
def test_truncated_trace_is_refused_with_its_line(call: Call) -> None:
    whole = Path("run.jsonl").read_bytes()
    Path("run.jsonl").write_bytes(whole[:-10])
    last = len(whole.splitlines())
    assert f"run.jsonl:{last}:" in one_line(call("trace", "check", "run.jsonl"), 3)


def test_inconsistent_trace_is_refused_with_its_line(recorded: Trace, call: Call) -> None:
    index = next(i for i, r in enumerate(recorded.records) if isinstance(r, Update))
    recorded.records[index] = msgspec.structs.replace(recorded.records[index], wanted=3)
    write_trace(recorded, "run.jsonl")
    assert f"run.jsonl:{index + 2}:" in one_line(call("trace", "check", "run.jsonl"), 3)


def test_trace_with_a_negative_computation_time_is_refused(recorded: Trace, call: Call) -> None:
    index = next(i for i, r in enumerate(recorded.records) if isinstance(r, Gradient))
    recorded.records[index] = msgspec.structs.replace(recorded.records[index], compute_s=-1.0)
    write_trace(recorded, "run.jsonl")
    assert f"run.jsonl:{index + 2}:" in one_line(call("trace", "check", "run.jsonl"), 3)


# ---- what if ----


@pytest.mark.parametrize("latency", ["50ms", "50ms + 10% exp:300ms", "exp:20ms; worker 1 x3"])
def test_sync_run_replayed_under_sync_takes_exactly_the_same_time(latency: str, call: Call) -> None:
    words = ("simulate", "-p", "sync", "--json", "--steps", "40")
    result = call(*words, "-w", "4", "-l", latency, "--save", "run.jsonl", "--seed", "6").json
    replayed = call(*words, "--replay", "run.jsonl").json
    assert replayed[0]["seconds"] == result[0]["seconds"]
    assert replayed == result


def test_replay_of_a_sync_run_uses_only_recorded_times(call: Call) -> None:
    call("simulate", *SMALL, "-p", "sync", "--save", "run.jsonl")
    answer = call("simulate", "-p", "backup:1", "--steps", "20", "--replay", "run.jsonl")
    assert answer.code == 0
    assert "all 60 computation times are as recorded" in answer.words


def test_replay_says_how_many_times_were_cut_short(recorded: Trace, call: Call) -> None:
    cut = sum(g.fate == "cancelled" for g in recorded.gradients())
    total = sum(1 for _ in recorded.gradients())
    answer = call("simulate", "-p", "sync", "--steps", "20", "--replay", "run.jsonl")
    assert answer.code == 0
    assert f"{cut} of {total} computation times were cut short" in answer.words
    assert "cut short by cancellation" in answer.words


@pytest.mark.usefixtures("recorded")
def test_latency_can_be_a_recorded_run(call: Call) -> None:
    words = ("simulate", "-w", "3", "--steps", "9", "-p", "sync", "--latency", "trace:run.jsonl")
    assert call(*words).code == 0


@pytest.mark.usefixtures("recorded")
@pytest.mark.parametrize(
    "words",
    [
        ("plan", "--trace"),
        ("simulate", "-p", "sync", "--steps", "9", "--replay"),
        ("simulate", "-w", "3", "-p", "sync", "--steps", "9", "--latency"),
    ],
    ids=["plan", "replay", "latency"],
)
def test_run_folder_can_be_given_instead_of_its_trace(words: tuple[str, ...], call: Call) -> None:
    folder = Path("a run")
    folder.mkdir()
    Path("run.jsonl").rename(folder / "trace.jsonl")
    prefix = "trace:" if words[-1] == "--latency" else ""
    answers = [call(*words, f"{prefix}{path}") for path in (folder, folder / "trace.jsonl")]
    assert [answer.code for answer in answers] == [0, 0]
    assert answers[0].out == answers[1].out
    (folder / "trace.jsonl").unlink()
    assert "cannot read a run/trace.jsonl" in one_line(call(*words, f"{prefix}{folder}"), 3)


# ---- plan ----

PLAN = ("plan", "--trace", "run.jsonl")
"""A plan for the three workers of `recorded`, which takes no time."""


@pytest.mark.usefixtures("recorded")
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


@pytest.mark.usefixtures("recorded")
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
    assert result["sentence"].startswith("Use ")
    assert result["policies"] == []


@pytest.mark.usefixtures("recorded")
def test_plan_compares_other_rules(call: Call) -> None:
    answer = call(*PLAN, "--policies", "sync,backup,softsync:4,lr=constant,async", "--json")
    best = answer.json["plan"]["best"]
    assert [each["policy"] for each in answer.json["policies"]] == [
        "sync",
        f"backup:{best['machines'] - best['needed']}",
        "softsync:4,lr=constant",
        "async",
    ]
    shown = call(*PLAN, "--policies", "sync,async")
    assert "throughput" in shown.out
    assert "Warning: throughput is not convergence" in shown.words


@pytest.mark.usefixtures("recorded")
def test_plan_draws_a_figure(call: Call) -> None:
    assert call(*PLAN, "--plot", "plan.svg").code == 0
    assert Path("plan.svg").stat().st_size > 1000


@pytest.mark.usefixtures("recorded")
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


@pytest.mark.usefixtures("recorded")
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


def test_plan_works_without_a_trace(call: Call) -> None:
    answer = call("plan", "--workers", "20", "--updates", "500", *LATENCY, "--json")
    assert answer.code == 0
    assert len(answer.json["plan"]["options"]) == 20
    assert answer.json["plan"]["options"][-1]["updates"] == 500
    assert answer.json["plan"]["gain"] > 1


@pytest.mark.usefixtures("recorded")
def test_plan_from_a_trace_says_what_was_estimated(call: Call) -> None:
    answer = call("plan", "--trace", "run.jsonl")
    assert answer.code == 0
    assert "3 workers" in answer.out
    assert "cut short by cancellation" in answer.words
    assert "every gradient counts the same" in answer.words  # no norms were recorded


# ---- wrong input ----

WRONG = {
    "a negative latency": ("simulate --latency=-5ms", 2, "-5ms"),
    "a negative mean": ("simulate -l exp:-5ms", 2, "-5ms"),
    "an invalid latency": ("simulate -l soon", 2, "soon"),
    "an unknown distribution": ("simulate -l cauchy:1s", 2, "cauchy"),
    "an empty latency": ("simulate -l ''", 2, "time"),
    "an infinite latency": ("simulate -l inf", 2, "inf"),
    "a negative latency to plan with": ("plan --latency=-5ms", 2, "-5ms"),
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
    "a plan for zero workers": ("plan -w 0", 2, "workers"),
    "a plan for negative workers": ("plan -w -1", 2, "-1"),
    "zero samples": ("simulate --batch 0", 2, "batch"),
    "zero samples in a plan": ("plan --batch 0", 2, "batch"),
    "more required workers than there are": ("simulate -w 3 --min-workers 4", 2, "min_workers"),
    "a negative seed": ("simulate --seed -1", 2, "seed"),
    "a negative seed of a plan": ("plan --seed -1", 2, "seed"),
    "a negative stop time": ("simulate --until=-3s", 2, "-3s"),
    "an invalid stop time": ("simulate --until soon", 2, "soon"),
    "an invalid network": ("simulate --network fast", 2, "fast"),
    "a network without bandwidth": ("simulate --network model=1MB", 2, "bandwidth"),
    "a negative delay": ("simulate --network model=1,bandwidth=1,delay=-1s", 2, "-1s"),
    "an invalid network in a plan": ("plan --network fast", 2, "fast"),
    "an invalid fault": ("simulate --faults 'eat 3'", 2, "eat 3"),
    "a fault of a missing worker": ("simulate -w 3 --faults 'kill 3 at 1s'", 2, "kill 3"),
    "a fault of a missing worker in a plan": ("plan -w 3 --faults 'kill 3 at 1s'", 2, "kill 3"),
    "a fault before the start": ("simulate --faults 'kill 0 at -1s'", 2, "-1s"),
    "a trace of several rules": ("simulate --save x.jsonl -p sync -p async", 2, "--save"),
    "a trace of all default rules": ("simulate --save x.jsonl", 2, "--save"),
    "a trace in a missing folder": ("simulate -p sync --save no/x.jsonl", 3, "no/x.jsonl"),
    "a trace in a file": ("simulate -p sync --save empty/x.jsonl", 3, "empty/x.jsonl"),
    "a trace that is a directory": ("simulate -p sync --save .", 3, "cannot write ."),
    "a figure of an unknown kind": ("simulate -p sync --plot x.xyz", 2, "x.xyz"),
    "a figure without an extension": ("simulate -p sync --plot figure", 2, "figure"),
    "a figure in a missing directory": ("simulate -p sync --plot no/x.png", 2, "no/x.png"),
    "a plan figure of an unknown kind": ("plan --trace run.jsonl --plot x.xyz", 2, "x.xyz"),
    "a missing trace to check": ("trace check missing", 3, "missing"),
    "an empty trace to check": ("trace check empty", 3, "empty"),
    "a directory to check": ("trace check .", 3, "directory"),
    "text instead of a trace to check": ("trace check words", 3, "words:1"),
    "binary garbage to check": ("trace check garbage", 3, "garbage:1"),
    "a trace to check with only a header": ("trace check header", 3, "header"),
    "a missing trace to replay": ("simulate --replay missing", 3, "missing"),
    "an empty trace to replay": ("simulate --replay empty", 3, "empty"),
    "text instead of a trace to replay": ("simulate --replay words", 3, "words:1"),
    "a trace to replay with only a header": ("simulate --replay header", 3, "gradient"),
    "a missing trace as latency": ("simulate -l trace:missing", 3, "missing"),
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
    "unknown rules to compare": ("plan --trace run.jsonl --policies nonsense", 2, "nonsense"),
    "impossible rules to compare": ("plan --trace run.jsonl --policies backup:3", 2, "b=3"),
}


@pytest.fixture
def files(tmp_path: Path, recorded: Trace) -> None:
    """Create files of all kinds, most of them invalid."""
    (tmp_path / "empty").touch()
    (tmp_path / "words").write_text("one thing\nand another\n")
    (tmp_path / "garbage").write_bytes(bytes(range(128, 256)) * 4)
    (tmp_path / "header").write_bytes(msgspec.json.encode(recorded.header) + b"\n")
    (tmp_path / "table").write_text("1,900\n2,500\n")
    (tmp_path / "zero").write_text("0,900\n2,500\n")


@pytest.mark.usefixtures("files")
@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_input_gives_one_line_and_an_exit_code(
    wrong: str, call: Call, tmp_path: Path
) -> None:
    before = sorted(tmp_path.iterdir())
    words, code, named = WRONG[wrong]
    assert named in one_line(call(*split(words)), code)
    assert sorted(tmp_path.iterdir()) == before  # nothing was written


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["simulate", "--late", "never"], "--late"),
        (["simulate", "--steps", "many"], "--steps"),
        (["simulate", "--colour", "red"], "--colour"),
        (["plan", "--workers", "2.5"], "--workers"),
        (["plan", "surplus"], "surplus"),
        (["trace", "check"], "file"),
        (["trace", "eat"], "eat"),
        (["dance"], "dance"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else value,
)
def test_unknown_word_gives_a_usage_line(words: list[str], named: str, call: Call) -> None:
    answer = call(*words)
    assert answer.code == 2
    assert answer.out == ""
    assert answer.err.startswith("Usage: paceline")
    assert named in answer.err.lower().splitlines()[-1]


def test_plan_with_zero_computation_time_works_or_is_refused(call: Call) -> None:
    answer = call("plan", "--workers", "20", "--latency", "0ms")
    if answer.code != 0:
        one_line(answer, 2)


# ---- how it ends ----


def module(verb: str) -> ModuleType:
    """Import the module of a verb; in `paceline.cli` its name means the function until then."""
    return import_module(f"paceline.cli.{verb}")


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ProtocolError("it broke a rule"), 4),
        (PeerLost("it went away"), 5),
        (InternalError("our fault"), 70),
    ],
    ids=["protocol", "peer", "internal"],
)
def test_error_exits_with_its_code(
    error: Exception, code: int, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(options: object) -> None:
        raise error

    monkeypatch.setattr(module("simulate"), "run", fail)
    assert str(error) in one_line(call("simulate"), code)


def test_interrupt_exits_with_130(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(module("simulate"), "run", interrupt)
    answer = call("simulate")
    assert answer.code == 130
    assert answer.out == ""
    assert "Traceback" not in answer.err


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["--help"], 0),
        (["simulate", "--steps", "0"], 2),
        (["trace", "check", "/nowhere/run.jsonl"], 3),
    ],
    ids=["help", "wrong input", "missing trace"],
)
def test_installed_script_exits_with_the_code(words: list[str], code: int) -> None:
    answer = call_script(*words)
    assert answer.code == code
    assert len(answer.err.splitlines()) == (code > 0)


# ---- progress bars ----


def test_progress_is_shown_on_standard_error_after_a_while(
    call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module("show"), "SHOW_AFTER_S", 0.0)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    answer = call("simulate", *SMALL, "-p", "sync", "--json")
    assert "simulating sync" in answer.err
    assert answer.json[0]["policy"] == "sync"
    answer = call("plan", "-w", "20", *LATENCY, "--json")
    assert "planning" in answer.err
    assert answer.json["sentence"].startswith("Use ")


def test_progress_is_silent_without_a_terminal(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    """Standard error isn't a terminal here, as in a job whose output goes to a file."""
    monkeypatch.setattr(module("show"), "SHOW_AFTER_S", 0.0)
    assert call("simulate", *SMALL, "-p", "sync").err == ""


def test_trace_of_a_long_run_is_read_in_full(call: Call) -> None:
    call("simulate", "-w", "5", "--steps", "400", *LATENCY, "-p", "sync", "--save", "run.jsonl")
    trace = read_trace("run.jsonl")
    assert sum(1 for _ in trace.updates()) == 400
    assert sum(1 for _ in trace.gradients()) == 2000
