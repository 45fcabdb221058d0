# SPDX-License-Identifier: BSD-3-Clause
"""Runs as a user starts them: the command itself, a whole script, processes seen from outside."""

import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

__all__ = ["PACELINE", "SCRIPT", "children_of"]

PACELINE = Path(sys.executable).parent / "paceline"

SCRIPT = """
import torch
from torch import nn
import paceline

torch.manual_seed(0)
data = torch.utils.data.TensorDataset(torch.randn(512, 8), torch.randn(512, 1))
loader = torch.utils.data.DataLoader(data, batch_size=8, shuffle=True)
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
run = paceline.join()
model, optimizer, loader = run.prepare(model, optimizer, loader)
for x, y in loader:
    optimizer.zero_grad()
    run.backward(nn.functional.mse_loss(model(x), y))
    optimizer.step()
if run.is_first:
    print("at the end:", run.version)
"""


def children_of(pid: int) -> Iterator[tuple[int, str]]:
    """The processes that this one has, and what they are called."""
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has just ended
            name, _, rest = (process / "stat").read_text().partition("(")[2].rpartition(") ")
            if int(rest.split()[1]) == pid:
                yield int(process.name), name
