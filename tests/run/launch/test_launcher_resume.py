# SPDX-License-Identifier: BSD-3-Clause
"""Resuming a run, or restarting its server, doesn't change its result."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from failures import HELPERS
from paceline.run.launch.launcher import Launcher
from paceline.run.settings import Settings
from paceline.spec import RunSpec
from paceline.trace.reader import read_trace
from paceline.trace.schema import Ended, Restored
from paceline.watch.audit import audit

SOURCE = (
    HELPERS
    + """
import random
import numpy

class Jittered(torch.utils.data.Dataset):
    '''Uses every global random generator.'''

    def __len__(self):
        return 50

    def __getitem__(self, i):
        x = torch.full((6,), i / 50) + 0.1 * torch.randn(6)
        return x + random.random() / 10 + numpy.random.rand() / 10, torch.tensor([i / 25])

torch.manual_seed(1)
model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10, 0.8)
loader = torch.utils.data.DataLoader(Jittered(), batch_size=4, shuffle=True)

run = paceline.join()
model, optimizer, scheduler, loader = run.prepare(model, optimizer, scheduler, loader)
fixed = torch.randn(3)  # random numbers between `prepare` and the loop do not matter
while not run.finished:
    for x, y in loader:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        trouble(run)
        run.backward(loss)
        optimizer.step()
        scheduler.step()
        if run.is_first and run.version == 9:
            optimizer.param_groups[0]["weight_decay"] = 0.01
with run.averaged_weights(model) as averaged:
    average = [p.detach().clone() for p in averaged.parameters()]
keep(run, weights=model.state_dict(), average=average, optimizer=optimizer.state_dict())
"""
)
QUIET = "\ndef trouble(run): pass\n"
STEPS = 24

TrainFunction = Callable[..., Path]


@pytest.fixture
def train(tmp_path, script, forkserver, capsys) -> TrainFunction:
    """Run the script in a folder to this number of updates; resume the run in it, if any."""

    def run(
        name: str, trouble: str = QUIET, *, code: int = 0, steps: int = STEPS, **more: object
    ) -> Path:
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        settings = Settings(
            spec=RunSpec(workers=2, steps=steps, seed=5),
            ema=0.9,
            script=str(script(trouble + SOURCE)),
            arguments=(str(folder),),
            **{"checkpoint_every": "5", **more},
        )
        found = Launcher(settings, folder, forkserver).run()
        assert found == code, "".join(capsys.readouterr())
        audit(read_trace(folder / "trace.jsonl"))
        return folder

    return run


def results(folder):
    """Return the final state of each worker, and the final weights."""
    kept = [torch.load(file) for file in sorted(folder.glob("worker-*.pt"))]
    assert len(kept) == 2
    return [*kept, torch.load(folder / "weights.pt", weights_only=True)]


def restored(folder):
    """Return the versions that the run continued from."""
    trace = read_trace(folder / "trace.jsonl")
    return [record.version for record in trace.records if isinstance(record, Restored)]


def updates(folder):
    """Return the numbers of the updates in the order they were made."""
    return [update.update for update in read_trace(folder / "trace.jsonl").updates()]


def assert_equal(one, other):
    """Check that two nested values are equal, bit for bit."""
    assert type(one) is type(other)
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, other)
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_equal(one[key], other[key])
    elif isinstance(one, list):
        for a, b in zip(one, other, strict=True):
            assert_equal(a, b)
    else:
        assert one == other


@pytest.fixture
def whole(train):
    """Return the results of an undisturbed run."""
    return results(train("whole"))


@pytest.mark.parametrize("cuts", [[7], [5, 6, 15], [1, 23]])
def test_resumed_run_equals_one_that_never_stopped(train, whole, cuts):
    for steps in (*cuts, STEPS):
        folder = train("cut", steps=steps)
    assert_equal(results(folder), whole)
    assert restored(folder) == cuts
    assert updates(folder) == list(range(1, STEPS + 1))


STOPPED = """
def trouble(run):
    if run.version == AT and run.worker == 1 and not was_told("stopped"):
        tell("stopped")
        os.kill(server_pid(), signal.SIGTERM)
    if run.version == AT:
        wait_until(lambda: in_the_trace(type="stopped"))
"""


@pytest.mark.parametrize("at", [3, 10])
def test_run_stopped_during_an_update_equals_one_that_never_stopped(train, whole, at):
    """Unfinished work of both workers is discarded, together with its random numbers."""
    trouble = f"\nAT = {at}\n" + STOPPED
    folder = train("stopped", trouble, code=1)
    trace = read_trace(folder / "trace.jsonl")
    assert [r.version for r in trace.records if isinstance(r, Ended)] == [at]
    assert_equal(results(train("stopped", trouble)), whole)


KILLED = """
def trouble(run):
    if run.worker == 1 and run.version > 5 and run.version % 5 == 2:
        # A checkpoint that is still being written would make the server skip the next one.
        wait_until((OUT / "checkpoints" / f"{run.version - 2:010}.ckpt").exists)
    if run.version in SAVED and run.worker == 1 and not was_told(f"killed-{run.version}"):
        tell(f"killed-{run.version}")
        os.kill(server_pid(), signal.SIGKILL)
"""


def test_killed_server_does_not_change_the_result(train, whole):
    folder = train("killed", "\nSAVED = {8: 5, 17: 15}\n" + KILLED)
    assert restored(folder) == [5, 15]
    assert_equal(results(folder), whole)


CHANGED = """
def trouble(run):
    if run.version == 12:
        optimizer.param_groups[0]["lr"] *= 0.5
    unlucky(run)
"""


def test_change_since_the_checkpoint_is_applied_again_once(train):
    lucky = results(train("lucky", CHANGED + "\ndef unlucky(run): pass\n"))
    unlucky = "\nSAVED = {13: 10}\n" + KILLED.replace("trouble", "unlucky")
    folder = train("unlucky", CHANGED + unlucky)
    assert restored(folder) == [10]
    assert_equal(results(folder), lucky)


KILLED_ANYWHERE = """
def trouble(run):
    for version in (8, 17):
        if run.version >= version and run.worker == 1 and not was_told(f"killed-{version}"):
            tell(f"killed-{version}")
            os.kill(server_pid(), signal.SIGKILL)
        elif run.version >= version:
            wait_for(f"killed-{version}")
"""


@pytest.mark.parametrize("policy", ["backup:1", "async", "softsync:3", "ssp:1", "delayed:1"])
def test_run_under_any_policy_survives_a_killed_server(train, policy):
    folder = train("any", KILLED_ANYWHERE, policy=policy, checkpoint_every="1")
    assert len(restored(folder)) == 2
    assert updates(folder)[-1] == STEPS


KILLED_EARLY = """
def trouble(run):
    if run.version == 4 and run.worker == 1 and not was_told("killed"):
        tell("killed")
        os.kill(server_pid(), signal.SIGKILL)
"""


def test_server_killed_before_the_first_checkpoint_starts_over(train):
    folder = train("early", KILLED_EARLY, checkpoint_every="0")
    assert restored(folder) == [0]
    assert updates(folder)[-STEPS:] == list(range(1, STEPS + 1))
    assert not (folder / "checkpoints").exists()


ASKING = """
def trouble(run):
    if run.version == 7 and run.worker == 1 and not was_told("killed"):
        tell("killed")
        os.kill(server_pid(), signal.SIGKILL)
        assert optimizer.state_dict()["param_groups"][0]["lr"] in (0.02, 0.016)
        with run.averaged_weights(model) as averaged:
            assert all(p.isfinite().all() for p in averaged.parameters())
"""


def test_request_to_a_dead_server_is_answered_by_the_next_one(train, whole):
    folder = train("asking", ASKING)
    assert restored(folder) in ([5], [0])
    assert updates(folder)[-1] == STEPS
    if restored(folder) == [5]:
        assert_equal(results(folder), whole)


def test_damaged_checkpoint_is_set_aside_for_the_previous_one(train, whole, capsys):
    folder = train("torn", steps=12)
    *_, previous, newest = sorted((folder / "checkpoints").glob("*.ckpt"))
    newest.write_bytes(newest.read_bytes()[:-100])
    folder = train("torn")
    # Not always 10: no checkpoint is begun while the last one is still being written.
    assert restored(folder) == [int(previous.stem)]
    assert "is damaged" in capsys.readouterr().out
    assert_equal(results(folder), whole)


def test_run_with_only_damaged_checkpoints_is_not_restarted_from_zero(
    train, tmp_path, script, forkserver
):
    folder = train("all", steps=12)
    for file in (folder / "checkpoints").glob("*.ckpt"):
        file.write_bytes(file.read_bytes()[:-100])
    trace = (folder / "trace.jsonl").read_bytes()
    told = {"script": str(script(QUIET + SOURCE)), "arguments": (str(folder),)}
    settings = Settings(spec=RunSpec(workers=2, steps=STEPS, seed=5), **told)
    assert Launcher(settings, folder, forkserver).run() == 6
    assert (folder / "trace.jsonl").read_bytes() == trace


def test_checkpoint_of_another_model_is_refused(train, script, forkserver, capsys):
    folder = train("model", steps=6)
    path = script(QUIET + SOURCE.replace("nn.Linear(6, 8)", "nn.Linear(6, 8, bias=False)"))
    told = {"script": str(path), "arguments": (str(folder),)}
    settings = Settings(spec=RunSpec(workers=2, steps=STEPS, seed=5), **told)
    assert Launcher(settings, folder, forkserver).run() == 6
    assert "the checkpoint is not of this script: it has 6 parameters" in capsys.readouterr().err


def test_model_that_cannot_be_saved_fails_the_run_and_keeps_its_checkpoint(launch):
    ran = launch(
        """
class Odd(nn.Linear):
    def get_extra_state(self):
        return lambda: None

    def set_extra_state(self, state): pass

model = Odd(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
run = paceline.join()
model, optimizer = run.prepare(model, optimizer)
while not run.finished:
    optimizer.zero_grad()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
""",
        steps=3,
    )
    assert ran.code == 1  # 0 would mean that the result is in weights.pt
    assert "cannot write the weights" in ran.out
    assert list(ran.folder.glob("weights*")) == []
    assert [file.stem for file in ran.folder.glob("checkpoints/*.ckpt")] == ["0000000003"]


def test_resuming_after_the_last_update_makes_no_updates(train, whole):
    folder = train("again")
    shutil.rmtree(folder / "output")
    assert_equal(results(train("again")), whole)
    assert updates(folder) == list(range(1, STEPS + 1))


@pytest.mark.parametrize("policy", ["backup:1", "async", "softsync:3", "ssp:1", "delayed:1"])
def test_resumed_run_reaches_its_last_step_under_any_policy(train, policy):
    train("rule", steps=9, policy=policy)
    folder = train("rule", policy=policy)
    assert updates(folder) == list(range(1, STEPS + 1))
    assert len(restored(folder)) == 1


def test_run_can_be_resumed_with_another_policy_and_more_steps(train):
    train("other", steps=6)
    folder = train("other", steps=12, policy="async")
    trace = read_trace(folder / "trace.jsonl")
    assert next(r for r in trace.records if isinstance(r, Restored)).header.policy == "async"
    assert updates(folder) == list(range(1, 13))


PLAIN = """
weight = nn.Parameter(torch.zeros(3))
optimizer = torch.optim.SGD([weight], lr=LR)
run = paceline.join()
optimizer = run.prepare(optimizer)
while not run.finished:
    optimizer.zero_grad()
    (weight - 1).square().sum().backward()
    optimizer.step()
"""


def test_learning_rate_that_was_changed_in_the_script_is_mentioned(
    tmp_path, script, forkserver, capsys
):
    def printed(lr, steps):
        settings = Settings(
            spec=RunSpec(workers=1, steps=steps),
            script=str(script(PLAIN.replace("LR", lr))),
            arguments=(str(tmp_path),),
        )
        (tmp_path / "run").mkdir(exist_ok=True)
        assert Launcher(settings, tmp_path / "run", forkserver).run() == 0
        return capsys.readouterr().out

    assert "the script has" not in printed("0.1", steps=2)
    assert "the script has" not in printed("0.1", steps=4)
    for steps in (6, 8):  # every time, because it is ignored every time
        assert (
            "the script has lr=0.05, but the run continues with lr=0.1 from its checkpoint; to "
            "change it, set optimizer.param_groups[0]['lr'] after run.prepare()"
        ) in printed("0.05", steps)
