# SPDX-License-Identifier: BSD-3-Clause
"""Workers are stopped and continued, and workers join a run that has begun."""

import pytest

from failures import (
    assert_nothing_was_lost,
    counts,
    gradients_of,
    joins_and_leaves,
    troubled,
)

STEPS = 12

RETURNS = """
tell(f"pid-{WORKER}", os.getpid())

def trouble(run):
    if run.worker == 1 and run.version == 4:
        strike(signal.SIGSTOP)
    elif run.worker == 1 and was_told("struck-1"):
        tell("is-back", run.version)
    elif run.worker == 0 and run.version == 8:
        os.kill(int(wait_for("pid-1")), signal.SIGCONT)
        wait_for("is-back")
"""


def test_stopped_worker_leaves_and_returns_at_the_newest_version(launch):
    ran = launch(troubled(RETURNS), workers=2, steps=STEPS)
    assert ran.code == 0, ran.err
    assert counts(ran.trace) == [2] * 4 + [1] * 4 + [2] * 4
    assert joins_and_leaves(ran.trace, 1)[:3] == ["joined", "stopped", "joined"]
    assert "worker 1 left: stopped" in ran.out
    assert "continuing with 1 worker; an update should take 2" in ran.out
    assert "worker 1 is back" in ran.out
    assert "an update takes 2 workers again" in ran.out
    assert gradients_of(ran.trace, 1, turn=6)[0].version == 8


def test_gradient_of_a_stopped_worker_is_void_and_recorded(launch):
    ran = launch(troubled(RETURNS), workers=2, steps=STEPS)
    left = next(r for r in ran.trace.records if getattr(r, "reason", "") == "stopped")
    asked_at = gradients_of(ran.trace, 0, version=4)[0].asked_at
    assert left.working_since == asked_at
    assert gradients_of(ran.trace, 1, turn=5) == []  # it was computed, but did not count
    assert_nothing_was_lost(ran.trace)
    assert ran.kept[1]["version"] == STEPS


def test_worker_that_was_stopped_while_idle_returns(launch):
    """It has nothing to report: the server must notice that its process continues."""
    trouble = """
tell(f"pid-{WORKER}", os.getpid())

def trouble(run):
    if run.worker == 0 and run.version == 4:
        wait_until(lambda: in_the_trace(type="gradient", worker=1, version=4))
        os.kill(int(wait_for("pid-1")), signal.SIGSTOP)
        wait_until(lambda: in_the_trace(type="left", worker=1, reason="stopped"))
    elif run.worker == 0 and run.version == 8:
        os.kill(int(wait_for("pid-1")), signal.SIGCONT)
        wait_for("is-back")
    elif run.worker == 1 and run.version > 4:
        tell("is-back")
"""
    ran = launch(troubled(trouble), workers=2, steps=STEPS)
    assert ran.code == 0, ran.err
    assert counts(ran.trace) == [2] * 5 + [1] * 3 + [2] * 4
    assert ran.kept.keys() == {0, 1}


def test_stopped_backup_worker_costs_no_update(launch):
    trouble = """
def trouble(run):
    tell(f"here-{run.worker}")
    wait_for("here-0")  # or fewer than N workers would be left for a moment
    wait_for("here-1")
    if run.worker == 2 and was_told("struck-2"):
        tell("is-back")
    elif run.worker == 2 and run.version >= 3:
        strike(signal.SIGSTOP)
    elif run.worker == 0 and run.version == 9:
        stopped = int(wait_for("struck-2"))
        while not was_told("is-back"):  # repeatedly: it tells just before it stops itself
            os.kill(stopped, signal.SIGCONT)
            time.sleep(0.01)
"""
    ran = launch(troubled(trouble), workers=3, steps=STEPS, policy="backup:1")
    assert ran.code == 0, ran.err
    assert counts(ran.trace) == [2] * STEPS
    assert_nothing_was_lost(ran.trace)
    assert ran.kept.keys() == {0, 1, 2}


def test_worker_started_by_hand_joins_a_running_run_and_contributes(launch):
    trouble = """
import subprocess

def trouble(run):
    if run.worker == 0 and run.version == 3:
        variables = {**os.environ, "PACELINE_WORKER": "7"}
        subprocess.Popen([sys.executable, *sys.argv], env=variables)
        wait_for("made-five")  # updates, of its gradients only
    elif run.worker == 7 and run.version == 8:
        tell("made-five")
"""
    ran = launch(troubled(trouble), workers=1, steps=STEPS)
    assert ran.code == 0, ran.err
    contributors = [update.contributors for update in ran.trace.updates()]
    assert contributors[:8] == [(0,)] * 3 + [(7,)] * 5
    assert gradients_of(ran.trace, 7)[0].version == 3
    assert joins_and_leaves(ran.trace, 7)[0] == "joined"
    assert ran.kept[7]["version"] == STEPS


def test_version_that_a_stopped_worker_reads_stays_unchanged(launch):
    """The worker may be in the middle of an evaluation."""
    trouble = """
tell(f"pid-{WORKER}", os.getpid())
same = None

def trouble(run):
    global same
    if run.worker == 1 and run.version == 4:
        before = [p.detach().clone() for p in model.parameters()]
        strike(signal.SIGSTOP)
        same = all(torch.equal(a, b) for a, b in zip(before, model.parameters()))
        tell("same", same)
    elif run.worker == 0 and run.version == 8:
        os.kill(int(wait_for("pid-1")), signal.SIGCONT)
        assert wait_for("same") == "True"
"""
    ran = launch(troubled(trouble), workers=2, steps=STEPS)
    assert ran.code == 0, ran.err
    assert counts(ran.trace)[4:8] == [1] * 4
    assert ran.kept.keys() == {0, 1}


def test_worker_that_is_stopped_when_the_run_ends_finishes_when_continued(launch):
    trouble = """
tell(f"pid-{WORKER}", os.getpid())

def trouble(run):
    if run.worker == 1 and run.version == 4:
        strike(signal.SIGSTOP)
    elif run.worker == 0 and run.version == 8:
        wait_until(lambda: in_the_trace(type="left", worker=1, reason="stopped"))
"""
    wake_up = """
if run.worker == 0:
    wait_until(lambda: in_the_trace(type="update", update=12))
    os.kill(int(wait_for("pid-1")), signal.SIGCONT)
"""
    ran = launch(troubled(trouble) + wake_up, workers=2, steps=STEPS)
    assert ran.code == 0, ran.err
    assert ran.kept[1]["version"] == STEPS
    assert "PeerLost" not in ran.err


LOADS = """
loaded = [p.detach() * 0 + 1 for p in model.parameters()]
run = paceline.join()
model, optimizer = run.prepare(model, optimizer)
if run.worker == 2:
    wait_until(lambda: in_the_trace(type="update", update=3))
state = optimizer.state_dict()
state["state"] = {i: {"momentum_buffer": one * 100.0} for i, one in enumerate(loaded)}
optimizer.load_state_dict(state)
while not run.finished:
    if run.worker == 0 and run.version == 6:
        wait_for("has-loaded")
    elif run.worker == 2:
        tell("has-loaded")
    optimizer.zero_grad()
    (loss_of(run.worker, run.version) * 0.0).backward()
    optimizer.step()
momentum = optimizer.state_dict()["state"][0]["momentum_buffer"]
keep(run, momentum=float(momentum.max()))
"""


def test_late_worker_does_not_overwrite_the_optimizer_state(launch):
    source = troubled("", LOADS).replace("lr=0.1)", "lr=0.0, momentum=0.5)")
    ran = launch(source, workers=3, steps=STEPS, policy="backup:1")
    assert ran.code == 0, ran.err
    assert ran.kept[0]["momentum"] == pytest.approx(100.0 * 0.5**STEPS)
