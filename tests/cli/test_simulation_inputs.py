# SPDX-License-Identifier: BSD-3-Clause
"""The cluster and the spec that `simulate` and `plan` read from options and traces."""

from pathlib import Path

import msgspec
import pytest

from cli_fixtures import Call, one_line
from paceline.cli.simulation_inputs import DEFAULT_BATCH, batch_of, read_inputs
from paceline.cli.verb_options import PlanOptions, SimulateOptions
from paceline.sim.cluster import Cluster
from paceline.sim.simulate import simulate
from paceline.spec import RunSpec
from paceline.trace.schema import Trace, write_trace


@pytest.mark.usefixtures("recorded")
def test_latency_can_be_a_recorded_run(call: Call) -> None:
    words = ("simulate", "-w", "3", "--steps", "9", "-p", "sync", "--latency", "trace:run.jsonl")
    assert call(*words).code == 0


@pytest.mark.usefixtures("recorded")
@pytest.mark.parametrize(
    "words",
    [
        ("plan", "--trace"),
        ("simulate", "-p", "sync", "--steps", "9", "--trace"),
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


def test_defaults_are_four_workers_with_rare_long_delays() -> None:
    inputs = read_inputs(SimulateOptions(), None, in_order=True)
    assert inputs.spec.workers == 4
    assert inputs.cluster == Cluster.parse("50ms + 5% exp:500ms", batch=DEFAULT_BATCH)
    assert (inputs.trace, inputs.recording) == (None, None)


def test_trace_gives_the_number_of_workers_and_their_times(recorded: Trace, tmp_path: Path) -> None:
    inputs = read_inputs(PlanOptions(), tmp_path / "run.jsonl", in_order=False)
    assert inputs.spec.workers == recorded.header.workers
    assert inputs.trace == recorded
    assert inputs.recording is not None
    assert sorted(inputs.recording.times) == [0, 1, 2]


def test_trace_gives_the_late_work_and_the_batch_unless_they_are_given(tmp_path: Path) -> None:
    spec = RunSpec(workers=3, steps=40, late="finish")
    trace = simulate("backup:1", Cluster.parse("50ms + exp:5ms", batch=7), spec)
    write_trace(trace, tmp_path / "run.jsonl")
    for options, in_order in ((SimulateOptions, True), (PlanOptions, False)):
        inputs = read_inputs(options(), tmp_path / "run.jsonl", in_order=in_order)
        assert (inputs.spec.late, inputs.cluster.batch) == ("finish", 7)
        given = options(late="cancel", batch=8)
        inputs = read_inputs(given, tmp_path / "run.jsonl", in_order=in_order)
        assert (inputs.spec.late, inputs.cluster.batch) == ("cancel", 8)


@pytest.mark.usefixtures("recorded")
def test_latency_and_a_trace_exclude_each_other(call: Call) -> None:
    answer = call("plan", "--trace", "run.jsonl", "--latency", "5ms")
    assert "give --latency or --trace, not both" in one_line(answer, 2)


@pytest.mark.parametrize(
    ("samples", "batch"), [([], DEFAULT_BATCH), ([0, 0], DEFAULT_BATCH), ([8, 0, 16], 12)], ids=str
)
def test_batch_is_the_mean_of_the_gradients_that_have_samples(
    samples: list[int], batch: int, recorded: Trace
) -> None:
    gradient = next(recorded.gradients())
    records = [msgspec.structs.replace(gradient, samples=count) for count in samples]
    assert batch_of(Trace(recorded.header, records)) == batch
