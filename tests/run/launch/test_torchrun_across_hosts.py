# SPDX-License-Identifier: BSD-3-Clause
"""Runs under torchrun on two hosts, which are network namespaces."""

import os
import signal
from functools import partial

import pytest
import torch

from failures import LOOP, TRAINING
from hosts import Hosts, needs_hosts
from torchrun_runs import QUIET, RESUMABLE, TorchrunJob, held, same, take_pids

pytestmark = needs_hosts


def static(hosts, host):
    """Return the options of torchrun's usual rendezvous."""
    return "--master-addr", hosts.address(0), "--master-port", 29400, "--node-rank", host


def elastic(hosts, host):
    """Return the options of the rendezvous in which all hosts start again if one does."""
    own = ("--local-addr", hosts.address(host), "--rdzv-conf", f"is_host={1 - host}")
    endpoint = ("--rdzv-endpoint", f"{hosts.address(0)}:29400")
    return "--rdzv-backend", "c10d", "--rdzv-id", "job", *endpoint, *own


@pytest.fixture
def start(tmp_path):
    """Return a function that starts torchrun on two hosts, with one worker each."""
    with Hosts(2) as hosts:

        def start_them(path, *words, options, rendezvous=static):
            jobs = []
            for host in range(2):
                popen = partial(hosts.popen, host)
                jobs.append(TorchrunJob(tmp_path, options, popen, name=f"host-{host}"))
                meeting = rendezvous(hosts, host)
                jobs[-1].start("--nnodes", 2, *meeting, *words, path, tmp_path)
            return jobs

        yield start_them


def test_workers_of_two_hosts_train_with_a_server_on_the_first(launch, script, start):
    """The weights are those of a run on one host, bit for bit."""
    source = TRAINING + QUIET + LOOP
    reference = launch(source, workers=2, steps=12)
    first, second = start(script(source), options="--out run --steps 12")
    for job in (first, second):
        assert job.wait() == 0, job.err
    assert same(first.weights(), torch.load(reference.folder / "weights.pt").values())
    assert "sync with 2 workers: 12 updates" in first.out
    assert "sync with 2 workers" not in second.out
    pushed = {gradient.worker: gradient.pushed_bytes for gradient in first.trace().gradients()}
    assert pushed[0] == 0 < pushed[1]  # the first one shares memory with the server


def test_worker_waits_until_the_other_host_has_restarted_the_server(
    launch, script, start, tmp_path
):
    reference = launch(TRAINING + QUIET + LOOP, workers=2, steps=12)
    options = f"--out run {RESUMABLE}"
    first, second = start(script(held()), "--max-restarts", 1, options=options)
    pids = take_pids(first)
    os.kill(pids[0], signal.SIGKILL)
    (tmp_path / "go.word").touch()
    assert first.wait() == 0, first.err + second.err
    assert second.wait() == 0, second.err
    assert "lost the server; waiting for it to restart" in second.err
    assert same(first.weights(), torch.load(reference.folder / "weights.pt").values())


def test_all_hosts_start_again_when_a_worker_of_the_second_is_killed(
    launch, script, start, tmp_path
):
    reference = launch(TRAINING + QUIET + LOOP, workers=2, steps=12)
    options, words = f"--out run {RESUMABLE}", ("--max-restarts", 1)
    jobs = start(script(held()), *words, options=options, rendezvous=elastic)
    pids = take_pids(jobs[0])
    os.kill(pids[1], signal.SIGKILL)
    assert not set(take_pids(jobs[0])) & set(pids)
    (tmp_path / "go.word").touch()
    for job in jobs:
        assert job.wait() == 0, job.err
    assert "continuing" in jobs[0].err
    assert same(jobs[0].weights(), torch.load(reference.folder / "weights.pt").values())
