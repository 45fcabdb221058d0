# SPDX-License-Identifier: BSD-3-Clause
"""What scripts commonly do: evaluate, loop over epochs, save models, set seeds, fail."""

import subprocess
import sys

import pytest
import torch

from failures import TRAINING, troubled
from paceline.errors import SpecError
from paceline.run.launch.launcher import Launcher
from paceline.run.settings import Settings
from paceline.spec import RunSpec
from plain import SETUP

DATA = """
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
train = DataLoader(TensorDataset(torch.arange(10.0)), batch_size=2, shuffle=True)
valid = DataLoader(TensorDataset(torch.arange(7.0)), batch_size=3)
model = nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
run = paceline.join()
model, optimizer, train, valid = run.prepare(model, optimizer, train, valid)

def evaluate():
    EVALUATION

seen = []
while not run.finished:
    for (x,) in train:
        optimizer.zero_grad()
        model(x.reshape(-1, 1)).mean().backward()
        optimizer.step()
        seen.append(evaluate())
seen.append(evaluate())
keep(run, seen=seen)
"""

EVALUATIONS = {
    "without gradients": "with torch.no_grad():\n        return [len(x) for (x,) in valid]",
    "in eval mode": (
        "model.eval()\n    found = [len(x) for (x,) in valid]\n    model.train()\n    return found"
    ),
    "in neither way": "return [len(x) for (x,) in valid]",
}


@pytest.mark.parametrize("how", EVALUATIONS)
def test_evaluation_on_a_prepared_loader_is_one_pass(launch, how):
    ran = launch(DATA.replace("EVALUATION", EVALUATIONS[how]), workers=2, steps=4)
    assert ran.code == 0, ran.err
    passes = [found for kept in ran.kept.values() for found in kept["seen"]]
    if how == "in neither way":  # the first batches are those that the worker would train on
        passes = [sorted(found, reverse=True) for found in passes]
    assert passes == [[3, 3, 1]] * 10
    if how == "in eval mode":
        assert {gradient.samples for gradient in ran.trace.gradients()} == {2}


def test_training_in_eval_mode_does_not_end_after_one_pass(launch):
    source = """
from torch.utils.data import DataLoader, TensorDataset
loader = DataLoader(TensorDataset(torch.arange(10.0)), batch_size=2)
model = nn.Linear(1, 1).eval()
optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
run = paceline.join()
model, optimizer, loader = run.prepare(model, optimizer, loader)
while not run.finished:
    for (x,) in loader:
        optimizer.zero_grad()
        model(x.reshape(-1, 1)).mean().backward()
        optimizer.step()
"""
    ran = launch(source, workers=1, steps=13)
    assert ran.code == 0, ran.err
    assert {gradient.samples for gradient in ran.trace.gradients()} == {2}


LOADED = (
    SETUP
    + """
loader = [torch.ones(2, 4)] * 3
optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
run = paceline.join()
model, optimizer, loader = run.prepare(model, optimizer, loader)

def step(x):
    optimizer.zero_grad()
    loss_of(run.worker, run.version).backward()
    optimizer.step()
"""
)


def test_endlessly_restarted_loop_ends_after_the_end(launch):
    source = (
        LOADED
        + """
from paceline.run.worker import batch_stream
batch_stream.AFTER_END_S = 0.5

def cycle(loader):
    while True:
        yield from loader

for x in cycle(loader):
    step(x)
"""
    )
    ran = launch(source, workers=1, steps=4)
    assert ran.code == 0
    [line] = ran.err.splitlines()
    assert "the run has ended, so its loaders are empty, so this worker ends its script" in line
    assert "leave the loop when run.finished is true" in line


NEXT = (
    LOADED
    + """
batches = iter(loader)
for _ in range(TURNS):
    try:
        x = next(batches)
    except StopIteration:
        batches = iter(loader)
        x = next(batches)
    step(x)
"""
)


ENDLESS = (
    LOADED.replace("* 3", "* 3000")
    + """
batches = iter(loader)
while True:
    step(next(batches))
"""
)


@pytest.mark.parametrize("source", [NEXT, ENDLESS])
def test_script_that_calls_next_ends_with_the_run(launch, source):
    ran = launch(source.replace("TURNS", "100_000"), workers=2, steps=5)
    assert ran.code == 0, ran.err
    assert "Traceback" not in ran.err
    lines = [line for line in ran.err.splitlines() if line.startswith("worker")]
    assert len(lines) == 2
    assert all("asked for another batch with next()" in line for line in lines)


def test_script_that_calls_next_gets_a_batch_after_it_has_missed_epochs(launch):
    source = NEXT.replace("TURNS", "4 if run.is_first else 100_000")
    latency = "3ms; worker 0 x50"
    ran = launch(source, steps=None, latency=latency, policy="async")
    assert ran.code == 0, ran.err
    assert "Traceback" not in ran.err
    assert sum(gradient.worker == 0 for gradient in ran.trace.gradients()) == 4
    assert sum(gradient.worker == 1 for gradient in ran.trace.gradients()) > 30  # ten epochs


def test_loop_over_epochs_still_works(launch):
    source = (
        LOADED
        + """
for epoch in range(1000):
    for x in loader:
        step(x)
"""
    )
    ran = launch(source, workers=2, steps=4)
    assert ran.code == 0, ran.err


def test_random_numbers_differ_between_workers(launch):
    source = (
        TRAINING
        + """
import random
import numpy
random.seed(0)
numpy.random.seed(0)
run = paceline.join()
model, optimizer = run.prepare(model, optimizer)
keep(run, drawn=[random.random(), float(numpy.random.rand()), float(torch.rand(()))])
while not run.finished:
    loss_of(run.worker, run.version).backward()
    optimizer.step()
"""
    )
    first, second = (launch(source, workers=3, steps=1) for _ in range(2))
    drawn = [first.kept[worker]["drawn"] for worker in range(3)]
    assert all(len(set(column)) == 3 for column in zip(*drawn, strict=True))
    assert drawn == [second.kept[worker]["drawn"] for worker in range(3)]
    assert drawn[0][:2] == [0.8444218515250481, 0.5488135039273248]  # as in a plain script


def test_after_the_end_a_script_may_change_load_and_save_weights(launch):
    source = (
        TRAINING
        + """
run = paceline.join()
model, optimizer = run.prepare(model, optimizer)
best = {name: tensor.clone() for name, tensor in model.state_dict().items()}
torch.save(model, OUT / f"whole-{run.worker}.pt")
while not run.finished:
    optimizer.zero_grad()
    loss_of(run.worker, run.version).backward()
    optimizer.step()
last = [p.detach().clone() for p in model.parameters()]
with torch.no_grad():
    for p in model.parameters():
        p.mul_(2.0)
doubled = [p.detach().clone() for p in model.parameters()]
model.load_state_dict(best)
loaded = [p.detach().clone() for p in model.parameters()]
loss_of(0, 0).backward()  # and a gradient does not come into their memory
again = [p.detach().clone() for p in model.parameters()]
keep(run, last=last, doubled=doubled, loaded=loaded, again=again, best=list(best.values()))
"""
    )
    ran = launch(source, workers=2, steps=5)
    assert ran.code == 0, ran.err
    for kept in ran.kept.values():
        torch.testing.assert_close(kept["doubled"], [2 * p for p in kept["last"]])
        torch.testing.assert_close(kept["loaded"], kept["best"])
        torch.testing.assert_close(kept["again"], kept["best"])
    torch.testing.assert_close(ran.kept[0]["last"], ran.kept[1]["last"], rtol=0, atol=0)


def test_script_may_load_its_best_weights_before_the_run_ends(launch):
    source = (
        TRAINING
        + """
run = paceline.join()
model, optimizer = run.prepare(model, optimizer)
for _ in range(3):
    optimizer.zero_grad()
    loss_of(run.worker, run.version).backward()
    optimizer.step()
    if run.version == 2:
        best = {name: tensor.clone() for name, tensor in model.state_dict().items()}
last = [p.detach().clone() for p in model.parameters()]
model.load_state_dict(best)
optimizer.state_dict()  # receives whatever the server has sent meanwhile
loaded = [p.detach().clone() for p in model.parameters()]
with torch.no_grad():
    for p in model.parameters():
        p.mul_(2.0)
doubled = [p.detach().clone() for p in model.parameters()]
keep(run, last=last, loaded=loaded, doubled=doubled, best=list(best.values()))
"""
    )
    ran = launch(source, workers=2, steps=20)
    assert ran.code == 0, ran.err
    assert len(list(ran.trace.updates())) == 3
    for kept in ran.kept.values():
        torch.testing.assert_close(kept["loaded"], kept["best"], rtol=0, atol=0)
        torch.testing.assert_close(kept["doubled"], [2 * p for p in kept["best"]])
        assert not torch.equal(kept["last"][0], kept["loaded"][0])


def test_script_that_trains_with_weights_it_loaded_is_told_so(launch):
    source = (
        TRAINING
        + """
run = paceline.join()
model, optimizer = run.prepare(model, optimizer)
for step in range(4):
    optimizer.zero_grad()
    loss_of(run.worker, run.version).backward()
    optimizer.step()
    if step == 1:
        model.load_state_dict(model.state_dict())
"""
    )
    ran = launch(source, workers=1, steps=20)
    assert ran.code == 2
    assert "optimizer.step() was called after weights were loaded" in ran.err
    assert "Traceback" not in ran.err


def test_pickled_model_loads_without_paceline(launch, tmp_path):
    source = """
model = nn.Sequential(nn.Linear(2, 2))
run = paceline.join()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer = run.prepare(model, optimizer)
if run.is_first:
    torch.save(model, OUT / "whole.pt")
optimizer.step()
"""
    ran = launch(source, workers=1, steps=1)
    assert ran.code == 0, ran.err
    load = (
        "import sys, torch; m = torch.load(sys.argv[1], weights_only=False); "
        "m.load_state_dict(m.state_dict()); print('paceline' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", load, tmp_path / "run-1" / "whole.pt"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "False\n"


# ---------------------------------------------------------------------------------- how scripts end


@pytest.mark.parametrize(
    ("source", "code", "what"),
    [
        ("", 1, "nothing was trained: the script never called run.prepare()"),
        ("def", 1, "SyntaxError: invalid syntax"),
        (TRAINING + "paceline.join().prepare(model, optimizer)", 1, "no update was made"),
        (TRAINING + "paceline.join().prepare([model], optimizer)", 2, "one by one, not in lists"),
        (TRAINING + "paceline.join().prepare(model, optimizer, 'a')", 2, "got str"),
        (
            TRAINING + "lb = torch.optim.LBFGS(model.parameters())\npaceline.join().prepare(lb)",
            2,
            "LBFGS needs a closure, which the server can't call",
        ),
    ],
    ids=["never", "syntax", "no update", "lists", "text", "closure"],
)
def test_script_that_trains_nothing_fails(script, capsys, forkserver, source, code, what):
    path = script(source)
    run_dir = path.parent / "run"
    run_dir.mkdir()
    options = {"script": str(path), "arguments": (str(run_dir),)}
    settings = Settings(spec=RunSpec(workers=2, steps=3), **options)
    assert Launcher(settings, run_dir, forkserver).run() == code
    err = capsys.readouterr().err
    assert what in err
    assert "runpy" not in err


def test_losing_worker_0_says_that_is_first_work_is_not_done(launch):
    trouble = """
def trouble(run):
    if run.worker == 0 and run.version == 2:
        strike()
"""
    ran = launch(troubled(trouble), workers=2, steps=5)
    assert ran.code == 1
    assert (
        "worker 0 was lost, so what the script does only once (`if run.is_first`) is not done"
        in ran.err
    )


def test_worker_with_only_non_finite_gradients_is_named_once(launch):
    source = (
        TRAINING
        + """
run = paceline.join()
model, optimizer = run.prepare(model, optimizer)
while not run.finished:
    optimizer.zero_grad()
    (loss_of(run.worker, run.version) * (float("nan") if run.worker == 1 else 1.0)).backward()
    optimizer.step()
"""
    )
    ran = launch(source, workers=2, steps=6)
    assert ran.code == 0, ran.err
    assert ran.out.count("refused a gradient of worker 1 that contains NaN or infinity") == 1


def test_delay_for_an_unknown_worker_is_refused():
    with pytest.raises(SpecError, match="names worker 9; the workers are 0 to 1"):
        Settings(spec=RunSpec(workers=2), latency="10ms; worker 9 x2")


def test_processes_have_distinct_names(launch):
    source = (
        TRAINING
        + """
run = paceline.join()
model, optimizer = run.prepare(model, optimizer)
while not run.finished:
    loss_of(run.worker, run.version).backward()
    optimizer.step()
keep(run, name=open("/proc/self/comm").read())
"""
    )
    ran = launch(source, workers=2, steps=1)
    assert {w: kept["name"] for w, kept in ran.kept.items()} == {
        0: "paceline-w0\n",
        1: "paceline-w1\n",
    }
