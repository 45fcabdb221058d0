# SPDX-License-Identifier: BSD-3-Clause
"""`paceline run`: its first line, and hints about its options."""

from pathlib import Path

import pytest
import torch

from cli_fixtures import one_line
from failures import LOOP, TRAINING

pytestmark = pytest.mark.usefixtures("shared_forkserver")

QUIET = "def trouble(run): pass\n"


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (("-w", 1), "training script.py with 1 worker under sync; folder run"),
        (
            ("-w", 2, "-p", "backup:1"),
            "training script.py with 2 workers under backup:1; folder run",
        ),
        (
            ("-w", 1, "--latency", "0.002"),
            "training script.py with 1 worker under sync, at least 2ms per gradient; folder run",
        ),
    ],
)
def test_first_line_says_what_is_run(call, script, options, line):
    script(TRAINING + QUIET + LOOP)
    words = ("--steps", 2, "--out", "run", "script.py", ".")
    code, _, err = call("run", *options, *words)
    assert code == 0, err
    assert err.splitlines()[0] == line


@pytest.mark.parametrize(
    ("given", "to_script", "hint"),
    [
        (["-w", 1], ["--lr", "0.1"], ""),
        (["-w", 1], ["--seed=4", "--latency", "1s", "--seed", "3"], "--seed and --latency"),
        (
            ["-w", 1],
            ["--workers", "8"],
            "",
        ),  # -w was given before the script
        (["-w", 1], ["-p", "--no-restart"], "-p and --no-restart"),
    ],
)
def test_our_options_after_the_script_get_a_hint(call, script, given, to_script, hint):
    path = script(TRAINING + QUIET + LOOP + "print(sys.argv[2:])")
    code, out, err = call("run", *given, "--steps", 2, path, ".", *to_script)
    assert code == 0, err
    assert f"worker 0  | {to_script}" in out.splitlines()
    expected = (
        f"note: everything after the script is passed to it, including {hint}; put options for "
        "paceline before the script"
    )
    assert err.splitlines().count(expected) == bool(hint)


# ---- a run that has already finished ----


@pytest.fixture
def finish(call, script):
    """Return a function that runs to the end, and then moves the weights away."""

    def run(*options):
        script(TRAINING + QUIET + LOOP)
        words = ("--steps", 2, "--out", "run", *options, "script.py", ".")
        code, _, err = call("run", "-w", 1, *words)
        assert code == 0, err
        return Path("run/trace.jsonl").read_bytes()

    return run


def test_weights_that_were_moved_are_written_again(call, finish):
    finish()
    before = torch.load("run/weights.pt")
    Path("run/weights.pt").rename("moved.pt")
    code, _, err = call("run", "--resume", "run")
    assert code == 0, err
    after = torch.load("run/weights.pt")
    assert all(torch.equal(after[name], before[name]) for name in before)


def test_finished_run_without_weights_and_checkpoint_is_not_trained_again(call, finish):
    trace = finish("--checkpoint-every", 0)
    Path("run/weights.pt").rename("moved.pt")
    for words in ((), ("script.py", ".")):
        assert one_line(call("run", "--resume", "run", *words), 2) == (
            "paceline: the run in run has finished after 2 updates, but its weights.pt is missing, "
            "and there is no checkpoint to write it from; start a new run\n"
        )
    assert Path("run/trace.jsonl").read_bytes() == trace
    assert not Path("run/weights.pt").exists()


def test_finished_run_without_checkpoint_keeps_its_weights(call, finish):
    """Even if the script is named: there is nothing that it could continue."""
    trace = finish("--checkpoint-every", 0)
    code, _, err = call("run", "--resume", "run", "script.py", ".")
    assert code == 0
    assert err.startswith("The run in run has already finished after 2 updates. To train longer: ")
    assert Path("run/trace.jsonl").read_bytes() == trace


# ---- the exit code ----


@pytest.mark.parametrize(("end", "code"), [("", 0), ("raise SystemExit(9)", 1)])
def test_report_that_fails_does_not_change_the_exit_code(call, script, monkeypatch, end, code):
    def fail(*_):
        raise ZeroDivisionError("no time")

    monkeypatch.setattr("paceline.cli.end_of_run.report", fail)
    script(TRAINING + QUIET + LOOP + end)
    found, out, err = call("run", "-w", 1, "--steps", 2, "--out", "run", "script.py", ".")
    assert found == code
    assert "No report, because of a bug in Paceline: ZeroDivisionError('no time')." in out
    assert "Traceback" in err
    assert "Trace: run/trace.jsonl" in err.splitlines()


def test_tls_without_tcp_is_refused(call, script):
    script(TRAINING + QUIET + LOOP)
    words = ("--tls-cert", "c.pem", "--tls-key", "k.pem", "script.py", ".")
    assert "TLS needs --transport tcp" in one_line(call("run", *words), 2)


def test_tls_files_are_checked_before_anything_runs(call, script):
    script(TRAINING + QUIET + LOOP)
    words = ("--transport", "tcp", "--tls-cert", "c.pem", "--tls-key", "k.pem", "script.py", ".")
    path = Path.cwd() / "c.pem"
    assert f"cannot read the TLS file {path}: No such file" in one_line(call("run", *words), 2)
