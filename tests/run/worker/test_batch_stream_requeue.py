# SPDX-License-Identifier: BSD-3-Clause
"""Batches of dropped gradients come again, so that no sample is lost silently.

Here the script has a sampler of its own, so each worker draws its own batches.
"""

import pytest

from plain import LATE

STREAM = """
from torch.utils.data import DataLoader
run = paceline.join()
model = nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
loader = DataLoader(torch.arange(1000.0), batch_size=2, sampler=range(1000))
model, optimizer, loader = run.prepare(model, optimizer, loader)
turns = []
"""

KEEP = "keep(run, turns=turns)\n"

LOOP = (
    STREAM
    + """
for x in loader:
    optimizer.zero_grad()
    loss = model(x.reshape(-1, 1)).mean()
    HOLD
    BACKWARD
    optimizer.step()
    turns.append((x[0].item() / 2, str(run.last.fate)))
HOLD
"""
    + KEEP
)


def batches(ran, worker):
    """Return the numbers of the batches that a worker got, in order."""
    return [number for number, _ in ran.kept[worker]["turns"]]


@pytest.mark.parametrize("backward", ["loss.backward()", "run.backward(loss)"])
@pytest.mark.parametrize("late", ["cancel", "finish"])
@pytest.mark.parametrize("requeue", [True, False])
def test_batch_of_a_late_gradient_comes_again(launch, backward, late, requeue):
    source = LATE + LOOP.replace("HOLD", "be_late(run, 8)").replace("BACKWARD", backward)
    ran = launch(source, steps=8, policy="backup:1", late=late, requeue=requeue)
    assert (ran.code, ran.err) == (0, "")
    assert {fate for _, fate in ran.kept[1]["turns"]} <= {"late", "cancelled"}
    assert batches(ran, 1) == ([0, 0, 0, 0] if requeue else [0, 1, 2, 3])
    assert batches(ran, 0) == list(range(8))


def test_no_batch_of_a_slow_worker_is_lost(launch):
    source = LOOP.replace("HOLD", "").replace("BACKWARD", "run.backward(loss)")
    ran = launch(source, steps=30, policy="backup:1", latency="1ms; worker 1 x50", min_workers=2)
    assert (ran.code, ran.err) == (0, "")
    for kept in ran.kept.values():
        expected = 0
        for number, fate in kept["turns"]:
            assert number == expected
            expected += fate == "accepted"
    fates = [fate for _, fate in ran.kept[1]["turns"]]
    assert set(fates) - {"accepted"}, "it was never late"


def test_all_batches_of_an_accumulated_gradient_come_again(launch):
    loop = """
for turn, x in enumerate(loader):
    loss = model(x.reshape(-1, 1)).mean()
    if turn % 3 == 2:
        be_late(run, 4)
    run.backward(loss)
    turns.append((x[0].item() / 2, ""))
    if turn % 3 == 2:
        optimizer.step()
        optimizer.zero_grad()
be_late(run, 4)
"""
    ran = launch(LATE + STREAM + loop + KEEP, steps=4, policy="backup:1")
    assert (ran.code, ran.err) == (0, "")
    assert batches(ran, 1) == [0, 1, 2, 0, 1, 2]


def test_requeued_batch_survives_a_loop_that_is_left_and_restarted(launch):
    loop = """
while not run.finished:
    for x in loader:
        optimizer.zero_grad()
        model(x.reshape(-1, 1)).mean().backward()
        be_late(run, 4)
        optimizer.step()
        turns.append((x[0].item() / 2, str(run.last.fate)))
        break
be_late(run, 4)
"""
    ran = launch(LATE + STREAM + loop + KEEP, steps=4, policy="backup:1")
    assert (ran.code, ran.err) == (0, "")
    assert batches(ran, 1) == [0, 0]
    assert batches(ran, 0) == [0, 0, 0, 0], "each pass restarts the loader"


def test_batch_of_a_non_finite_gradient_does_not_come_again(launch):
    """It would be non-finite again, and its worker would be stuck."""
    overflow = "loss = loss * float('inf') if x[0] == 2 else loss"
    source = LOOP.replace("HOLD", "").replace("BACKWARD", f"{overflow}\n    loss.backward()")
    ran = launch(source, workers=1, steps=4)
    assert (ran.code, ran.err) == (0, "")
    assert batches(ran, 0) == [0, 1, 2, 3, 4]
    assert [fate for _, fate in ran.kept[0]["turns"]][1] == "non-finite"


def test_batch_that_the_script_skips_does_not_come_again(launch):
    loop = """
for x in loader:
    optimizer.zero_grad()
    model(x.reshape(-1, 1)).mean().backward()
    turns.append((x[0].item() / 2, ""))
    if x[0] == 2:
        continue  # as a script does that checks the norm
    optimizer.step()
"""
    ran = launch(STREAM + loop + KEEP, workers=1, steps=4)
    assert (ran.code, ran.err) == (0, "")
    assert batches(ran, 0) == [0, 1, 2, 3, 4]
    assert [g.samples for g in ran.trace.gradients()] == [2, 2, 2, 2]
