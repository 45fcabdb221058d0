# SPDX-License-Identifier: BSD-3-Clause
"""`paceline compare`: several rules on real processes."""

import os
import re
from contextlib import nullcontext
from importlib import import_module

import pytest

from gapped import with_gap
from paceline.sim.cluster import Cluster
from paceline.sim.simulate import simulate
from paceline.spec import RunSpec
from paceline.trace.reader import read_trace
from paceline.watch.audit import audit
from paceline.watch.summary import summarize

compare = import_module("paceline.cli.compare")  # the module, not the verb of the same name

SOURCE = """
data = torch.utils.data.TensorDataset(torch.randn(64, 4))
loader = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True)
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
run = paceline.join()
model, optimizer, loader = run.prepare(model, optimizer, loader)
while not run.finished:
    for (x,) in loader:
        optimizer.zero_grad()
        loss = (model(x) - 1).square().mean()
        loss.backward()
        run.log(loss=loss.item())
        optimizer.step()
"""

# A script doesn't know its rule, but under async an update has one contributor.
UNDER_ASYNC = "        if run.last is not None and run.last.contributors == 1:\n            "


@pytest.fixture
def compared(call, script, forkserver, monkeypatch):
    """Return a function that compares rules on a script."""
    monkeypatch.setattr(compare, "ForkServer", lambda _: nullcontext(forkserver))

    def call_it(*words, source=SOURCE):
        path = script(source)
        return call("compare", *words, path, path.parent)

    return call_it


def table(out):
    """Return the header and the rows of the printed table."""
    lines = out[out.index("rule ") :].partition("\n\n")[0].splitlines()
    return [re.split(r"  +", line.strip()) for line in lines]


def test_each_rule_has_a_row_a_folder_and_a_section_of_the_report(compared, tmp_path):
    out_dir = tmp_path / "out"
    words = ("-w", 2, "--epochs", 2, "--latency", "2ms", "--target", "loss<=1e9", "--out", out_dir)
    code, out, err = compared(
        *words, "-p", "sync", "-p", "backup:1", "-p", "softsync:2,lr=constant"
    )
    assert code == 0, err
    header, *rows = re.findall(r"^(?:rule|sync|backup|softsync).*$", out, re.MULTILINE)
    columns = "rule updates/s staleness dropped step predicted off by to loss <= 1e+09 final loss"
    assert " ".join(header.split()) == columns
    assert [row.split()[0] for row in rows] == ["sync", "backup:1", "softsync:2,lr=constant"]
    for folder in ("sync", "backup-1", "softsync-2,lr=constant"):
        audit(read_trace(out_dir / folder / "trace.jsonl"))
    report = (out_dir / "report.md").read_text()
    assert all(row.rstrip() in report for row in rows)
    assert "## backup:1\n" in report
    for figure in ("rules.png", "loss.png"):
        assert (out_dir / figure).stat().st_size > 5000
        assert f"({figure})" in report


def test_nothing_is_predicted_without_injected_delays(compared):
    code, out, _ = compared("-w", 2, "--steps", 3, "-p", "sync")
    assert code == 0
    assert "predicted" not in out
    assert "runs/compare-script-1" in out


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["--target", "accuracy"], "a target must look like"),
        (["-p", "sync", "-p", "sync"], "each rule may be given once, got sync, sync"),
        (["-p", "magic"], "magic"),
        (
            ["-w", "2", "-p", "sync", "-p", "backup:2"],
            "backup:2 is not possible: b must be smaller",
        ),
    ],
)
def test_wrong_input_is_refused_before_anything_runs(call, script, words, what, tmp_path):
    path = script(SOURCE)
    code, out, err = call("compare", *words, path)
    assert (code, out) == (2, "")
    assert what in err
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("workers", "rules"),
    [
        (1, ["sync", "async"]),
        (2, ["sync", "backup:1", "async"]),
        (4, ["sync", "backup:1", "backup:2", "softsync:2", "async"]),
    ],
)
def test_default_rules_depend_on_the_number_of_workers(compared, workers, rules):
    code, out, err = compared("-w", workers, "--samples", 8)
    assert code == 0, err
    assert [row[0] for row in table(out)] == ["rule", *rules]


def test_target_that_is_never_logged_is_reported_immediately_and_at_the_end(compared, tmp_path):
    words = ("-w", 2, "--samples", 16, "-p", "sync", "-p", "async", "--out", tmp_path / "out")
    code, out, err = compared(*words, "--target", "acc>=0.9")
    assert code == 2, err
    message = "The script never logged acc, so the target can't be reached; it logged loss."
    lines = [line for line in err.splitlines() if not line.startswith("worker")]
    lines[-1], left = lines[-1].split("; ")
    assert lines == ["sync, 1 of 2", message, "async, 2 of 2"]
    assert re.fullmatch(r"about [\d.]+ m?s left in all", left)
    assert message in out.splitlines()
    assert message in (tmp_path / "out" / "report.md").read_text().splitlines()
    assert [row[-2:] for row in table(out)[1:]] == [["not logged", "-"]] * 2


def test_different_numbers_of_samples_give_a_warning(compared):
    words = ("-w", 2, "-p", "sync", "-p", "async")
    _, out, _ = compared(*words, "--steps", 6)
    assert [row[:3:2] for row in table(out)] == [
        ["rule", "samples"],
        ["sync", "48"],
        ["async", "24"],
    ]
    assert "different numbers of samples" in out
    assert "use --samples or --epochs instead of --steps" in out
    _, out, _ = compared(*words, "--samples", 48)
    assert "samples" not in table(out)[0]
    assert "different numbers" not in out


def test_rule_without_a_prediction_keeps_the_columns(compared):
    """Under sync there is only one update, so no time between updates."""
    words = ("-w", 2, "-p", "sync", "-p", "async", "--latency", "exp:2ms", "--target", "loss<=1e9")
    code, out, err = compared(*words, "--samples", 8)
    assert code == 0, err
    header, sync, asynchronous = table(out)
    assert len(header) == len(sync) == len(asynchronous)
    at = header.index("predicted")
    assert sync[at : at + 2] == ["-", "-"]
    assert "-" not in asynchronous


def test_logged_name_with_a_slash_gets_a_figure(compared, tmp_path):
    source = SOURCE.replace("loss=loss.item()", "**{'train/loss': loss.item()}")
    words = ("-w", 1, "--steps", 2, "-p", "sync", "--out", tmp_path / "out")
    code, out, err = compared(*words, source=source)
    assert code == 0, err
    assert "rules.png, train-loss.png" in out
    assert (tmp_path / "out" / "train-loss.png").exists()


# ---- failures ----


def test_script_without_updates_ends_the_comparison(compared, tmp_path):
    words = ("-w", 2, "-p", "sync", "-p", "async", "--out", "out")
    code, out, err = compared(*words, source="raise OSError")
    assert (code, out) == (1, "")
    *_, failed, ends = err.splitlines()
    assert failed == "sync failed; see out/sync."
    assert ends == "The comparison stops here without async."
    assert not (tmp_path / "out" / "async").exists()


def test_failing_rule_is_left_out_and_the_others_are_compared(compared):
    source = SOURCE + UNDER_ASYNC + "raise OSError('no luck')\n"
    words = ("-w", 2, "--samples", 32, "-p", "async", "-p", "sync", "--out", "out")
    code, out, err = compared(*words, source=source)
    assert code == 1
    assert [row[0] for row in table(out)] == ["rule", "sync"]
    message = "async failed; see out/async."
    assert message in out.splitlines()
    assert message in err.splitlines()


def test_stopped_comparison_shows_the_completed_rules(compared, tmp_path):
    source = f"import os, signal\nto_stop = [{os.getpid()}]\n" + SOURCE + UNDER_ASYNC
    source += "while run.is_first and to_stop: os.kill(to_stop.pop(), signal.SIGINT)\n"
    words = ("-w", 2, "--samples", 400, "--out", "out")
    rules = ("-p", "sync", "-p", "async", "-p", "backup:1", "-p", "ssp:2")
    code, out, err = compared(*words, *rules, source=source)
    assert code == 130
    assert [row[0] for row in table(out)] == ["rule", "sync"]
    assert "async was stopped; see out/async.\n" in out
    assert "The comparison stops here without backup:1 and ssp:2.\n" in out
    assert "failed" not in out + err
    assert not (tmp_path / "out" / "backup-1").exists()


def test_interrupt_between_two_runs_stops_the_comparison(compared, monkeypatch):
    read = compare.read_trace

    def interrupted(path):
        if path.parent.name == "async":
            raise KeyboardInterrupt
        return read(path)

    monkeypatch.setattr(compare, "read_trace", interrupted)
    code, out, _ = compared("-w", 2, "--samples", 16, "-p", "sync", "-p", "async")
    assert code == 130
    assert [row[0] for row in table(out)] == ["rule", "sync"]
    assert "async was stopped" in out


def test_gap_in_a_trace_does_not_count_as_a_long_update():
    trace = simulate("sync", Cluster.parse("50ms"), RunSpec(workers=2, steps=40))
    assert compare.step_s(trace) == pytest.approx(0.05)
    assert compare.step_s(with_gap(trace, 10, 30)) == pytest.approx(0.05)


def test_times_that_gaps_hide_are_left_out_of_the_table(tmp_path):
    trace = simulate("sync", Cluster.parse("50ms"), RunSpec(workers=2, steps=40))
    trace = with_gap(trace, 0, 39)
    step_s = compare.step_s(trace)
    assert step_s is None
    result = compare.Result(tmp_path, trace, summarize(trace), step_s, 0.05)
    columns, [row] = compare._table([result], None)
    assert dict(zip(columns, row, strict=True)) == {
        "rule": "sync",
        "updates/s": "-",
        "staleness": "0.00",
        "dropped": "0 %",
        "step": "-",
    }
