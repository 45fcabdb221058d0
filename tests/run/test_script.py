# SPDX-License-Identifier: BSD-3-Clause
"""The `Run` that a script sees: its attributes, its methods, and `prepare`."""

import os
import subprocess
import sys
from dataclasses import astuple

import pytest
import torch

import paceline
from plain import LATE, SETUP, assert_same, execute, weights

SGD = SETUP + "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"

TOLD_LOOP = """
run = paceline.join()
seen = [(run.worker, run.is_first, run.version, run.finished, run.last)]
model, optimizer = run.prepare(model, optimizer)
seen.append((run.worker, run.is_first, run.version, run.finished, run.last))
lasts, waits = [], []
while not run.finished:
    at = run.version
    optimizer.zero_grad()
    loss_of(run.worker, run.version).backward()
    HOLD
    optimizer.step()
    last = run.last
    assert last.version == at
    lasts.append((str(last.fate), last.version, last.staleness, last.contributors))
    waits.append(last.waited_s)
HOLD
seen.append((run.worker, run.is_first, run.version, run.finished))
keep(run, seen=seen, lasts=lasts, waits=waits)
"""


def test_run_knows_its_worker_and_version(launch):
    ran = launch(SGD + TOLD_LOOP.replace("HOLD", ""), steps=3)
    assert (ran.code, ran.err) == (0, "")
    for worker, kept in ran.kept.items():
        first = worker == 0
        begin = (worker, first, 0, False, None)
        assert kept["seen"] == [begin, begin, (worker, first, 3, True)]


def test_all_gradients_of_a_synchronous_run_are_accepted(launch):
    ran = launch(SGD + TOLD_LOOP.replace("HOLD", ""), workers=3, steps=3)
    expected = [("accepted", version, 0, 3) for version in range(3)]
    assert [kept["lasts"] for kept in ran.kept.values()] == [expected] * 3
    assert all(0 <= waited_s < 60 for kept in ran.kept.values() for waited_s in kept["waits"])


@pytest.mark.parametrize("late", ["cancel", "finish"])
def test_last_says_that_the_gradient_was_late(launch, late):
    source = SGD + LATE + TOLD_LOOP.replace("HOLD", "be_late(run, 6)")
    ran = launch(source, steps=6, policy="backup:1", late=late)
    assert (ran.code, ran.err) == (0, "")
    assert ran.kept[0]["lasts"] == [("accepted", version, 0, 1) for version in range(6)]
    assert ran.kept[1]["lasts"] == [("late", version, 2, 0) for version in (0, 2, 4)]


def test_last_says_how_stale_the_gradient_was(launch):
    """Worker 1 computes at version 0 while worker 0 makes two updates."""
    hold = """
    if run.is_first and run.version == 2:
        (OUT / "two").touch()
        wait_for("third")
    if not run.is_first:
        wait_for("two")
"""
    loop = TOLD_LOOP.replace("    HOLD", hold, 1).replace("HOLD", '(OUT / "third").touch()')
    ran = launch(SGD + LATE + loop, steps=3, policy="async", min_workers=2)
    assert (ran.code, ran.err) == (0, "")
    assert ran.kept[1]["lasts"] == [("accepted", 0, 2, 1)]
    assert ran.kept[0]["lasts"][:2] == [("accepted", 0, 0, 1), ("accepted", 1, 0, 1)]
    assert [update.contributors for update in ran.trace.updates()] == [(0,), (0,), (1,)]


# ------------------------------------------------------------------------------------------ logging


def test_logged_numbers_are_averaged_by_samples_into_the_trace(launch):
    ran = launch(
        """
data = torch.utils.data.TensorDataset(torch.ones(72, 1))
run = paceline.join()
size, own_sampler = 8 if run.is_first else 24, range(72)
loader = torch.utils.data.DataLoader(data, batch_size=size, sampler=own_sampler)
model = nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = run.prepare(model, optimizer, loader)
while not run.finished:
    for (x,) in loader:
        optimizer.zero_grad()
        model(x).mean().backward()
        run.log(worker=run.worker, version=torch.tensor(float(run.version)))
        run.log(twice=1.0)
        run.log(twice=3.0)
        if run.is_first:
            run.log(mine=5.0)
        else:
            run.log(endless=float("inf"))
        optimizer.step()
""",
        steps=3,
    )
    assert (ran.code, ran.err) == (0, "")
    for version, update in enumerate(ran.trace.updates()):
        assert update.scalars == {
            "worker": 0.75,
            "version": version,
            "twice": 2.0,
            "mine": 5.0,
            "endless": None,
        }


def test_numbers_logged_with_a_late_gradient_do_not_count(launch):
    loop = TOLD_LOOP.replace("    HOLD", "    run.log(who=run.worker)\n    be_late(run, 4)", 1)
    source = SGD + LATE + loop.replace("HOLD", "be_late(run, 4)")
    ran = launch(source, steps=4, policy="backup:1")
    assert (ran.code, ran.err) == (0, "")
    assert [update.scalars for update in ran.trace.updates()] == [{"who": 0.0}] * 4


# -------------------------------------------------------------------------------------- other calls


def test_run_backward_equals_loss_backward(launch):
    ran = launch(
        SGD
        + """
run = paceline.join()
model, optimizer = run.prepare(model, optimizer)
while not run.finished:
    optimizer.zero_grad()
    loss = loss_of(run.worker, run.version)
    run.backward(loss, retain_graph=True)
    run.backward(loss, torch.tensor(3.0))
    optimizer.step()
keep(run, weights=[p.detach().clone() for p in model.parameters()])
""",
        steps=3,
    )
    assert (ran.code, ran.err) == (0, "")
    names = execute(SGD)
    for version in range(3):
        names["optimizer"].zero_grad()
        for worker in (0, 1):
            (names["loss_of"](worker, version) * 4 / 2).backward()
        names["optimizer"].step()
    assert_same(ran.kept[0]["weights"], weights(names))


def test_prepare_returns_objects_in_the_given_order(launch):
    ran = launch(
        SGD
        + """
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
data, other = [torch.ones(2)], [torch.ones(3)]
run = paceline.join()
given = data, scheduler, model, optimizer, other
prepared = run.prepare(*given)
same = [a is b for a, b in zip(prepared, given)]
sizes = [len(next(iter(loader))) for loader in (prepared[0], prepared[4])]
keep(run, kind=type(prepared).__name__, same=same, sizes=sizes)
while not run.finished:
    loss_of(run.worker, run.version).backward()
    optimizer.step()
""",
        steps=1,
    )
    expected = {"kind": "tuple", "same": [False, True, True, True, False], "sizes": [2, 3]}
    assert ran.kept == {0: expected, 1: expected}


def test_prepare_returns_a_single_object_itself(launch):
    ran = launch(
        SGD
        + """
run = paceline.join()
prepared = run.prepare(optimizer)
keep(run, same=prepared is optimizer)
while not run.finished:
    loss_of(run.worker, run.version).backward()
    optimizer.step()
""",
        steps=1,
    )
    assert [kept["same"] for kept in ran.kept.values()] == [True, True]


# ------------------------------------------------------------------------------------------ by hand

EPOCHS = """
torch.manual_seed(0)
data = torch.utils.data.TensorDataset(torch.randn(32, 4), torch.randn(32, 1))
loader = torch.utils.data.DataLoader(data, batch_size=8, shuffle=True)
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
run = paceline.join()
model, optimizer, loader = run.prepare(model, optimizer, loader)
steps = [0, 0, 0]
for epoch in range(3):
    for x, y in loader:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        run.backward(loss)
        run.log(loss=loss)
        optimizer.step()
        steps[epoch] += 1
        assert run.last.fate == "accepted" and run.last.version == run.version - 1
    with run.averaged_weights(model):
        model(torch.ones(4))
keep(run, steps=steps, version=run.version, first=run.is_first, epochs=len(loader))
"""


def test_same_script_runs_with_and_without_a_launcher(launch, script, tmp_path):
    """Alone it trains its own epochs; in a run the workers share them until the last update."""
    ran = launch(EPOCHS, steps=5)
    assert (ran.code, ran.err) == (0, "")
    for kept in ran.kept.values():
        assert (kept["steps"], kept["version"], kept["epochs"]) == ([2, 2, 1], 5, 2)
    path = script(EPOCHS)
    environ = {k: v for k, v in os.environ.items() if not k.startswith("PACELINE_")}
    command = [sys.executable, "-W", "error", str(path), str(tmp_path)]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    kept = torch.load(tmp_path / "worker-0.pt")
    assert kept == {"steps": [4, 4, 4], "version": 12, "first": True, "epochs": 4}


def test_script_started_by_hand_is_a_run_of_one_worker():
    names = execute(SGD)
    model, optimizer = names["model"], names["optimizer"]
    run = paceline.join()
    assert (run.worker, run.is_first, run.version, run.last, run.finished) == (
        0,
        True,
        0,
        None,
        False,
    )
    assert run.prepare(model, optimizer) == (model, optimizer)
    for version in range(3):
        optimizer.zero_grad()
        run.backward(names["loss_of"](0, version))
        run.log(loss=1.0)
        optimizer.step()
        assert run.version == version + 1
        assert astuple(run.last) == ("accepted", version, 0, 1, 0.0)
    before = weights(names)
    with run.averaged_weights(model) as averaged:
        assert averaged is model
        assert_same(weights(names), before)


def test_script_started_by_hand_counts_the_steps_of_all_optimizers():
    models = [torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    run = paceline.join()
    run.prepare(*models, *optimizers)
    for optimizer in (*optimizers, optimizers[0]):
        optimizer.step()
    assert run.version == 3


def test_script_started_by_hand_is_refused_what_a_run_refuses():
    run = paceline.join()
    with pytest.raises(paceline.SpecError, match="got int"):
        run.prepare(3)
    model = torch.nn.Linear(1, 1)
    run = paceline.join()
    assert run.prepare(model) is model
    with pytest.raises(paceline.SpecError, match="called twice"):
        run.prepare(model)
