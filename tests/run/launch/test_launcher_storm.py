# SPDX-License-Identifier: BSD-3-Clause
"""Kills without end, at random, of a run as a user starts it: it comes to its end all the same."""

import os
import random
import signal
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest

from paceline.trace.reader import read_trace
from paceline.trace.schema import Ended, Left, Restored, Trace
from paceline.watch.audit import audit
from sandbox import PACELINE, SCRIPT, children_of

PATIENCE_S = 240  # for what takes as long as the storm, and a little more


def strike(launcher: subprocess.Popen[str], victims: str, chance: random.Random) -> str:
    """Kill one process of the run whose name begins so; return whom, "" if there was none."""
    found = [
        (pid, name)
        for forkserver, _ in children_of(launcher.pid)
        for pid, name in children_of(forkserver)
        if name.startswith(victims)
    ]
    if not found:
        return ""
    pid, name = chance.choice(found)
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    return name


def weather(tmp_path: Path, victims: str, seconds: int, words: list[str]) -> tuple[list[str], str]:
    """Let a run go through a storm of one kill a second; return who was struck, what was said."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT, encoding="utf-8")
    command = [PACELINE, "run", *words, "--run-dir", tmp_path / "run", script]
    chance, struck = random.Random(1), []
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as launcher:
        try:
            for line in launcher.stdout:
                if "training" in line:
                    break
            for _ in range(seconds):
                with suppress(subprocess.TimeoutExpired):
                    launcher.wait(timeout=1.0)
                struck.append(strike(launcher, victims, chance))
            out, _ = launcher.communicate(timeout=PATIENCE_S)
        finally:
            launcher.kill()
    assert launcher.returncode == 0, out
    return [name for name in struck if name], out


def sound(path: Path) -> Trace:
    """A trace in which every gradient has one fate."""
    trace = read_trace(path)
    audit(trace)
    turns = [(gradient.worker, gradient.turn) for gradient in trace.gradients()]
    assert len(turns) == len(set(turns))
    assert isinstance(trace.records[-1], Ended)
    return trace


@pytest.mark.timeout(400)
def test_a_minute_of_kills_of_workers_costs_no_update(tmp_path):
    words = [
        "-w",
        "4",
        "-p",
        "backup:1",
        "--steps",
        "1500",
        "--slow",
        "45ms",
    ]  # at least 67 seconds
    struck, out = weather(tmp_path, "paceline-w", 60, words)
    assert len(struck) > 40
    assert {name[:10] for name in struck} == {"paceline-w"}
    assert "at the end: 1500" in out
    trace = sound(tmp_path / "run" / "trace.jsonl")
    assert [update.update for update in trace.updates()] == list(range(1, 1501))
    assert sum(isinstance(record, Left) for record in trace.records) >= len(struck)


@pytest.mark.timeout(400)
def test_kills_of_the_server_cost_no_more_than_what_was_not_saved(tmp_path):
    words = [
        "-w",
        "3",
        "-p",
        "sync",
        "--steps",
        "300",
        "--slow",
        "40ms",
        "--checkpoint-every",
        "10",
    ]
    struck, out = weather(tmp_path, "paceline-server", 10, words)
    assert len(struck) >= 3
    assert "at the end: 300" in out
    trace = sound(tmp_path / "run" / "trace.jsonl")
    assert sum(isinstance(record, Restored) for record in trace.records) == len(struck)
    assert max(update.update for update in trace.updates()) == 300
    version = 0
    for record in trace.records:
        if isinstance(record, Restored):
            assert version - record.version <= 20  # one is under way when the next is due
        version = getattr(record, "update", version)
