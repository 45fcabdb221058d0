# SPDX-License-Identifier: BSD-3-Clause
"""A script that was started by hand computes bit for bit what it did without Paceline."""

import copy
import pickle

import pytest
import torch

import paceline
from plain import execute

SETUP = """
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 1))
data = torch.utils.data.TensorDataset(torch.randn(48, 4), torch.randn(48, 1))
loader = torch.utils.data.DataLoader(data, batch_size=8, shuffle=True)
S = torch.optim.lr_scheduler
"""

PREPARE = """
run = join()
model, optimizer, scheduler, loader = run.prepare(model, optimizer, scheduler, loader)
"""

LOOP = """
seen = []
for epoch in range(3):
    for x, y in loader:
        def closure():
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            return loss
        loss = STEP
        PER_BATCH
    PER_EPOCH
    seen.append((loss.item(), optimizer.param_groups[0]["lr"], scheduler.state_dict()))
"""

SGD = "optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)"
SCRIPTS = {
    "per epoch": (SGD, "S.StepLR(optimizer, 1)", "", "scheduler.step()"),
    "per batch": (SGD, "S.CosineAnnealingLR(optimizer, 18)", "scheduler.step()", ""),
    "never": (SGD, "S.StepLR(optimizer, 1)", "", ""),
    "plateau": (
        SGD,
        "S.ReduceLROnPlateau(optimizer, patience=0, threshold=10.0)",
        "",
        "scheduler.step(loss.item())",
    ),
    "closure": (
        "optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)",
        "S.ExponentialLR(optimizer, 0.5)",
        "",
        "scheduler.step()",
    ),
    "derived": (
        """
class Derived(torch.optim.Adam):
    def step(self, closure=None):
        return super().step(closure)

torch.optim.Adam(model.parameters())
optimizer = Derived(model.parameters(), lr=0.01)""",
        "S.StepLR(optimizer, 1)",
        "",
        "scheduler.step()",
    ),
}


def source_of(name, prepare):
    """Return the source of a script, and what it calls to prepare itself."""
    optimizer, scheduler, per_batch, per_epoch = SCRIPTS[name]
    step = "optimizer.step(closure)" if name == "closure" else "closure(); optimizer.step()"
    loop = LOOP.replace("PER_BATCH", per_batch).replace("PER_EPOCH", per_epoch)
    loop = loop.replace("STEP", step)
    return f"{SETUP}\n{optimizer}\nscheduler = {scheduler}\n{prepare}\n{loop}"


@pytest.mark.parametrize("name", SCRIPTS)
def test_script_alone_equals_the_plain_script_bit_for_bit(name):
    plain = execute(source_of(name, ""))
    ours = execute(f"from paceline import join\n{source_of(name, PREPARE)}")
    assert ours["seen"] == plain["seen"]
    for what in ("model", "optimizer"):
        torch.testing.assert_close(
            ours[what].state_dict(), plain[what].state_dict(), rtol=0, atol=0, equal_nan=True
        )
    assert ours["run"].version == 18
    assert type(ours["loader"]) is type(plain["loader"])
    assert type(ours["scheduler"]) is type(plain["scheduler"])


def test_prepared_objects_can_be_copied_and_pickled():
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = paceline.join()
    run.prepare(model, optimizer)
    for made in (copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))):
        made(model)
        made(optimizer).step()
    assert run.version == 0


def test_script_alone_has_one_worker():
    assert paceline.join().workers == 1


def test_number_of_workers_is_known_before_and_after_prepare(launch):
    source = """
run = paceline.join()
before = run.workers
print("workers", run.workers)
model = nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer = run.prepare(model, optimizer)
while not run.finished:
    optimizer.zero_grad()
    model(torch.ones(1)).sum().backward()
    optimizer.step()
keep(run, workers=(before, run.workers))
"""
    ran = launch(source, workers=3, steps=1)
    assert ran.code == 0, ran.err
    assert [kept["workers"] for kept in ran.kept.values()] == [(3, 3)] * 3
    assert "server    | workers 3" in ran.out
