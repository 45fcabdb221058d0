# SPDX-License-Identifier: BSD-3-Clause
"""A Ray program trains with a function, on the Ray of one machine."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.errors import SpecError
from paceline.run.launch import ray as on_ray
from paceline.run.launch.ray_placement import Placement
from paceline.run.launch.run_folder import finished_at
from paceline.run.settings import Settings
from paceline.spec import RunSpec
from paceline.trace.reader import read_trace
from paceline.watch.audit import audit
from ray_nodes import environment

PAGE = Path(__file__).parents[3] / "docs" / "clusters.md"

BEFORE = """
import json
import ray
from paceline import PacelineError
from paceline.run.launch import ray_cluster

ray_cluster.PLACE_S = 1.0  # there is room for one worker of two
ray.init(num_cpus=2, include_dashboard=False, object_store_memory=80 * 2**20, log_to_driver=False)
"""
AFTER = """
def fail():
    import paceline
    paceline.join()
    raise RuntimeError("no data")

try:
    run(fail, RunSpec(workers=1), out="failed")
except PacelineError as error:
    failure = str(error)
print(json.dumps([trained.value, str(trained.folder), failure]))
ray.shutdown()
"""


@pytest.mark.timeout(240)
def test_program_in_the_documentation_gets_the_result_and_the_folder(tmp_path):
    [shown] = re.findall(r"^```py\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    program, out = tmp_path / "program.py", tmp_path / "runs" / "train-1"
    program.write_text(BEFORE + shown + AFTER, encoding="utf-8")
    ran = subprocess.run(
        [sys.executable, str(program)],
        env=environment(),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    value, folder, failure = json.loads(ran.stdout.splitlines()[-1])
    assert value == {"version": 20, "workers": 2}
    assert Path(folder) == out
    assert (out / "weights.pt").exists()
    reason = "no node of the Ray cluster has 1 CPU free"
    assert f"not waiting for worker 1: {reason}" in ran.stdout
    trace = read_trace(out / "trace.jsonl")
    audit(trace)
    assert {update.contributors for update in trace.updates()} == {(0,)}
    assert failure.startswith("the run failed with exit code 1; its output is in ")
    assert "RuntimeError: no data" in ran.stderr

    words = [sys.executable, "-m", "paceline", "run", "--resume", str(out), "--steps", "30"]
    ran = subprocess.run(words, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert finished_at(out) == 30


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


def test_wrong_option_leaves_no_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(TypeError, match="polcy"):
        on_ray.run(print, RunSpec(workers=1), polcy="sync")
    with pytest.raises(SpecError, match="ema must be between 0 and 1"):
        on_ray.run(print, RunSpec(workers=1), ema=2.0)
    assert list(tmp_path.iterdir()) == []


def test_tls_is_refused():
    settings = Settings(spec=RunSpec(workers=1), tls_cert="cert", tls_key="key")
    with (
        pytest.raises(SpecError, match="TLS doesn't work on Ray"),
        on_ray.cluster(settings, Placement()),
    ):
        pass
