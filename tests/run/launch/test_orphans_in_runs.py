# SPDX-License-Identifier: BSD-3-Clause
"""However a run ends, nothing that its scripts started is left."""

import os
import signal
import subprocess

import pytest

from descendants import KINDS, STARTS_PROCESSES, pids_in, wait_until_gone
from failures import counts, troubled
from sandbox import PACELINE

PATIENCE_S = 120

SOURCE = (
    """
import sys
from pathlib import Path
import torch
from torch import nn
import paceline
"""
    + STARTS_PROCESSES
    + """
OUT, END = Path(sys.argv[1]), sys.argv[2]
folder = OUT / os.environ.get("PACELINE_WORKER", "server")
folder.mkdir()
start_processes(folder)
model = nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
run = paceline.join()
model, optimizer = run.prepare(model, optimizer)
while not run.finished:
    if run.version == 3 and END != "goal":
        print("at update 3", flush=True)
        while True:
            signal.pause()
    optimizer.zero_grad()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
"""
)


@pytest.mark.parametrize(
    ("end", "code"),
    [("goal", 0), ("stopped twice", 128 + signal.SIGTERM), ("killed", -signal.SIGKILL)],
)
def test_nothing_is_left_of_a_run(tmp_path, end, code):
    script = tmp_path / "train.py"
    script.write_text(SOURCE)
    words = ["-w", "2", "--steps", "5", "--out", tmp_path / "run", script, tmp_path, end]
    with subprocess.Popen(
        [PACELINE, "run", *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as launcher:
        if end != "goal":
            assert any("at update 3" in line for line in launcher.stdout)
        if end == "killed":
            launcher.kill()
        elif end == "stopped twice":
            launcher.send_signal(signal.SIGINT)
            assert any("stopping" in line for line in launcher.stderr)
            launcher.send_signal(signal.SIGTERM)
        launcher.communicate(timeout=PATIENCE_S)
        assert launcher.returncode == code
    for process in ("server", "0", "1"):
        pids = pids_in(tmp_path / process)
        assert set(pids) == KINDS
        if end == "killed":  # the fork server ends them after the launcher
            wait_until_gone(*pids.values())
        assert not any(os.path.exists(f"/proc/{pid}") for pid in pids.values())


RESTARTED = (
    STARTS_PROCESSES
    + """
if ROLE == "worker" and WORKER == 1:
    folder = OUT / ("second" if was_told("struck-1") else "first")
    folder.mkdir()
    start_processes(folder)

def trouble(run):
    if run.worker == 1 and run.version == 2 and not was_told("struck-1"):
        strike()
    if run.worker == 0 and run.version == 2:
        wait_until(lambda: (OUT / "second").exists())
"""
)


def test_restarted_worker_starts_without_the_processes_of_its_last_life(launch):
    ran = launch(troubled(RESTARTED), steps=6, restart=True)
    assert ran.code == 0, ran.err
    assert len(counts(ran.trace)) == 6
    for life in ("first", "second"):
        pids = pids_in(ran.folder / life)
        assert set(pids) == KINDS
        wait_until_gone(*pids.values())
