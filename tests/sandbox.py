# SPDX-License-Identifier: BSD-3-Clause
"""Run the command as a user does, and look at its processes from outside."""

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
while not run.finished:
    for x, y in loader:
        optimizer.zero_grad()
        run.backward(nn.functional.mse_loss(model(x), y))
        optimizer.step()
if run.is_first:
    print("at the end:", run.version)
"""


def children_of(pid: int) -> Iterator[tuple[int, str]]:
    """Yield the children of a process, and their names."""
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has just exited
            name, _, rest = (process / "stat").read_text().partition("(")[2].rpartition(") ")
            if int(rest.split()[1]) == pid:
                yield int(process.name), name
