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


@pytest.fixture
def start(tmp_path):
    """Return a function that starts torchrun on two hosts, with one worker each."""
    with Hosts(2) as hosts:

        def start_them(*words, options=""):
            shared = (*words, "--nnodes", 2, "--nproc-per-node", 1, "--master-port", 29400)
            first = ("--master-addr", hosts.address(0))
            jobs = []
            for host in range(2):
                popen = partial(hosts.popen, host)
                jobs.append(TorchrunJob(tmp_path, options, popen, name=f"host-{host}"))
            return [
                (job, partial(job.start, *shared, *first, "--node-rank", rank))
                for rank, job in enumerate(jobs)
            ]

        yield start_them


def test_workers_of_two_hosts_train_with_a_server_on_the_first(launch, script, start, tmp_path):
    """The weights are those of a run on one host, bit for bit."""
    source = TRAINING + QUIET + LOOP
    reference = launch(source, workers=2, steps=12)
    jobs = start(options="--out run --steps 12")
    path = script(source)
    for _, begin in jobs:
        begin(path, tmp_path)
    for job, _ in jobs:
        assert job.wait() == 0, job.err
    first, second = [job for job, _ in jobs]
    assert same(first.weights(), torch.load(reference.folder / "weights.pt").values())
    assert "sync with 2 workers: 12 updates" in first.out
    assert "sync with 2 workers" not in second.out
    pushed = {gradient.worker: gradient.pushed_bytes for gradient in first.trace().gradients()}
    assert pushed[0] == 0 < pushed[1]  # the first one shares memory with the server


def test_worker_waits_until_the_other_host_has_restarted_the_server(
    launch, script, start, tmp_path
):
    reference = launch(TRAINING + QUIET + LOOP, workers=2, steps=12)
    jobs = start("--max-restarts", 1, options=f"--out run {RESUMABLE}")
    path = script(held())
    for _, begin in jobs:
        begin(path, tmp_path)
    first, second = [job for job, _ in jobs]
    pids = take_pids(first)
    os.kill(pids[0], signal.SIGKILL)
    (tmp_path / "go.word").touch()
    assert first.wait() == 0, first.err + second.err
    assert second.wait() == 0, second.err
    assert "lost the server; waiting for it to restart" in second.err
    assert same(first.weights(), torch.load(reference.folder / "weights.pt").values())
