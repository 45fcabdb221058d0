# SPDX-License-Identifier: BSD-3-Clause
"""How a script ends its run, and what it may do afterwards, in real processes."""

import os

import pytest
import torch

from failures import HELPERS, TRAINING, counts, troubled
from paceline.run.launch import hangs
from paceline.run.launch.run_folder import finished_at
from paceline.trace.schema import FINISHED, STOPPED

QUIET = "def trouble(run): pass\n"

BEGIN = """
run = paceline.join()
model, optimizer = run.prepare(model, optimizer)

def step():
    optimizer.zero_grad()
    loss_of(run.worker, run.version).backward()
    optimizer.step()

"""
PREPARED = HELPERS + TRAINING + BEGIN

KEEP = """
keep(run, weights=[p.detach().clone() for p in model.parameters()], version=run.version)
"""


def weights_in(folder):
    return list(torch.load(folder / "weights.pt", weights_only=True).values())


def assert_finished(ran, version):
    """Check that the run is complete at this version, without a word about it."""
    assert (ran.code, ran.err) == (0, "")
    assert (ran.trace.records[-1].version, ran.trace.records[-1].reason) == (version, FINISHED)
    assert finished_at(ran.folder) == version


# ------------------------------------------------------------------------------------- run.stop()


@pytest.mark.parametrize("worker", [0, 1])
@pytest.mark.parametrize("steps", [None, 1000])
def test_stop_in_any_worker_ends_the_run_for_all(launch, worker, steps):
    stops = f"""
while not run.finished:
    step()
    if run.worker == {worker} and run.version == 5:
        run.stop()
        assert run.finished
"""
    ran = launch(PREPARED + stops + KEEP, workers=3, steps=steps)
    assert_finished(ran, 5)
    assert counts(ran.trace) == [3] * 5
    assert f"server    | worker {worker} called run.stop()" in ran.out.splitlines()
    for number in range(3):
        assert ran.kept[number]["version"] == 5
        torch.testing.assert_close(ran.kept[number]["weights"], weights_in(ran.folder))


def test_early_stopping_ends_with_the_version_that_was_evaluated(launch):
    """The other worker has reported its next gradient by then."""
    source = """
while not run.finished:
    step()
    if run.is_first and run.version == 4:
        evaluated = [p.detach().clone() for p in model.parameters()]
        wait_until(lambda: in_the_trace(type="gradient", worker=1, version=4))
        run.stop()
        break
if run.is_first:
    keep(run, evaluated=evaluated)
"""
    ran = launch(PREPARED + source, steps=None)
    assert_finished(ran, 4)
    torch.testing.assert_close(ran.kept[0]["evaluated"], weights_in(ran.folder), rtol=0, atol=0)


def test_prepared_loader_ends_after_a_stop(launch):
    source = """
run = paceline.join()
data = torch.utils.data.TensorDataset(*batch(0, 0, 64))
loader = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True)
model, optimizer, loader = run.prepare(model, optimizer, loader)
while not run.finished:
    for x, y in loader:
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        if run.version >= 3:
            run.stop()
assert run.finished
"""
    ran = launch(TRAINING + source, steps=1000, policy="async")
    assert ran.code == 0, ran.err
    assert ran.trace.records[-1].reason == FINISHED


def test_stop_reaches_a_server_that_was_restarted(launch):
    source = """
while not run.finished:
    step()
    if run.worker == 1 and run.version == 6:
        wait_until(lambda: list((OUT / "checkpoints").glob("*5.ckpt")))
        os.kill(server_pid(), signal.SIGKILL)
        run.stop()
"""
    ran = launch(PREPARED + source, steps=None, restart=True, checkpoint_every="5")
    assert ran.code == 0, ran.err
    assert (ran.trace.records[-1].version, ran.trace.records[-1].reason) == (5, FINISHED)


# --------------------------------------------------------------------------- the end of a script


@pytest.mark.parametrize("rule", ["sync", "async"])
def test_run_without_a_goal_ends_with_the_script(launch, rule):
    ran = launch(PREPARED + "for _ in range(6): step()\n" + KEEP, steps=None, policy=rule)
    last = 6 if rule == "sync" else ran.trace.records[-1].version
    assert last >= 6
    assert ran.trace.records[-1].reason == FINISHED
    assert finished_at(ran.folder) == last
    assert ran.code == 0
    if rule == "sync":
        assert_finished(ran, 6)
        torch.testing.assert_close(ran.kept[0]["weights"], weights_in(ran.folder), rtol=0, atol=0)


def test_end_of_the_script_of_worker_0_ends_the_run_for_all(launch):
    source = """
while not run.finished:
    step()
    if run.is_first and run.version == 4:
        break
"""
    ran = launch(PREPARED + source + KEEP, workers=3, steps=None)
    assert_finished(ran, 4)
    assert {kept["version"] for kept in ran.kept.values()} == {4}


def test_exit_without_cleanup_ends_the_run_too(launch):
    source = """
while not run.finished:
    step()
    if run.is_first and run.version == 4:
        os._exit(0)
"""
    ran = launch(PREPARED + source, workers=2, steps=None)
    assert ran.code == 0, ran.err
    assert ran.trace.records[-1].reason == FINISHED
    assert ran.trace.records[-1].version >= 4
    assert finished_at(ran.folder) == ran.trace.records[-1].version


def test_threads_of_a_script_may_finish_before_it_ends_the_run(launch):
    source = """
import threading

while run.version < 4:
    step()
if run.is_first:
    threading.Thread(target=lambda: (wait_until(lambda: was_told("left")), tell("done"))).start()
else:
    while run.version < 6:
        step()
    tell("left")
"""
    ran = launch(PREPARED + source, steps=None, policy="async")
    assert ran.code == 0, ran.err
    assert (ran.folder / "done.word").exists()
    assert ran.trace.records[-1].version >= 6


def test_failure_of_worker_0_does_not_end_the_run(launch):
    source = """
while run.version < 8:
    step()
    if run.is_first and run.version == 4:
        sys.exit(3)
"""
    ran = launch(PREPARED + source, steps=None)
    assert ran.code == 1
    assert ran.trace.records[-1].version == 8


def test_script_that_ends_before_the_goal_stops_the_run_for_all(launch):
    source = """
while not run.finished:
    step()
    if run.is_first and run.version == 4:
        break
"""
    ran = launch(PREPARED + source, steps=1000)
    assert ran.code == 0
    assert ran.err == (
        "paceline  | the scripts ended at update 4 of 1000, before the run reached its goal\n"
    )
    assert ran.trace.records[-1].reason == STOPPED
    assert finished_at(ran.folder) is None


# --------------------------------------------------------------------------------- after the end


def test_script_may_load_change_and_save_weights_after_the_end(launch):
    source = """
best = None
while not run.finished:
    step()
    if run.version == 3:
        best = {name: value.clone() for name, value in model.state_dict().items()}
model.load_state_dict(best)
with torch.no_grad():
    for parameter in model.parameters():
        parameter.mul_(2)
        parameter.data.clamp_(-1, 1)
torch.save(model.state_dict(), OUT / f"saved-{run.worker}.pt")
keep(run, best=best)
"""
    ran = launch(PREPARED + source, steps=5)
    assert ran.code == 0, ran.err
    for worker in range(2):
        saved = torch.load(ran.folder / f"saved-{worker}.pt", weights_only=True)
        best = ran.kept[worker]["best"]
        torch.testing.assert_close(saved, {k: (2 * v).clamp(-1, 1) for k, v in best.items()})


@pytest.mark.parametrize("loop", ["while True", "for _ in range(10**9)"])
def test_loop_that_ignores_the_end_is_ended_cleanly(launch, loop):
    ran = launch(PREPARED + f"{loop}: step()\n", workers=3, steps=4)
    assert ran.code == 0
    assert len(ran.err.splitlines()) == 3
    for line in ran.err.splitlines():
        assert "| the run ended at update 4, so this worker ends its script" in line
    assert ran.trace.records[-1].reason == FINISHED
    assert finished_at(ran.folder) == 4


def test_iteration_in_which_the_run_ends_is_completed(launch):
    """A script with two optimizers calls both before it looks at `run.finished`."""
    source = """
other = nn.Linear(4, 1)
others = torch.optim.SGD(other.parameters(), lr=0.1)
run = paceline.join()
model, other, optimizer, others = run.prepare(model, other, optimizer, others)
while not run.finished:
    for one in (optimizer, others):
        one.zero_grad()
        x, y = batch(run.worker, run.version)
        (F.mse_loss(model(x), y) + F.mse_loss(other(x), y)).backward()
        one.step()
print("complete")
"""
    ran = launch(TRAINING + source, steps=5)
    assert (ran.code, ran.err) == (0, "")
    assert ran.out.count("complete") == 2


def test_one_interrupt_ends_a_run_whose_script_never_ends(launch, monkeypatch):
    monkeypatch.setattr(hangs, "STOP_WORKERS_S", 0.5)
    source = f"""
while not run.finished:
    step()
    if run.is_first and run.version == 5:
        os.kill({os.getpid()}, signal.SIGINT)
while True:
    time.sleep(1)
"""
    ran = launch(PREPARED + source, steps=None)
    assert ran.code == 130
    lines = ran.err.splitlines()
    assert lines[0] == "paceline  | stopping; interrupt again to stop immediately"
    assert set(lines[1:]) == {
        f"paceline  | worker {worker} was still running and was killed" for worker in range(2)
    }
    assert ran.trace.records[-1].reason == STOPPED
    assert len(weights_in(ran.folder)) == 4  # the server has written everything


def test_one_interrupt_ends_a_run_that_waits_for_a_gradient(launch, monkeypatch):
    monkeypatch.setattr(hangs, "STOP_WORKERS_S", 0.5)
    trouble = f"""
def trouble(run):
    if run.is_first and run.version == 5:
        wait_until(lambda: in_the_trace(type="gradient", worker=1, version=5))
        os.kill({os.getpid()}, signal.SIGINT)
        time.sleep(1000)
"""
    ran = launch(troubled(trouble), steps=None)
    assert ran.code == 130
    assert ran.trace.records[-1].reason == STOPPED
    assert ran.trace.records[-1].version in (5, 6)
