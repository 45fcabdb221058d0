# SPDX-License-Identifier: BSD-3-Clause
"""The server's last line, the trace and the report of a real run agree."""

import re

import pytest

from failures import TRAINING, troubled
from paceline.trace.reader import read_trace
from paceline.trace.schema import Restored
from paceline.watch.report import report
from paceline.watch.summary import summarize
from paceline.watch.waiting import waited_for

QUIET = "def trouble(run): pass\n"

EARLY = (
    TRAINING
    + """
before_it_is_prepared = None
run = paceline.join()
is_resumed = (OUT / "weights.pt").exists()
model, optimizer = run.prepare(model, optimizer)
while not run.finished and (is_resumed or run.version < 2):
    optimizer.zero_grad()
    loss_of(run.worker, run.version).backward()
    optimizer.step()
"""
)


def assert_server_agrees(out, trace):
    """Check that the server's last line has the numbers of the summary."""
    [(updates, samples, seconds)] = re.findall(
        r"^server    \| (\d+)(?: of \d+)? updates of (\d+) samples in ([\d.]+) s$",
        out,
        re.MULTILINE,
    )
    summary = summarize(trace)
    assert (int(updates), int(samples)) == (summary.updates, summary.samples)
    assert seconds == f"{summary.seconds:.1f}"


def resumed(trace):
    return [record.resumed for record in trace.records if isinstance(record, Restored)]


@pytest.fixture
def stopped(call, script, tmp_path):
    """Return the output of a run that made two of four updates, in the folder `run`."""
    path = script(EARLY)
    code, out, err = call("run", "-w", 1, "--steps", 4, "--out", "run", path, tmp_path / "run")
    assert code == 0, err
    return out


def test_short_run_reports_no_more_waiting_than_it_took(launch):
    """Workers leave after the end, which takes longer than three updates."""
    ran = launch(troubled(QUIET), workers=3, steps=3)
    assert sum(waited_for(ran.trace).values()) <= summarize(ran.trace).seconds
    assert_server_agrees(ran.out, ran.trace)


def test_output_and_report_agree_after_a_killed_server(launch):
    trouble = """
def trouble(run):
    if run.worker == 0 and run.version == 6 and not was_told("killed"):
        wait_until(lambda: in_the_trace(type="update", update=6))
        tell("killed")
        os.kill(server_pid(), signal.SIGKILL)
"""
    ran = launch(troubled(trouble), steps=8, restart=True, checkpoint_every="2")
    assert ran.code == 0, ran.err
    assert resumed(ran.trace) == [False]
    assert_server_agrees(ran.out, ran.trace)
    lines = report(ran.trace)
    assert lines[0].endswith("; finished.")
    assert any(line.startswith("The server was restored once (") for line in lines)
    assert not any("resumed" in line for line in lines)


def test_output_and_report_agree_on_a_failed_update(launch):
    breaks = """
class Breaks(torch.optim.SGD):
    steps = 0

    def step(self, closure=None):
        self.steps += 1
        if self.steps == 3:
            raise ValueError("out of luck")
        return super().step(closure)

optimizer = Breaks(model.parameters(), lr=0.1)
"""
    ran = launch(troubled(breaks + QUIET), steps=8)
    assert ran.code == 1
    assert_server_agrees(ran.out, ran.trace)
    where = "; failed at update 3 of 8: update 3 failed: ValueError('out of luck')."
    assert report(ran.trace)[0].endswith(where)


def test_output_and_report_agree_after_a_resume(stopped, call, tmp_path):
    words = " ".join(stopped.split())
    assert "; stopped at update 2 of 4: the script of worker 0 had ended." in words
    assert "finished" not in words
    code, out, err = call("run", "--resume", "run")
    assert code == 0, err
    trace = read_trace(tmp_path / "run" / "trace.jsonl")
    assert resumed(trace) == [True]
    assert_server_agrees(out, trace)
    words = " ".join(out.split())
    assert "; finished. The run was resumed once, after " in words
    assert "restored" not in words


def test_resume_that_never_began_prints_no_report(stopped, call, tmp_path):
    assert "sync with 1 worker: 2 updates" in stopped
    path = tmp_path / "script.py"
    source = path.read_text()
    path.write_text(source.replace("before_it_is_prepared = None", "raise SystemExit(9)"))
    code, out, _ = call("run", "--resume", "run")
    assert (code, out) == (1, "")
    path.write_text(source.replace("is_resumed =", "model.extra = nn.Linear(1, 1)\nis_resumed ="))
    code, out, _ = call("run", "--resume", "run")
    assert code == 6
    assert "2 updates" not in out
