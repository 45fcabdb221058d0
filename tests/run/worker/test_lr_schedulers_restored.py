# SPDX-License-Identifier: BSD-3-Clause
"""After the loss of a server, scripts see the learning rates of the restored one.

The rate of a version is the same in each run, so that of a run whose server was killed must be that
of a run whose server wasn't.
"""

import pytest

from failures import HELPERS
from paceline.trace.schema import Restored
from plain import assert_same

STEPS = 16  # four epochs
START = (
    HELPERS
    + """
torch.manual_seed(0)
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
data = torch.utils.data.TensorDataset(torch.randn(32, 4), torch.randn(32, 1))
loader = torch.utils.data.DataLoader(data, batch_size=4)
S = torch.optim.lr_scheduler
scheduler = SCHEDULER
run = paceline.join()
model, optimizer, scheduler, loader = run.prepare(model, optimizer, scheduler, loader)
seen = []

def turn(x, y):
    there = optimizer.state_dict()["param_groups"][0]["lr"]
    here = optimizer.param_groups[0]["lr"]
    seen.append((run.version, here, there, scheduler.last_epoch, scheduler.get_last_lr()[0]))
    if run.is_first and run.version == 9:
        tell("asked")
    if KILLS and run.version == 9 and run.worker == 1 and not was_told("killed"):
        wait_for("asked")
        def is_saved():
            optimizer.state_dict()  # so that this worker receives the request for its position
            return list((OUT / "checkpoints").glob("*.ckpt"))
        wait_until(is_saved)
        tell("killed")
        os.kill(server_pid(), signal.SIGKILL)
    optimizer.zero_grad()
    (F.mse_loss(model(x), y) * 0.1).backward()
    optimizer.step()
"""
)
END = """
keep(run, seen=seen, end=optimizer.state_dict()["param_groups"][0]["lr"],
     weights=[p.detach() for p in model.parameters()])
"""

PER_EPOCH = """
for epoch in range(4):
    for x, y in loader:
        turn(x, y)
    scheduler.step(ARGUMENT)
"""
PER_BATCH = """
for epoch in range(4):
    for x, y in loader:
        turn(x, y)
        scheduler.step()
"""
WITHOUT_LOADER = """
turns = 0
while not run.finished:
    turn(*data[:4])
    turns += 1
    turns % EVERY or scheduler.step()
"""
HALVING = "S.ExponentialLR(optimizer, gamma=0.5)"
NESTED = (
    "S.SequentialLR(optimizer, [S.LinearLR(optimizer, total_iters=3),"
    " S.StepLR(optimizer, step_size=2, gamma=0.5)], milestones=[3])"
)


@pytest.fixture
def train(launch):
    def run(loop, scheduler, *, kills):
        """Return what each worker has seen, by version; and the version of the checkpoint."""
        source = f"KILLS = {kills}\n" + START.replace("SCHEDULER", scheduler) + loop + END
        ran = launch(source, steps=STEPS, restart=True, checkpoint_every="5")
        assert ran.code == 0, ran.err
        restored = [record.version for record in ran.trace.records if isinstance(record, Restored)]
        return ran.kept, restored

    return run


@pytest.mark.filterwarnings("ignore:The epoch parameter")
@pytest.mark.parametrize(
    ("loop", "scheduler"),
    [
        (PER_EPOCH.replace("ARGUMENT", ""), HALVING),
        (PER_EPOCH.replace("ARGUMENT", ""), NESTED),
        (PER_BATCH, HALVING),
        (PER_BATCH, "S.OneCycleLR(optimizer, max_lr=2.0, total_steps=40)"),
        (WITHOUT_LOADER.replace("EVERY", "1"), HALVING),
    ],
    ids=["per epoch", "nested", "per mini-batch", "momentum", "per turn"],
)
def test_scripts_see_the_rates_of_a_restored_server(train, loop, scheduler):
    plain, _ = train(loop, scheduler, kills=False)
    killed, restored = train(loop, scheduler, kills=True)
    assert restored == [5]
    for worker, kept in killed.items():
        expected = {version: row for version, *row in plain[worker]["seen"]}
        assert [version for version, *_ in kept["seen"]] == [*range(10), *range(5, STEPS)]
        for version, *row in kept["seen"]:
            assert row == expected[version], version
        assert kept["end"] == plain[worker]["end"]
        assert_same(kept["weights"], plain[worker]["weights"])  # so the server had these rates


@pytest.mark.filterwarnings("ignore:The epoch parameter")
@pytest.mark.parametrize(
    ("loop", "scheduler"),
    [
        (WITHOUT_LOADER.replace("EVERY", "3"), HALVING),
        (PER_EPOCH.replace("ARGUMENT", "epoch + 1"), HALVING),
    ],
    ids=["calls", "given epochs"],
)
def test_rates_here_and_on_a_restored_server_are_the_same(train, loop, scheduler):
    """Not all calls are made again, so the rates of its versions may be others than before."""
    killed, restored = train(loop, scheduler, kills=True)
    assert restored == [5]
    for kept in killed.values():
        for version, here, there, _, _ in kept["seen"]:
            assert here == there, version


def test_metrics_that_a_restored_server_forgot_lower_the_rate_again(train):
    loop = PER_EPOCH.replace("ARGUMENT", "1.0")
    killed, restored = train(loop, "S.ReduceLROnPlateau(optimizer, patience=0)", kills=True)
    assert restored == [5]
    for kept in killed.values():
        for version, here, there, _, _ in kept["seen"]:
            # The metric goes to the server with the next gradient, and the rate to other workers.
            assert here == there or version % 4 == 0
    # The last call is not followed by a gradient, so that the server doesn't know of it.
    assert [killed[worker]["end"] for worker in (0, 1)] == pytest.approx([0.001, 0.01])
