# SPDX-License-Identifier: BSD-3-Clause
"""A run as a user starts it reaches its end although its processes keep being killed.

These are real processes, for a few seconds; tests/storm simulates much more of this.
"""

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

PATIENCE_S = 240  # for what takes little longer than the kills


def kill_one(launcher: subprocess.Popen[str], victims: str, chance: random.Random) -> str:
    """Kill a process of the run whose name begins like this; return its name, or ""."""
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


def run_with_kills(
    tmp_path: Path, victims: str, seconds: int, words: list[str]
) -> tuple[list[str], str]:
    """Run with one kill per second; return the names of the killed processes, and the output."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT, encoding="utf-8")
    command = [PACELINE, "run", *words, "--out", tmp_path / "run", script]
    chance, killed = random.Random(1), []
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as launcher:
        try:
            for line in launcher.stdout:
                if "server    | training" in line:
                    break
            for _ in range(seconds):
                with suppress(subprocess.TimeoutExpired):
                    launcher.wait(timeout=1.0)
                killed.append(kill_one(launcher, victims, chance))
            out, _ = launcher.communicate(timeout=PATIENCE_S)
        finally:
            launcher.kill()
    assert launcher.returncode == 0, out
    return [name for name in killed if name], out


def read_sound_trace(path: Path) -> Trace:
    """Read a trace, and check that every gradient has one fate."""
    trace = read_trace(path)
    audit(trace)
    turns = [(gradient.worker, gradient.turn) for gradient in trace.gradients()]
    assert len(turns) == len(set(turns))
    assert isinstance(trace.records[-1], Ended)
    return trace


@pytest.mark.timeout(400)
def test_killing_workers_again_and_again_costs_no_update(tmp_path):
    words = [
        "-w",
        "4",
        "-p",
        "backup:1",
        "--steps",
        "250",
        "--latency",
        "45ms",
    ]  # at least 11 seconds
    killed, out = run_with_kills(tmp_path, "paceline-w", 9, words)
    assert len(killed) > 6
    assert {name[:10] for name in killed} == {"paceline-w"}
    assert "at the end: 250" in out
    trace = read_sound_trace(tmp_path / "run" / "trace.jsonl")
    assert [update.update for update in trace.updates()] == list(range(1, 251))
    assert sum(isinstance(record, Left) for record in trace.records) >= len(killed)


@pytest.mark.timeout(400)
def test_killing_the_server_costs_only_unsaved_updates(tmp_path):
    words = [
        "-w",
        "3",
        "-p",
        "sync",
        "--steps",
        "150",
        "--latency",
        "40ms",
        "--checkpoint-every",
        "10",
    ]
    killed, out = run_with_kills(tmp_path, "paceline-server", 6, words)
    assert len(killed) >= 2
    assert "at the end: 150" in out
    trace = read_sound_trace(tmp_path / "run" / "trace.jsonl")
    assert sum(isinstance(record, Restored) for record in trace.records) == len(killed)
    assert max(update.update for update in trace.updates()) == 150
    version = 0
    for record in trace.records:
        if isinstance(record, Restored):
            assert version - record.version <= 20  # the last checkpoint may be unfinished
        version = getattr(record, "update", version)
