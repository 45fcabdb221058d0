# SPDX-License-Identifier: BSD-3-Clause
"""Epochs of a run: they end for all workers at the same version, and use every sample once."""

from collections import Counter

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from paceline.run.worker.sampler import order_of, with_shared_order

SAMPLES, BATCH, EPOCHS = 50, 4, 3
DATA = """
torch.manual_seed(3)
x = torch.randn(SAMPLES, 3)
data = torch.utils.data.TensorDataset(torch.arange(SAMPLES), x, x.sum(1, keepdim=True))
"""
MODEL = """
torch.manual_seed(5)
model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
"""
LOOP = f"""
loader = torch.utils.data.DataLoader(data, batch_size={BATCH}, shuffle=True, num_workers=PROCESSES)
run = paceline.join()
model, optimizer, scheduler, loader = run.prepare(model, optimizer, scheduler, loader)
seen, ends = [], []
for epoch in range({EPOCHS}):
    for number, x, y in loader:
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        if run.last.fate == "accepted":
            seen.append((epoch, number.tolist()))
    scheduler.step()
    ends.append(run.version)
keep(run, seen=seen, ends=ends, weights=[p.detach().clone() for p in model.parameters()])
"""


def source(processes=0, samples=SAMPLES):
    return f"PROCESSES, SAMPLES = {processes}, {samples}\n" + DATA + MODEL + LOOP


@pytest.mark.parametrize("policy", ["sync", "backup:1", "batchsync:2", "softsync:2", "async"])
def test_every_worker_runs_every_epoch_and_no_sample_is_lost_or_repeated(launch, policy):
    ran = launch(source(), workers=3, steps=None, policy=policy)
    assert ran.code == 0, ran.err
    assert [len(kept["ends"]) for kept in ran.kept.values()] == [EPOCHS] * 3
    [(_, next_number, undone)] = ran.trace.records[-1].data
    times = Counter(sample for kept in ran.kept.values() for _, n in kept["seen"] for sample in n)
    batches = -(-SAMPLES // BATCH)
    complete = min([*undone, next_number]) // batches  # permutations that were used completely
    assert sum(times.values()) >= EPOCHS * SAMPLES
    assert min(times.values()) >= complete
    assert max(times.values()) <= -(-next_number // batches)


@pytest.mark.parametrize("processes", [0, 2])
def test_epochs_end_at_the_same_versions_under_sync(launch, processes):
    ran = launch(source(processes), workers=3, steps=None)
    assert ran.code == 0, ran.err
    # An update takes 3 batches of 4; the last batch of each permutation has only 2 samples.
    assert [kept["ends"] for kept in ran.kept.values()] == [[5, 9, 13]] * 3


def large_batches(workers, samples):
    """Train one process with batches that are as many times as large, over the same order."""
    script: dict = {"SAMPLES": samples}
    exec("import torch\nfrom torch import nn\n" + DATA + MODEL, script)
    data, model, optimizer = script["data"], script["model"], script["optimizer"]
    loader = DataLoader(data, batch_size=BATCH, shuffle=True)
    sampler = with_shared_order(loader, order_of(loader), seed=0).batch_sampler
    for first in range(0, EPOCHS * len(loader), workers):
        optimizer.zero_grad()
        for number in range(first, first + workers):
            _, x, y = next(iter(DataLoader(data, batch_sampler=[sampler.samples(number)])))
            (nn.functional.mse_loss(model(x), y) / workers).backward()
        optimizer.step()
        if (first + workers) % len(loader) == 0:
            script["scheduler"].step()
    return [parameter.detach() for parameter in model.parameters()]


def test_sync_equals_one_process_with_larger_batches_over_the_same_order(launch):
    """Bit for bit, with a scheduler that steps once per epoch."""
    ran = launch(source(samples=48), workers=2, steps=None)
    assert ran.code == 0, ran.err
    for mine, expected in zip(ran.kept[0]["weights"], large_batches(2, 48), strict=True):
        assert torch.equal(mine, expected)
