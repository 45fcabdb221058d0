# SPDX-License-Identifier: BSD-3-Clause
"""A resumed run keeps what its schedulers follow, and how far they are."""

import pytest
import torch

from paceline.run.launch.launcher import Launcher
from paceline.run.settings import Settings
from paceline.spec import RunSpec
from plain import SETUP

START = (
    SETUP
    + """
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
loader = [(torch.full((2, 4), i / 7), torch.ones(2, 1)) for i in range(5)]
run = paceline.join()
"""
)
END = """
keep(
    run,
    steps=scheduler.last_epoch,
    lr=optimizer.state_dict()["param_groups"][0]["lr"],
    weights=[p.detach().clone() for p in model.parameters()],
)
"""
WITHOUT_LOADER = """
model, optimizer, scheduler = run.prepare(model, optimizer, scheduler)
turns = 0
while not run.finished:
    optimizer.zero_grad()
    loss_of(run.worker, run.version).backward()
    optimizer.step()
    turns += 1
    turns % EVERY or scheduler.step()
"""
WITH_LOADER = """
model, optimizer, scheduler, loader = run.prepare(model, optimizer, scheduler, loader)
for epoch in range(5):
    for x, y in loader:
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        scheduler.step()
"""


@pytest.fixture
def train(tmp_path, script, forkserver, capsys):
    """Run the script in a folder to this number of updates; resume the run in it, if any."""

    def run(name, source, steps):
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        settings = Settings(
            spec=RunSpec(workers=2, steps=steps),
            script=str(script(START + source + END)),
            arguments=(str(folder),),
        )
        capsys.readouterr()
        code = Launcher(settings, folder, forkserver).run()
        printed = capsys.readouterr()
        assert code == 0, printed.err
        return [torch.load(folder / f"worker-{worker}.pt") for worker in (0, 1)], printed.out

    return run


@pytest.mark.parametrize(
    ("source", "steps", "said"),
    [
        (WITHOUT_LOADER.replace("EVERY", "1"), 12, "one step per optimizer.step() of a worker"),
        (WITH_LOADER, 24, "one step per accepted mini-batch"),
    ],
    ids=["without a loader", "per mini-batch"],
)
def test_resumed_run_has_the_rates_and_weights_of_one_that_never_stopped(
    train, source, steps, said
):
    whole, _ = train("whole", source, 12)
    _, first = train("parts", source, 7)
    resumed, second = train("parts", source, 12)
    assert (first.count(f"StepLR: {said}"), second.count("StepLR: ")) == (1, 0)
    for ours, plain in zip(resumed, whole, strict=True):
        assert ours["steps"] == plain["steps"] == steps
        assert ours["lr"] == plain["lr"] == 0.1 * 0.5 ** (steps // 2)
        assert all(map(torch.equal, ours["weights"], plain["weights"]))


def test_calls_after_a_resume_are_added_to_those_before(train):
    source = WITHOUT_LOADER.replace("EVERY", "3")
    first, _ = train("parts", source, 7)
    assert [kept["steps"] for kept in first] == [2, 2]
    resumed, _ = train("parts", source, 14)  # seven more turns, and two more calls
    assert [kept["steps"] for kept in resumed] == [4, 4]
