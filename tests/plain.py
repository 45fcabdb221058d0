# SPDX-License-Identifier: BSD-3-Clause
"""The same training without Paceline, as a reference for real runs.

A test passes one source to both sides: a run executes it in its processes, followed by `LOOP`, and
`train` executes it here, followed by a plain loop. The batch of a worker at a version depends on
these two numbers only.
"""

from typing import Any

import torch
import torch._dynamo  # optimizers import it, and it sets an environment variable

IMPORTS = "import torch\nfrom torch import nn\nfrom torch.nn import functional as F\n"

SETUP = """
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

def batch(worker, version, size=8):
    generator = torch.Generator().manual_seed(1000 * version + worker)
    return torch.randn(size, 4, generator=generator), torch.randn(size, 1, generator=generator)

def loss_of(worker, version):
    x, y = batch(worker, version)
    return F.mse_loss(model(x), y)
"""

LOOP = """
run = paceline.join()
model, optimizer = run.prepare(model, optimizer)
while not run.finished:
    optimizer.zero_grad()
    loss_of(run.worker, run.version).backward()
    optimizer.step()
keep(run, weights=[p.detach().clone() for p in model.parameters()])
"""

LATE = """
import time

def wait_for(name):
    while not (OUT / name).exists():
        time.sleep(0.001)

def be_late(run, last):
    '''Make worker 1 report its turns at versions 0, 2, 4, ... two updates too late.

    Call it in each turn before the gradient is reported, and at the end.
    '''
    version = run.version
    if run.is_first:
        (OUT / f"at-{version}").touch()
        if version % 2 == 0 and version < last:
            wait_for(f"late-at-{version}")
    else:
        (OUT / f"late-at-{version}").touch()
        wait_for(f"at-{min(version + 2, last)}")
"""


def execute(source: str) -> dict[str, Any]:
    """Execute the source in this process; return its names."""
    names: dict[str, Any] = {}
    exec(IMPORTS + source, names)
    return names


def train(source: str, steps: int, workers: int = 2) -> dict[str, Any]:
    """Train in a plain loop, each step over the batches of all workers; return the names."""
    names = execute(source)
    for version in range(steps):
        names["optimizer"].zero_grad()
        for worker in range(workers):
            (names["loss_of"](worker, version) / workers).backward()
        names["optimizer"].step()
    return names


def weights(names: dict[str, Any]) -> list[torch.Tensor]:
    """Return the weights of the model."""
    return [p.detach() for p in names["model"].parameters()]


def assert_same(actual: Any, expected: Any) -> None:
    """Check that all tensors are equal, up to rounding."""
    torch.testing.assert_close(actual, expected)
