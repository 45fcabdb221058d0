# SPDX-License-Identifier: BSD-3-Clause
"""Runs under a real torchrun."""

import os
import signal

import pytest
import torch

from descendants import wait_until_gone
from failures import HELPERS, LOOP, TRAINING, troubled
from paceline.trace.schema import WITH_NOTICE, Left
from torchrun_runs import HELPERS_WITHOUT_ROLE, QUIET, RESUMABLE, TorchrunJob, held, same, take_pids


@pytest.fixture
def job(tmp_path):
    """Return a function that makes a job with these options; its folder is the working folder."""
    jobs = []

    def make(options="", popen=None):
        jobs.append(TorchrunJob(tmp_path, f"--out run {options}", *([popen] if popen else [])))
        return jobs[-1]

    yield make
    for each in jobs:
        for pid in each.pids():
            os.kill(pid, signal.SIGKILL)


def test_run_equals_one_of_paceline_run_bit_for_bit(launch, script, job, tmp_path):
    """The script prints nothing that torchrun doesn't show, and the report is printed once."""
    source = TRAINING + QUIET + LOOP
    reference = launch(source, workers=2, steps=12)
    torchrun = job("--steps 12")
    assert torchrun.run("--nproc-per-node", 2, script(source), tmp_path) == 0, torchrun.err
    expected = torch.load(reference.folder / "weights.pt")
    assert same(torchrun.weights(), expected.values())
    for worker in range(2):
        kept = torch.load(tmp_path / f"worker-{worker}.pt")
        assert same(kept["weights"], expected.values())
    assert torchrun.out.count("sync with 2 workers: 12 updates") == 1
    [line] = [line for line in torchrun.err.splitlines() if "listening at" in line]
    assert "2 workers under sync; folder run; listening at 127.0.0.1:" in line
    assert torchrun.trace().header.workers == 2
    torchrun.wait_until_nothing_is_left()


def test_script_without_a_goal_ends_with_worker_0(script, job, tmp_path):
    """One worker is a run, too. `run.workers` is known before it joins."""
    source = TRAINING + (
        "run = paceline.join()\n"
        "assert (run.worker, run.workers) == (0, 1)\n"
        "model, optimizer = run.prepare(model, optimizer)\n"
        "while run.version < 7:\n"
        "    optimizer.zero_grad()\n"
        "    loss_of(0, run.version).backward()\n"
        "    optimizer.step()\n"
    )
    torchrun = job()
    path = script(source.replace("assert (run.worker", "assert run.worker < 0 or (run.worker"))
    assert torchrun.run("--standalone", "--nproc-per-node", 1, path, tmp_path) == 0, torchrun.err
    assert len(list(torchrun.trace().updates())) == 7
    assert (tmp_path / "run" / "finished").read_text() == "7\n"


def test_wrong_options_are_one_clear_line(script, job, tmp_path):
    torchrun = job("--policy backup:2")
    path = script(TRAINING + QUIET + LOOP)
    assert torchrun.run("--nproc-per-node", 2, path, tmp_path) == 1
    assert torchrun.err.count("paceline: ") == 1
    assert "b must be smaller than the number of workers, got b=2 of 2" in torchrun.err
    torchrun.wait_until_nothing_is_left()


def test_killed_worker_ends_all_and_the_restarted_ones_resume_the_run(
    launch, script, job, tmp_path
):
    """The weights are those of a run without trouble."""
    reference = launch(TRAINING + QUIET + LOOP, workers=2, steps=12)
    torchrun = job(RESUMABLE)
    torchrun.start("--nproc-per-node", 2, "--max-restarts", 1, script(held()), tmp_path)
    killed = take_pids(torchrun)
    os.kill(killed[1], signal.SIGKILL)
    assert take_pids(torchrun) != killed
    (tmp_path / "go.word").touch()
    assert torchrun.wait() == 0, torchrun.err
    expected = torch.load(reference.folder / "weights.pt")
    assert same(torchrun.weights(), expected.values())
    assert torchrun.out.count("sync with 2 workers") == 1
    assert "continuing" in torchrun.err
    torchrun.wait_until_nothing_is_left()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_saves_the_run_and_leaves_nothing_behind(launch, script, job, tmp_path, number):
    """Another torchrun continues it."""
    reference = launch(TRAINING + QUIET + LOOP, workers=2, steps=12)
    torchrun = job("--steps 12")
    path = script(held())
    process = torchrun.start("--nproc-per-node", 2, path, tmp_path)
    take_pids(torchrun)
    process.send_signal(number)
    assert torchrun.wait() != 0
    torchrun.wait_until_nothing_is_left()
    [end] = [line for line in torchrun.err.splitlines() if line.startswith("Continue with:")]
    assert end == "Continue with: PACELINE_OPTIONS='--resume run' torchrun ..."
    assert (tmp_path / "run" / "checkpoints" / "0000000006.ckpt").exists()
    (tmp_path / "go.word").touch()
    again = TorchrunJob(tmp_path, "--resume run")
    assert again.run("--nproc-per-node", 2, path, tmp_path) == 0, again.err
    expected = torch.load(reference.folder / "weights.pt")
    assert same(again.weights(), expected.values())


def test_killed_worker_0_takes_the_server_with_it_which_saves_the_run(script, job, tmp_path):
    torchrun = job("--steps 12")
    torchrun.start("--nproc-per-node", 2, script(held()), tmp_path)
    os.kill(take_pids(torchrun)[0], signal.SIGKILL)
    assert torchrun.wait() == 1
    torchrun.wait_until_nothing_is_left()
    assert (tmp_path / "run" / "checkpoints" / "0000000006.ckpt").exists()


def test_script_that_raises_ends_the_run_with_its_traceback(script, job, tmp_path):
    source = troubled("def trouble(run):\n    if run.version == 3: raise KeyError('lost')\n")
    torchrun = job("--steps 12")
    path = script(source.replace(HELPERS, HELPERS_WITHOUT_ROLE))
    assert torchrun.run("--nproc-per-node", 2, path, tmp_path) == 1
    assert "KeyError: 'lost'" in torchrun.err
    torchrun.wait_until_nothing_is_left()
    assert (tmp_path / "run" / "checkpoints" / "0000000003.ckpt").exists()


def test_run_that_fails_on_the_server_fails_in_torchrun(script, job, tmp_path):
    source = (
        TRAINING
        + QUIET
        + (
            "def explode(*_):\n"
            "    raise ArithmeticError('too much')\n"
            "optimizer.register_step_post_hook(explode)\n"
        )
    )
    torchrun = job("--steps 12")
    assert torchrun.run("--nproc-per-node", 2, script(source + LOOP), tmp_path) == 1
    assert "ArithmeticError: too much" in torchrun.err
    torchrun.wait_until_nothing_is_left()


def test_loop_that_ignores_the_end_is_ended_with_exit_code_0(script, job, tmp_path):
    source = TRAINING + QUIET + LOOP.replace("while not run.finished", "while True")
    torchrun = job("--steps 5")
    assert torchrun.run("--nproc-per-node", 2, script(source), tmp_path) == 0, torchrun.err
    assert len(list(torchrun.trace().updates())) == 5


def test_sigterm_to_one_worker_makes_it_leave_and_the_run_goes_on(script, job, tmp_path):
    torchrun = job("--steps 12")
    torchrun.start("--nproc-per-node", 2, script(held()), tmp_path)
    leaving = take_pids(torchrun)[1]
    os.kill(leaving, signal.SIGTERM)
    wait_until_gone(leaving)
    (tmp_path / "go.word").touch()
    assert torchrun.wait() == 0, torchrun.err
    assert "continuing" not in torchrun.err
    left = [record for record in torchrun.trace().records if isinstance(record, Left)]
    assert [record.reason for record in left if record.worker == 1] == [WITH_NOTICE]
