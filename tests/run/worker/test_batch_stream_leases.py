# SPDX-License-Identifier: BSD-3-Clause
"""Scripts that train on one shared order, in real runs: passes, habits, and lost workers."""

import pytest

from failures import HELPERS
from paceline.watch.report import report
from plain import LATE

SIZE = 24

SETUP = """
from torch.utils.data import *
numbers = torch.arange(24.0)
data = TensorDataset(numbers)
run = paceline.join()
model = nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
loader = DataLoader(data, OPTIONS)
model, optimizer, loader = run.prepare(model, optimizer, loader)
seen, passes = [], []

def train(x):
    optimizer.zero_grad()
    model(x.reshape(-1, 1)).mean().backward()
    optimizer.step()
    seen.append(x.flatten().tolist())
"""

KEEP = "keep(run, seen=seen, passes=passes)\n"


def source(loop, options="4, shuffle=True"):
    return SETUP.replace("OPTIONS", options) + loop + KEEP


EPOCHS = """
for epoch in range(3):
    before = len(seen)
    for (x,) in loader:
        train(x)
    passes.append(len(seen) - before)
"""


def accepted(ran, stream=0):
    """Return the numbers of all batches of accepted gradients, in order of acceptance."""
    return [
        number
        for gradient in ran.trace.gradients()
        if gradient.fate == "accepted"
        for use in gradient.uses
        if use.stream == stream
        for number in use.numbers
    ]


def assert_all_once(ran, count):
    """Check that every batch was accepted once, and that none before the last ones is missing."""
    numbers = accepted(ran)
    assert len(set(numbers)) == len(numbers)
    assert len(numbers) >= count
    assert set(range(count)) <= set(numbers)


# ------------------------------------------------------------------------------------------- passes


@pytest.mark.parametrize("policy", ["sync", "backup:1", "async"])
@pytest.mark.parametrize(
    "options", ["4, shuffle=True", "5", "5, drop_last=True", "4, shuffle=True, num_workers=2"]
)
def test_script_with_a_loop_over_epochs_decides_how_long_the_run_is(launch, policy, options):
    ran = launch(source(EPOCHS, options), policy=policy, steps=None)
    assert (ran.code, ran.err) == (0, "")
    assert len(ran.kept[0]["passes"]) == 3
    batches = {"5": 5, "5, drop_last=True": 4}.get(options, 6)
    numbers = accepted(ran)
    assert len(set(numbers)) == len(numbers)
    if policy == "sync":
        assert all(kept["passes"] == ran.kept[0]["passes"] for kept in ran.kept.values())
    if "num_workers" not in options and policy == "sync":
        assert sorted(numbers[: 2 * batches]) == list(range(2 * batches))


def test_worker_that_joins_after_the_end_has_empty_passes(launch):
    """It can't tell a training loader from another one before the script makes a step."""
    late = """
import time
if run.worker == 1:
    while not (OUT / "weights.pt").exists():
        time.sleep(0.01)
model, optimizer, loader = run.prepare("""
    text = source(EPOCHS).replace("model, optimizer, loader = run.prepare(", late.strip())
    ran = launch(text, policy="async", steps=None)
    assert (ran.code, ran.err) == (0, "")
    assert ran.kept[1]["passes"] == [1, 0, 0]


def test_next_iter_yields_a_batch_in_every_epoch(launch):
    loop = """
for _ in range(12):
    (x,) = next(iter(loader))
    train(x)
"""
    ran = launch(source(loop), workers=1, steps=None)
    assert (ran.code, ran.err) == (0, "")
    assert accepted(ran) == list(range(12))
    flat = [x for batch in ran.kept[0]["seen"] for x in batch]
    assert sorted(flat[:SIZE]) == sorted(flat[SIZE:]) == list(range(SIZE))


def test_script_that_leaves_each_pass_early_loses_nothing(launch):
    loop = """
while not run.finished:
    for i, (x,) in enumerate(loader):
        if i == 2:
            break
        train(x)
"""
    ran = launch(source(loop, "4, shuffle=True, num_workers=2"), workers=1, steps=8)
    assert (ran.code, ran.err) == (0, "")
    assert accepted(ran) == list(range(8))


def test_batch_that_a_script_looks_at_before_it_trains_is_not_lost(launch):
    loop = """
(first,) = next(iter(loader))
passes.append(first.tolist())
for (x,) in loader:
    train(x)
"""
    ran = launch(source(loop), workers=1, steps=None)
    assert (ran.code, ran.err) == (0, "")
    assert accepted(ran) == list(range(6))
    assert ran.kept[0]["seen"][0] == ran.kept[0]["passes"][0]


VALIDATION = """
from torch.utils.data import *
train_data, val_data = TensorDataset(torch.arange(24.0)), TensorDataset(torch.arange(100.0, 111))
run = paceline.join()
model = nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
loader, val = DataLoader(train_data, 4, shuffle=True), DataLoader(val_data, 2, shuffle=True)
model, optimizer, loader, val = run.prepare(model, optimizer, loader, val)
seen = []
for epoch in range(3):
    for (x,) in loader:
        optimizer.zero_grad()
        model(x.reshape(-1, 1)).mean().backward()
        optimizer.step()
    seen.append([])
    MODE:
        for (x,) in val:
            model(x.reshape(-1, 1)).mean().item()
            seen[-1] += x.tolist()
keep(run, seen=seen)
"""


@pytest.mark.parametrize("mode", ["with torch.no_grad()", "if True"])
def test_validation_in_training_mode_is_a_whole_pass_in_each_worker(launch, mode):
    ran = launch(VALIDATION.replace("MODE", mode), steps=None)
    assert (ran.code, ran.err) == (0, "")
    for epoch in ran.kept[0]["seen"] + ran.kept[1]["seen"]:
        assert sorted(epoch) == [100.0 + i for i in range(11)]
    assert {g.samples for g in ran.trace.gradients()} == {4}
    assert accepted(ran, stream=1) == []


def test_two_loaders_are_read_together(launch):
    loop = """
from torch.utils.data import *
run = paceline.join()
model = nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
one, other = DataLoader(torch.arange(24.0), 4), DataLoader(torch.arange(100.0, 140), 4)
model, optimizer, one, other = run.prepare(model, optimizer, one, other)
for epoch in range(2):
    for a, b in zip(one, other):
        optimizer.zero_grad()
        model((a + b).reshape(-1, 1)).mean().backward()
        optimizer.step()
keep(run, version=run.version)
"""
    ran = launch(loop, steps=None)
    assert (ran.code, ran.err) == (0, "")
    assert ran.kept[0]["version"] == 6  # both passes end with the shorter loader
    assert sorted(accepted(ran)) == list(range(12))
    assert sorted(accepted(ran, stream=1)) == list(range(12))


def test_accumulated_gradient_uses_all_its_batches(launch):
    loop = """
for i, (x,) in enumerate(loader):
    model(x.reshape(-1, 1)).mean().backward()
    if i % 3 == 2:
        optimizer.step()
        optimizer.zero_grad()
"""
    ran = launch(source(loop), workers=2, steps=None)
    assert (ran.code, ran.err) == (0, "")
    assert [len(g.uses[0].numbers) for g in ran.trace.gradients()] == [3, 3]
    assert sorted(accepted(ran)) == list(range(6))
    assert [g.samples for g in ran.trace.gradients()] == [12, 12]


def test_batch_of_a_gan_counts_once(launch):
    loop = """
from torch.utils.data import *
run = paceline.join()
one, other = nn.Linear(1, 1), nn.Linear(1, 1)
first = torch.optim.SGD(one.parameters(), lr=0.001)
second = torch.optim.SGD(other.parameters(), lr=0.001)
loader = DataLoader(torch.arange(24.0), 4)
one, other, first, second, loader = run.prepare(one, other, first, second, loader)
steps = 0
for x in loader:
    for model, optimizer in ((one, first), (other, second)):
        optimizer.zero_grad()
        model(x.reshape(-1, 1)).mean().backward()
        optimizer.step()
    steps += 1
keep(run, steps=steps)
"""
    ran = launch(loop, steps=None)
    assert (ran.code, ran.err) == (0, "")
    assert [kept["steps"] for kept in ran.kept.values()] == [3, 3]
    assert sorted(set(accepted(ran))) == list(range(6))
    assert sum(g.new_samples for g in ran.trace.gradients()) == SIZE
    assert f" updates of {SIZE} samples in " in ran.out
    assert f", {SIZE} samples;" in report(ran.trace)[0]


def test_samples_of_a_late_worker_go_to_the_others(launch):
    loop = """
while not run.finished:
    for (x,) in loader:
        optimizer.zero_grad()
        loss = model(x.reshape(-1, 1)).mean()
        be_late(run, 8)
        run.backward(loss)
        optimizer.step()
        seen.append((x.tolist(), str(run.last.fate)))
be_late(run, 8)
"""
    ran = launch(LATE + source(loop), steps=8, policy="backup:1")
    assert (ran.code, ran.err) == (0, "")
    assert {fate for _, fate in ran.kept[1]["seen"]} <= {"late", "cancelled"}
    numbers = accepted(ran)
    assert len(set(numbers)) == len(numbers) == 8
    late = {tuple(batch) for batch, _ in ran.kept[1]["seen"]}
    assert late & {tuple(batch) for batch, _ in ran.kept[0]["seen"]}


# ------------------------------------------------------------------------------------- lost workers

STRUCK = """
def trouble(run):
    if run.worker == 1 and run.version == 4 and not was_told("struck-1"):
        strike(signal.NUMBER)
    elif run.worker == 1 and was_told("struck-1"):
        tell("is-back")
    elif run.worker == 0 and run.version == 12 and RETURNS:
        os.kill(int(wait_for("struck-1")), signal.SIGCONT)
        wait_for("is-back")

while not run.finished:
    for (x,) in loader:
        trouble(run)
        train(x)
"""


def struck(signal, options, returns=False):
    loop = STRUCK.replace("NUMBER", signal).replace("RETURNS", str(returns))
    return HELPERS + source(loop, options)


@pytest.mark.parametrize("options", ["4, shuffle=True", "4, shuffle=True, num_workers=2"])
@pytest.mark.parametrize("restart", [True, False])
def test_batches_of_a_worker_that_is_killed_are_not_lost(launch, options, restart):
    ran = launch(struck("SIGKILL", options), steps=20, min_workers=1, restart=restart)
    assert ran.code == 0, ran.err
    assert_all_once(ran, 16)


@pytest.mark.parametrize("options", ["4, shuffle=True", "4, shuffle=True, num_workers=2"])
def test_batches_of_a_stopped_worker_are_given_to_others(launch, options):
    ran = launch(struck("SIGSTOP", options, returns=True), steps=18, min_workers=1)
    assert ran.code == 0, ran.err
    assert_all_once(ran, 16)
    later = {g.worker for g in ran.trace.gradients() if g.fate == "accepted" and g.version > 12}
    assert later == {0, 1}


@pytest.mark.parametrize("policy", ["sync", "async"])
def test_pass_that_the_script_limits_has_as_many_batches_each_time(launch, policy):
    loop = """
for epoch in range(4):
    before = len(seen)
    for number, (x,) in enumerate(loader):
        if number == 2:
            break
        train(x)
    passes.append(len(seen) - before)
"""
    ran = launch(source(loop), policy=policy, steps=None)
    assert (ran.code, ran.err) == (0, "")
    assert ran.kept[0]["passes"] == [2] * 4


def test_script_with_many_epochs_left_after_the_goal_reaches_its_end(launch):
    ran = launch(source(EPOCHS.replace("range(3)", "range(1000)")), steps=6)
    assert (ran.code, ran.err) == (0, "")
    for kept in ran.kept.values():
        assert kept["passes"] == [3, 3] + [0] * 998


def test_script_that_goes_on_validating_after_the_goal_is_ended_cleanly(launch):
    loop = """
import paceline.run.worker.batch_stream as batch_stream
batch_stream.AFTER_END_S = 0.5
while True:
    for (x,) in loader:
        train(x)
    time.sleep(0.2)
"""
    ran = launch(source("import time\n" + loop), steps=6)
    assert ran.code == 0
    assert len(ran.err.splitlines()) == 2
    assert all("| the run has ended, so its loaders are empty" in x for x in ran.err.splitlines())


@pytest.mark.parametrize(
    ("iterations", "updates", "rates"),
    [
        ("range(12)", 12, [4, 3, 2, 1, *[0] * 8]),  # over after a third of the steps
        ("range(12 // run.workers)", 4, [4, 3, 2, 1]),
    ],
)
def test_loop_over_its_own_iterations_counts_the_steps_of_each_worker(
    launch, iterations, updates, rates
):
    """docs/migrating.md says what this means for the schedule and the data."""
    loop = """
from torch.utils.data import *
run = paceline.join()
model = nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=4.0)
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=12)
loader = DataLoader(torch.arange(24.0), 2)
model, optimizer, scheduler, loader = run.prepare(model, optimizer, scheduler, loader)

def endless():
    while True:
        yield from loader

batches, rates = endless(), []
for i in ITERATIONS:
    x = next(batches)
    rates.append(optimizer.param_groups[0]["lr"])
    optimizer.zero_grad()
    model(x.reshape(-1, 1)).mean().backward()
    optimizer.step()
    scheduler.step()
keep(run, rates=rates)
"""
    ran = launch(loop.replace("ITERATIONS", iterations), workers=3, steps=None, min_workers=3)
    assert (ran.code, ran.err) == (0, "")
    assert len(list(ran.trace.updates())) == updates
    for kept in ran.kept.values():
        assert kept["rates"] == pytest.approx(rates, abs=1e-9)
    assert f" updates of {updates * 3 * 2} samples in " in ran.out
