# SPDX-License-Identifier: BSD-3-Clause
"""A rule that a user has written trains, survives a killed server and a resume, and is audited."""

import os
import re
import signal
import subprocess
from contextlib import suppress
from pathlib import Path
from textwrap import dedent

import pytest

from paceline.trace.reader import read_trace
from paceline.trace.schema import Restored, Trace
from sandbox import PACELINE, SCRIPT, children_of

PAGE = Path(__file__).parents[3] / "docs" / "python-api.md"
PATIENCE_S = 120


def example_rule() -> str:
    """Return the rule that the documentation tells its readers to write."""
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    [block] = [block for block in blocks if "class Majority" in block]
    return dedent(block)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A folder with a script and an own rule next to it; it isn't the working folder."""
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "train.py").write_text(SCRIPT)
    (folder / "majority.py").write_text(example_rule())
    return folder


def paceline(folder: Path, *words: object, code: int = 0) -> str:
    """Call the installed command in a folder; return what it prints."""
    command = [PACELINE, *map(str, words)]
    done = subprocess.run(
        command, cwd=folder, text=True, capture_output=True, timeout=PATIENCE_S, check=False
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def kill_server(launcher: subprocess.Popen[str]) -> None:
    pids = [
        pid
        for forkserver, _ in children_of(launcher.pid)
        for pid, name in children_of(forkserver)
        if name == "paceline-server"
    ]
    os.kill(pids[0], signal.SIGKILL)


def restorations(trace: Trace) -> list[bool]:
    """Return for each restoration whether it was a resume."""
    return [record.resumed for record in trace.records if isinstance(record, Restored)]


def test_own_rule_survives_a_killed_server_and_a_resume(project, tmp_path):
    """The working folder is another one each time, and the module isn't in it."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    words = "run -w 3 -p majority:Majority --steps 100 --checkpoint-every 5 -l 30ms --out run"
    command = [PACELINE, *words.split(), project / "train.py"]
    with subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as launcher:
        try:
            while not list((tmp_path / "run" / "checkpoints").glob("*.ckpt")):
                assert launcher.poll() is None
                with suppress(subprocess.TimeoutExpired):
                    launcher.wait(timeout=0.1)
            kill_server(launcher)
            out, _ = launcher.communicate(timeout=PATIENCE_S)
        finally:
            launcher.kill()
    assert launcher.returncode == 0, out
    assert "under majority:Majority" in out

    out = paceline(elsewhere, "run", "--resume", tmp_path / "run", "--steps", 110)
    assert "at the end: 110" in out
    trace = read_trace(tmp_path / "run" / "trace.jsonl")
    assert restorations(trace) == [False, True]
    assert trace.header.policy == "majority:Majority"
    assert {update.wanted for update in trace.updates()} == {2}
    assert "run of majority:Majority" in paceline(elsewhere, "trace", "check", tmp_path / "run")
    shown = paceline(elsewhere, "trace", "show", tmp_path / "run")
    assert "majority:Majority with 3 workers" in shown
    assert "there is no module" not in shown
    (project / "majority.py").unlink()
    for verb, code in (("trace check", 3), ("run --resume", 2)):
        out = paceline(elsewhere, *verb.split(), tmp_path / "run", code=code)
        assert f"there is no module majority in {project}" in out


def test_own_rule_is_found_in_the_working_folder_and_compared(project, tmp_path):
    (project / "majority.py").rename(tmp_path / "majority.py")
    words = "compare -w 3 -p sync -p majority:Majority:1 --samples 96 -l 1ms --out both"
    out = paceline(tmp_path, *words.split(), project / "train.py")
    assert re.search(r"^majority:Majority:extra=1 +\d", out, re.MULTILINE)
    folder = "both/majority-Majority-extra=1"
    assert "run of majority:Majority:extra=1" in paceline(tmp_path, "trace", "check", folder)


def test_own_rule_is_simulated_and_planned(project):
    out = paceline(project, "simulate", "-w", 8, "-p", "majority:Majority", "--out", "t.jsonl")
    assert re.search(r"^majority:Majority +\d", out, re.MULTILINE)
    assert {len(u.contributors) for u in read_trace(project / "t.jsonl").updates()} == {5}
    assert "sim of majority:Majority" in paceline(project, "trace", "check", "t.jsonl")
    out = paceline(project, "plan", "-w", 8, "-p", "majority:Majority:1", "-p", "backup")
    assert re.search(r"^majority:Majority:extra=1 +\d", out, re.MULTILINE)


@pytest.mark.parametrize(
    ("rule", "complaint"),
    [
        ("minority:Majority", "there is no module minority in {project} or {folder}, and none"),
        ("majority:Minority", "module majority ({project}/majority.py) has no class Minority"),
        ("majority:Majority:x", "extra must be a whole number, got 'x'; write majority:Majority"),
        ("train:Majority", "must be in a module of its own: importing it from {project}/train.py"),
    ],
)
def test_rule_that_cannot_be_used_is_refused_before_the_run(rule, complaint, project, tmp_path):
    out = paceline(tmp_path, "run", "-p", rule, project / "train.py", code=2)
    assert complaint.format(project=project, folder=tmp_path) in out
    assert len(out.splitlines()) == 1
    assert not (tmp_path / "runs").exists()


def test_rule_that_raises_ends_the_run_with_its_traceback(project, tmp_path):
    source = "from paceline import Policy\nclass Bad(Policy):\n    def needed(self, ledger):\n"
    (project / "bad.py").write_text(f"{source}        raise RuntimeError('not today')\n")
    words = "run -w 2 -p bad:Bad --steps 5 --patience 5s"
    out = paceline(tmp_path, *words.split(), project / "train.py", code=1)
    assert "RuntimeError: not today" in out
