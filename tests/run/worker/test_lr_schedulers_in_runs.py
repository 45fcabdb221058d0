# SPDX-License-Identifier: BSD-3-Clause
"""In a run, schedulers do what the script says, and all workers have the same learning rate.

A rate that any worker's script sets by hand applies to all workers.
"""

import pytest
import torch

import paceline
from plain import LATE, LOOP, SETUP, assert_same, execute, train, weights

STEPS = 8
SGD = SETUP + "optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)\n"

SCHEDULERS = {
    "step": "S.StepLR(optimizer, step_size=3, gamma=0.5)",
    "multi-step": "S.MultiStepLR(optimizer, milestones=[2, 5])",
    "exponential": "S.ExponentialLR(optimizer, gamma=0.7)",
    "cosine": "S.CosineAnnealingLR(optimizer, T_max=8)",
    "lambda": "S.LambdaLR(optimizer, lambda step: 1 / (1 + step))",
    "one-cycle": "S.OneCycleLR(optimizer, max_lr=0.2, total_steps=8)",  # changes the momentum, too
    "cyclic": "S.CyclicLR(optimizer, base_lr=0.05, max_lr=0.2, step_size_up=3)",
    "sequential": (
        "S.SequentialLR(optimizer, [S.LinearLR(optimizer, total_iters=3),"
        " S.ExponentialLR(optimizer, gamma=0.5)], milestones=[3])"
    ),
    "chained": (
        "S.ChainedScheduler([S.LinearLR(optimizer, total_iters=3),"
        " S.ExponentialLR(optimizer, gamma=0.5)])"
    ),
}

SCHEDULED_LOOP = (
    LATE
    + """
run = paceline.join()
model, optimizer, scheduler = run.prepare(model, optimizer, scheduler)
seen = []
while not run.finished:
    be_late(run, LAST)
    [group] = optimizer.param_groups
    seen.append((run.version, group["lr"], group["momentum"], scheduler.get_last_lr()))
    optimizer.zero_grad()
    loss_of(run.worker, run.version).backward()
    optimizer.step()
    for _ in range(CALLS):
        scheduler.step()
be_late(run, LAST)
keep(run, seen=seen, end=scheduler.get_last_lr(), weights=[p.detach() for p in model.parameters()])
"""
)


def scheduled(kind):
    """Return a source with this scheduler."""
    return f"{SGD}S = torch.optim.lr_scheduler\nscheduler = {SCHEDULERS[kind]}\n"


@pytest.mark.filterwarnings("ignore:The epoch parameter")  # used by SequentialLR itself
@pytest.mark.parametrize("kind", SCHEDULERS)
def test_learning_rate_of_a_version_is_the_same_for_a_late_worker(launch, kind):
    names = execute(scheduled(kind))
    optimizer, scheduler = names["optimizer"], names["scheduler"]
    expected = {}
    for version in range(STEPS):
        [group] = optimizer.param_groups
        expected[version] = (version, group["lr"], group["momentum"], scheduler.get_last_lr())
        optimizer.zero_grad()
        names["loss_of"](0, version).backward()
        optimizer.step()
        scheduler.step()
    loop = SCHEDULED_LOOP.replace("LAST", str(STEPS)).replace("CALLS", "1")
    ran = launch(scheduled(kind) + loop, steps=STEPS, policy="backup:1")
    assert ran.code == 0, ran.err
    assert {g.worker for g in ran.trace.gradients() if g.fate == "accepted"} == {0}
    assert [version for version, *_ in ran.kept[0]["seen"]] == list(range(STEPS))
    assert [version for version, *_ in ran.kept[1]["seen"]] == [0, 2, 4, 6]
    for kept in ran.kept.values():
        assert kept["seen"] == [expected[version] for version, *_ in kept["seen"]]
        assert kept["end"] == scheduler.get_last_lr()
        assert_same(kept["weights"], weights(names))


@pytest.mark.parametrize("calls", [0, 1, 3])
def test_every_call_of_a_script_without_a_loader_counts(launch, calls):
    loop = SCHEDULED_LOOP.replace("be_late(run, LAST)", "").replace("CALLS", str(calls))
    ran = launch(scheduled("exponential") + loop, steps=4)
    expected = [0.1 * 0.7 ** (calls * version) for version in range(4)]
    for kept in ran.kept.values():
        assert [lr for _, lr, *_ in kept["seen"]] == pytest.approx(expected)


@pytest.mark.parametrize("calls", [0, 1, 3])
def test_script_started_by_hand_has_the_same_learning_rates(calls):
    names = execute(scheduled("exponential"))
    run = paceline.join()
    _, optimizer, scheduler = run.prepare(names["model"], names["optimizer"], names["scheduler"])
    rates = []
    for _ in range(4):
        rates += scheduler.get_last_lr()
        optimizer.step()
        for _ in range(calls):
            scheduler.step()
    assert rates == pytest.approx([0.1 * 0.7 ** (calls * version) for version in range(4)])


def test_scheduler_follows_the_steps_of_its_own_optimizer(launch):
    """One of them steps in only some of the updates."""
    ran = launch(
        SETUP
        + """
optimizers = [torch.optim.SGD(layer.parameters(), lr=1.0) for layer in (model[0], model[2])]
schedulers = [torch.optim.lr_scheduler.ExponentialLR(o, gamma=0.5) for o in optimizers]
run = paceline.join()
run.prepare(model, *optimizers, *schedulers)
seen = []
while not run.finished:
    seen.append([o.param_groups[0]["lr"] for o in optimizers])
    loss_of(run.worker, run.version).backward()
    number = 0 if run.version % 3 else 1
    optimizers[number].step()
    schedulers[number].step()
    model.zero_grad()
keep(run, seen=seen)
""",
        steps=5,
    )
    expected = [[1.0, 1.0], [1.0, 0.5], [0.5, 0.5], [0.25, 0.5], [0.25, 0.25]]
    assert [kept["seen"] for kept in ran.kept.values()] == [expected, expected]


# ------------------------------------------------------------------------------- epochs and batches

EPOCHS = """
S = torch.optim.lr_scheduler
scheduler = S.StepLR(optimizer, step_size=2, gamma=0.1)
run = paceline.join()
model, optimizer, scheduler = run.prepare(model, optimizer, scheduler)
seen = {}
for epoch in range(4):
    for _ in range(3):
        seen[run.version] = (optimizer.param_groups[0]["lr"], scheduler.last_epoch)
        optimizer.zero_grad()
        loss_of(run.worker, run.version).backward()
        optimizer.step()
    scheduler.step()
keep(run, seen=seen, last=scheduler.last_epoch, weights=[p.detach() for p in model.parameters()])
"""


def test_scheduler_called_per_epoch_steps_once_per_epoch_for_all_workers(launch):
    ran = launch(SGD + EPOCHS, steps=12)
    assert ran.code == 0, ran.err
    assert ran.out.count("StepLR: one step per call in the script") == 1
    names = execute(SGD)
    scheduler = torch.optim.lr_scheduler.StepLR(names["optimizer"], step_size=2, gamma=0.1)
    expected = {}
    for version in range(12):
        expected[version] = (names["optimizer"].param_groups[0]["lr"], scheduler.last_epoch)
        names["optimizer"].zero_grad()
        for worker in (0, 1):
            (names["loss_of"](worker, version) / 2).backward()
        names["optimizer"].step()
        if version % 3 == 2:
            scheduler.step()
    for kept in ran.kept.values():
        assert kept["seen"] == expected
        assert kept["last"] == 4
        for actual, plain in zip(kept["weights"], weights(names), strict=True):
            assert torch.equal(actual, plain)


LOADER = """
torch.manual_seed(0)
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = torch.utils.data.TensorDataset(torch.randn(SAMPLES, 4), torch.randn(SAMPLES, 1))
loader = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True)
scheduler = SCHEDULER
run = paceline.join()
model, optimizer, scheduler, loader = run.prepare(model, optimizer, scheduler, loader)
"""

BATCHES = """
seen = []
while not run.finished:
    for x, y in loader:
        seen.append((run.version, optimizer.param_groups[0]["lr"]))
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        scheduler.step()
keep(run, seen=seen, last=scheduler.last_epoch, rates=scheduler.get_last_lr(),
     there=optimizer.state_dict()["param_groups"][0]["lr"])
"""


def with_scheduler(source, scheduler, samples=40):
    source = source.replace("SAMPLES", str(samples))
    return source.replace("SCHEDULER", f"torch.optim.lr_scheduler.{scheduler}")


@pytest.mark.parametrize("policy", ["sync", "backup:1", "async"])
def test_scheduler_called_per_mini_batch_follows_the_accepted_gradients(launch, policy):
    source = with_scheduler(LOADER, "CosineAnnealingLR(optimizer, T_max=30)") + BATCHES
    ran = launch(source, workers=3, steps=None, samples=30 * 4, policy=policy)
    assert ran.code == 0, ran.err
    assert ran.out.count("CosineAnnealingLR: one step per accepted mini-batch") == 1
    accepted = sum(len(update.contributors) for update in ran.trace.updates())
    assert accepted == 30
    for kept in ran.kept.values():
        assert kept["last"] == 30
        assert kept["rates"] == [kept["there"]] == pytest.approx([0.0], abs=1e-12)


def test_learning_rate_of_a_version_depends_on_the_gradients_in_it(launch):
    source = with_scheduler(LOADER, "LambdaLR(optimizer, lambda n: 1.0 / (1 + n))") + BATCHES
    ran = launch(source, workers=2, steps=6)
    for kept in ran.kept.values():
        assert kept["seen"] == [(v, pytest.approx(0.1 / (1 + 2 * v))) for v in range(6)]


def test_scheduler_called_once_per_several_mini_batches_steps_as_often(launch):
    source = with_scheduler(LOADER, "LambdaLR(optimizer, lambda n: 1.0 / (1 + n))") + BATCHES
    source = source.replace("        scheduler.step()", "        len(seen) % 3 or scheduler.step()")
    ran = launch(source, workers=2, steps=12)
    assert ran.out.count("LambdaLR: one step per 3 accepted mini-batches") == 1
    for kept in ran.kept.values():
        assert kept["last"] == 24 * 3 // 11  # 24 gradients; 3 calls in 11 steps before the last


PASSES = """
seen = []
for epoch in range(3):
    for number, (x, y) in enumerate(loader):
        seen.append(optimizer.param_groups[0]["lr"])
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()
    scheduler.step()
keep(run, seen=seen, last=scheduler.last_epoch)
"""


def test_scheduler_called_after_a_pass_steps_once_per_pass(launch):
    scheduler = "StepLR(optimizer, step_size=1, gamma=0.5)"
    source = with_scheduler(LOADER + PASSES, scheduler, samples=32)
    ran = launch(source, workers=2, steps=12)
    assert ran.code == 0, ran.err
    assert ran.out.count("StepLR: one step per epoch") == 1
    for kept in ran.kept.values():
        assert kept["seen"] == [0.1] * 4 + [0.05] * 4 + [0.025] * 4
        assert kept["last"] == 3


def test_scheduler_called_after_a_pass_that_the_script_left_steps_once_per_pass(launch):
    scheduler = "StepLR(optimizer, step_size=1, gamma=0.5)"
    passes = PASSES.replace(
        "    scheduler.step()", "        if number == 3:\n            break\n    scheduler.step()"
    )
    ran = launch(with_scheduler(LOADER + passes, scheduler), workers=2, steps=None)
    assert ran.code == 0, ran.err
    assert ran.out.count("StepLR: one step per epoch") == 1
    for kept in ran.kept.values():
        assert kept["seen"] == [0.1] * 4 + [0.05] * 4 + [0.025] * 4
        assert kept["last"] == 3


@pytest.mark.filterwarnings("ignore:The epoch parameter")
def test_scheduler_that_is_passed_the_epoch_steps_to_it(launch):
    scheduler = "CosineAnnealingWarmRestarts(optimizer, T_0=2)"
    call = "scheduler.step(epoch + (number + 1) / 4)"
    passes = PASSES.replace("    scheduler.step()\n", f"        {call}\n")
    source = with_scheduler(LOADER + passes, scheduler, samples=32)
    ran = launch(source, workers=2, steps=12)
    assert ran.code == 0, ran.err
    plain = execute(SGD)["optimizer"]
    expected = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(plain, T_0=2)
    rates = []
    for turn in range(12):
        rates.append(plain.param_groups[0]["lr"])
        expected.step((turn + 1) / 4)
    for kept in ran.kept.values():
        assert kept["seen"] == rates


PLATEAU = """
seen = {}
for epoch in range(8):
    for x, y in loader:
        seen[run.version] = optimizer.param_groups[0]["lr"]
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()
    scheduler.step(METRIC)
    rates = scheduler.get_last_lr()
keep(run, seen=seen, rates=rates, there=optimizer.state_dict()["param_groups"][0]["lr"],
     bad=scheduler.num_bad_epochs)
"""


@pytest.mark.parametrize(
    ("metric", "halvings"),
    [
        ("1.0 if run.is_first else 1.0 / (1 + epoch)", 3),  # improves in the others only
        ("1.0 / (1 + epoch) if run.is_first else 1.0", 0),
        ("torch.tensor(1.0)", 3),
    ],
)
def test_plateau_steps_with_the_metric_of_worker_0(launch, metric, halvings):
    scheduler = "ReduceLROnPlateau(optimizer, patience=1, factor=0.5)"
    plateau = PLATEAU.replace("METRIC", metric)
    source = with_scheduler(LOADER + plateau, scheduler, samples=16)
    ran = launch(source, workers=2, steps=16)
    assert ran.code == 0, ran.err
    assert ran.out.count("ReduceLROnPlateau: steps with the metric of worker 0") == 1
    plain = execute(SGD)["optimizer"]
    expected = torch.optim.lr_scheduler.ReduceLROnPlateau(plain, patience=1, factor=0.5)
    rates = []
    for epoch in range(8):
        rates += plain.param_groups[0]["lr"], plain.param_groups[0]["lr"]
        expected.step(1.0 if halvings else 1.0 / (1 + epoch))
    assert rates[-1] == 0.1 * 0.5**halvings
    for worker, kept in ran.kept.items():
        # The metric goes to the server with the next gradient, and the rate from there to others.
        late = [rates[max(0, version - 1)] for version in range(16)]
        assert kept["seen"] == dict(enumerate(late if worker else rates))
        assert kept["there"] == kept["rates"][0] == rates[-1]
        assert worker or kept["bad"] == expected.num_bad_epochs


# ------------------------------------------------------------------------------------------ by hand

BY_HAND = """
run = paceline.join()
model, optimizer = run.prepare(model, optimizer)
seen = {}
while not run.finished:
    seen[run.version] = optimizer.param_groups[0]["lr"]
    if run.worker == WHO and run.version >= 2:
        optimizer.param_groups[0]["lr"] = 0.03
    optimizer.zero_grad()
    loss_of(run.worker, run.version).backward()
    optimizer.step()
keep(run, seen=seen, weights=[p.detach().clone() for p in model.parameters()])
"""


@pytest.mark.parametrize("who", [0, 1])
def test_learning_rate_set_in_one_worker_applies_to_all(launch, who):
    ran = launch(SGD + BY_HAND.replace("WHO", str(who)), steps=STEPS)
    names = execute(SGD)
    for version in range(STEPS):
        if version == 2:
            names["optimizer"].param_groups[0]["lr"] = 0.03
        names["optimizer"].zero_grad()
        for worker in (0, 1):
            (names["loss_of"](worker, version) / 2).backward()
        names["optimizer"].step()
    for worker, kept in ran.kept.items():
        assert kept["seen"] == {v: 0.1 if v < 3 else 0.03 for v in range(STEPS)}, worker
        assert_same(kept["weights"], weights(names))


@pytest.mark.parametrize("late", ["cancel", "finish"])
@pytest.mark.parametrize("backward", ["loss.backward()", "run.backward(loss)"])
def test_learning_rate_set_by_a_worker_that_is_always_late_applies_to_all(launch, late, backward):
    ran = launch(
        SGD
        + LATE
        + f"""
run = paceline.join()
model, optimizer = run.prepare(model, optimizer)
while not run.finished:
    if not run.is_first:
        optimizer.param_groups[0]["lr"] = 0.03
    optimizer.zero_grad()
    loss = loss_of(run.worker, run.version)
    be_late(run, {STEPS})
    {backward}
    optimizer.step()
be_late(run, {STEPS})
keep(run, lr=optimizer.param_groups[0]["lr"], state=optimizer.state_dict())
""",
        steps=STEPS,
        policy="backup:1",
        late=late,
    )
    assert {g.worker for g in ran.trace.gradients() if g.fate == "accepted"} == {0}
    assert ran.kept[0]["lr"] == 0.03
    assert ran.kept[0]["state"]["param_groups"][0]["lr"] == 0.03


def test_learning_rate_set_with_a_non_finite_gradient_applies_to_all(launch):
    ran = launch(
        SGD
        + """
run = paceline.join()
model, optimizer = run.prepare(model, optimizer)
has_overflowed = False
while not run.finished:
    optimizer.zero_grad()
    loss = loss_of(run.worker, run.version)
    if run.version == 2 and run.is_first and not has_overflowed:
        optimizer.param_groups[0]["lr"] = 0.03
        loss, has_overflowed = loss * float("inf"), True
    loss.backward()
    optimizer.step()
keep(run, lr=optimizer.param_groups[0]["lr"], state=optimizer.state_dict())
""",
        steps=4,
    )
    assert "non-finite" in [g.fate for g in ran.trace.gradients()]
    for kept in ran.kept.values():
        assert (kept["lr"], kept["state"]["param_groups"][0]["lr"]) == (0.03, 0.03)


@pytest.mark.parametrize(
    ("option", "value"),
    [("momentum", 0.0), ("weight_decay", 0.5), ("nesterov", True), ("maximize", True)],
)
def test_other_options_set_in_one_worker_apply_to_all(launch, option, value):
    change = f"    optimizer.param_groups[0][{option!r}] = {value!r}\n"
    loop = LOOP.replace("    optimizer.zero_grad()", f"{change}    optimizer.zero_grad()")
    ran = launch(SGD + loop, steps=4)
    source = SGD + f"optimizer.param_groups[0][{option!r}] = {value!r}\n"
    assert_same(ran.kept[0]["weights"], weights(train(source, 4)))


SAVED = """
S = torch.optim.lr_scheduler
scheduler = S.ExponentialLR(optimizer, gamma=0.5)
if OUT.joinpath("resume").exists():
    scheduler.load_state_dict(torch.load(OUT / "resume"))
    optimizer.param_groups[0]["lr"] = scheduler.get_last_lr()[0]
run = paceline.join()
model, optimizer, scheduler = run.prepare(model, optimizer, scheduler)
try:
    scheduler.load_state_dict({})
except paceline.SpecError as error:
    refused = str(error)
while not run.finished:
    optimizer.zero_grad()
    loss_of(run.worker, run.version).backward()
    optimizer.step()
    scheduler.step()
keep(
    run,
    refused=refused,
    rates=(optimizer.param_groups[0]["lr"], optimizer.state_dict()["param_groups"][0]["lr"]),
    state=scheduler.state_dict(),
)
"""


def test_scheduler_state_is_plain_and_can_be_resumed(launch):
    first = launch(SGD + SAVED, workers=1, steps=3)
    assert first.code == 0, first.err
    kept = first.kept[0]
    assert "load the state of a scheduler before run.prepare()" in kept["refused"]
    assert kept["rates"] == (pytest.approx(0.1 / 8), pytest.approx(0.1 / 8))
    assert kept["state"].keys() == execute_scheduler().state_dict().keys()

    resume = "torch.save(" + repr(kept["state"]) + ', OUT / "resume")\n'
    second = launch(SGD + resume + SAVED, workers=1, steps=2)
    assert second.code == 0, second.err
    assert second.kept[0]["rates"] == (pytest.approx(0.1 / 32), pytest.approx(0.1 / 32))
    assert second.kept[0]["state"]["last_epoch"] == 5


def execute_scheduler():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)


def test_scheduler_continues_from_a_learning_rate_set_by_hand(launch):
    source = (
        SGD
        + """
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)
run = paceline.join()
model, optimizer, scheduler = run.prepare(model, optimizer, scheduler)
while not run.finished:
    if run.worker == 0 and run.version == 3:
        optimizer.param_groups[0]["lr"] = 64.0
    optimizer.zero_grad()
    (loss_of(run.worker, run.version) * 0.0).backward()
    optimizer.step()
    scheduler.step()
keep(
    run,
    here=optimizer.param_groups[0]["lr"],
    there=optimizer.state_dict()["param_groups"][0]["lr"],
)
"""
    )
    ran = launch(source, workers=2, steps=8)
    assert ran.code == 0, ran.err
    assert [(kept["here"], kept["there"]) for kept in ran.kept.values()] == [(2.0, 2.0)] * 2
