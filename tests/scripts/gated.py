# SPDX-License-Identifier: BSD-3-Clause
"""Trains a small model, and waits at some versions until a file says that it may go on."""

import sys
import time
from pathlib import Path

import torch
from torch import nn

import paceline

GATES, FOLDER = (10, 20), Path(sys.argv[1])

torch.manual_seed(0)
data = torch.utils.data.TensorDataset(torch.randn(128, 8), torch.randn(128, 1))
loader = torch.utils.data.DataLoader(data, batch_size=8, shuffle=True)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

run = paceline.join()
model, optimizer, loader = run.prepare(model, optimizer, loader)
while not run.finished:
    for x, y in loader:
        if run.version in GATES:
            (FOLDER / f"at-{run.version}").touch()
            while not (FOLDER / f"open-{run.version}").exists():
                time.sleep(0.01)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
