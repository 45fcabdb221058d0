# SPDX-License-Identifier: BSD-3-Clause
"""A training script whose workers kill themselves. Worker 0 prints the memory of the server."""

import os
import re
import signal
import sys
from pathlib import Path

import torch
from torch import nn

import paceline

TURNS = 5  # updates that a worker lives for
EVERY = 5  # deaths between two rows

folder, deaths = Path(sys.argv[1]), int(sys.argv[2])


def memory_mb() -> float:
    """Return how much memory the server uses, shared memory included."""
    status = Path(f"/proc/{(folder / 'server').read_text()}/status").read_text()
    found = re.search(r"VmRSS:\s+(\d+) kB", status)
    assert found is not None
    return int(found[1]) / 1024


model = nn.Sequential(nn.Linear(1024, 2048), nn.BatchNorm1d(2048), nn.Linear(2048, 1290))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
run = paceline.join()
if os.environ["PACELINE_ROLE"] == "server":
    (folder / "server").write_text(str(os.getpid()))
model, optimizer = run.prepare(model, optimizer)
x, turns, rows = torch.randn(8, 1024), 0, 0
while not run.finished:
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
    turns += 1
    if not run.is_first and turns == TURNS:
        (folder / f"dead-{os.getpid()}").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    dead = len(list(folder.glob("dead-*")))
    if run.is_first and dead >= rows * EVERY:
        print(f"{dead:6} {run.version:8} {memory_mb():8.0f} MB", flush=True)
        rows += 1
    if run.is_first and dead >= deaths:
        run.stop()
