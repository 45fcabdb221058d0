# SPDX-License-Identifier: BSD-3-Clause
"""A script reads the options that a plain script would, and saves them, wherever it does so."""

import pytest
import torch

from plain import execute

START = """
import copy
import time
torch.manual_seed(0)
model = nn.Linear(4, 1)
optimizer = OPTIMIZER
data = torch.utils.data.TensorDataset(torch.randn(32, 4), torch.randn(32, 1))
loader = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True)
S = torch.optim.lr_scheduler
scheduler = SCHEDULER
PREPARE
saved = []

def save():
    [group] = optimizer.state_dict()["param_groups"]
    [here] = optimizer.param_groups
    names = [name for name in here if name != "params"]
    pair = {name: group[name] for name in names}, {name: here[name] for name in names}
    saved.append(copy.deepcopy(pair))  # a scheduler changes tensors in place

for epoch in range(4):
    for x, y in loader:
        SLEEP
        optimizer.zero_grad()
        (F.mse_loss(model(x), y) * 0.0).backward()
        optimizer.step()
    save()
    CHANGE
    save()
"""
PREPARE = """
run = paceline.join()
model, optimizer, scheduler, loader = run.prepare(model, optimizer, scheduler, loader)
(OUT / f"ready-{run.worker}").touch()
while len(list(OUT.glob("ready-*"))) < run.workers:  # so that nobody joins in a later epoch
    time.sleep(0.001)
"""
SGD = "torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)"
BY_HAND = "optimizer.param_groups[0].update(lr=0.1 / (1 + epoch), weight_decay=0.5 / (1 + epoch))"


def plain_values(saved):
    """Return the options with lists as tuples, and tensors as numbers."""

    def value(one):
        one = float(one) if isinstance(one, torch.Tensor) else one
        return tuple(one) if isinstance(one, list) else one

    return [[{k: value(v) for k, v in group.items()} for group in pair] for pair in saved]


@pytest.fixture
def train(launch):
    def run(optimizer, scheduler, change, policy="sync", sleep="pass"):
        """Return what each of three workers has saved, and what a plain script saves."""
        source = START.replace("OPTIMIZER", optimizer).replace("SCHEDULER", scheduler)
        source = source.replace("CHANGE", change)
        paced = source.replace("PREPARE", PREPARE).replace("SLEEP", sleep)
        ran = launch(paced + "keep(run, saved=saved)", workers=3, steps=None, policy=policy)
        assert ran.code == 0, ran.err
        plain = execute(source.replace("PREPARE", "").replace("SLEEP", "pass"))["saved"]
        saved = [plain_values(kept["saved"]) for kept in ran.kept.values()]
        return saved, [expected for expected, _ in plain_values(plain)]

    return run


@pytest.mark.parametrize(
    ("optimizer", "scheduler", "change"),
    [
        (SGD, "S.OneCycleLR(optimizer, max_lr=0.9, total_steps=9)", "scheduler.step()"),
        (
            "torch.optim.Adam(model.parameters(), lr=torch.tensor(0.5))",
            "S.OneCycleLR(optimizer, max_lr=0.9, total_steps=9)",
            "scheduler.step()",
        ),
        (SGD, "S.StepLR(optimizer, step_size=99)", BY_HAND),
    ],
    ids=["scheduler", "tensors", "by hand"],
)
def test_state_has_the_options_that_were_just_changed(train, optimizer, scheduler, change):
    saved, plain = train(optimizer, scheduler, change)
    assert plain[0] != plain[1]
    for worker in saved:
        assert [here for _, here in worker] == plain
        assert [there for there, _ in worker[1::2]] == plain[1::2]


@pytest.mark.parametrize("policy", ["sync", "backup:1", "async"])
def test_rate_after_a_pass_is_that_of_a_plain_script(train, policy):
    """Before its own call of the scheduler, although faster workers have made theirs."""
    sleep = "time.sleep(0.03 if run.worker == 2 else 0)"
    halving = "S.ExponentialLR(optimizer, gamma=0.5)"
    saved, plain = train(SGD, halving, "scheduler.step()", policy, sleep)
    rates = [expected["lr"] for expected in plain]
    assert rates == [0.5, 0.25, 0.25, 0.125, 0.125, 0.0625, 0.0625, 0.03125]
    for worker in saved:
        assert [here["lr"] for _, here in worker] == rates
        assert [there["lr"] for there, _ in worker] == rates
