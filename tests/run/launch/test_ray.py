# SPDX-License-Identifier: BSD-3-Clause
"""A Ray program trains with a function, on the Ray of one machine."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.errors import SpecError
from paceline.run.launch import ray as on_ray
from paceline.run.launch.ray_placement import Placement
from paceline.run.settings import Settings
from paceline.spec import RunSpec
from paceline.trace.reader import read_trace
from paceline.watch.audit import audit
from ray_nodes import environment

PROGRAM = """
import json, sys
import ray
from paceline import PacelineError, RunSpec
from paceline.ray import run
from paceline.run.launch import ray_cluster

ray_cluster.PLACE_S = 1.0  # there is room for one worker of two

def train(config):
    import torch, paceline
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=config["lr"])
    own = paceline.join()
    model, optimizer = own.prepare(model, optimizer)
    while not own.finished:
        optimizer.zero_grad()
        model(torch.ones(8, 4)).square().mean().backward()
        optimizer.step()
    return {"version": own.version, "workers": own.workers, "threads": torch.get_num_threads()}

def fail():
    import paceline
    paceline.join()
    raise RuntimeError("no data")

ray.init(num_cpus=2, include_dashboard=False, object_store_memory=80 * 2**20, log_to_driver=False)
trained = run(train, RunSpec(workers=2, steps=20), config={"lr": 0.1}, out=sys.argv[1])
try:
    run(fail, RunSpec(workers=1), out=sys.argv[1] + "-failed")
except PacelineError as error:
    failure = str(error)
print(json.dumps([trained.value, str(trained.folder), failure]))
ray.shutdown()
"""


@pytest.mark.timeout(240)
def test_program_gets_the_result_and_the_folder(tmp_path):
    program, out = tmp_path / "program.py", tmp_path / "out"
    program.write_text(PROGRAM, encoding="utf-8")
    words = [sys.executable, str(program), str(out)]
    ran = subprocess.run(words, env=environment(), capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    value, folder, failure = json.loads(ran.stdout.splitlines()[-1])
    assert value == {"version": 20, "workers": 2, "threads": 1}
    assert Path(folder) == out
    assert (out / "weights.pt").exists()
    reason = "no node of the Ray cluster has 1 CPU free"
    assert f"not waiting for worker 1: {reason}" in ran.stdout
    trace = read_trace(out / "trace.jsonl")
    audit(trace)
    assert {update.contributors for update in trace.updates()} == {(0,)}
    assert failure.startswith("the run failed with exit code 1; its output is in ")
    assert "RuntimeError: no data" in ran.stderr


@pytest.mark.parametrize(
    ("address", "what"),
    [
        ("127.0.0.1:1", "there is no Ray cluster at 127.0.0.1:1: .*; start one with: ray start"),
        ("ray://127.0.0.1:10001", "is for clients outside the cluster, but Paceline must run on"),
    ],
)
def test_useless_address_is_explained_at_once(address, what):
    with (
        pytest.raises(SpecError, match=what),
        on_ray.cluster(Settings(spec=RunSpec(workers=1)), Placement(), address),
    ):
        pass


def test_tls_is_refused():
    settings = Settings(spec=RunSpec(workers=1), tls_cert="cert", tls_key="key")
    with (
        pytest.raises(SpecError, match="TLS doesn't work on Ray"),
        on_ray.cluster(settings, Placement()),
    ):
        pass
