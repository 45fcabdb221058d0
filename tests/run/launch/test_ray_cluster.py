# SPDX-License-Identifier: BSD-3-Clause
"""Runs on a Ray cluster of several nodes, some of which are lost."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from paceline.trace.reader import read_trace
from paceline.watch.audit import audit
from ray_nodes import RayNodes, wait_for

SCRIPT = Path(__file__).parents[2] / "scripts" / "gated.py"
RUN = ["-w", "2", "--min-workers", "2", "--steps", "30", "--checkpoint-every", "4"]
PACELINE = [sys.executable, "-m", "paceline"]


@pytest.mark.timeout(240)
def test_run_survives_the_loss_of_nodes_with_the_weights_of_an_undisturbed_one(tmp_path):
    plain, gates = tmp_path / "plain", tmp_path / "gates"
    gates.mkdir()
    for gate in (10, 20):
        (gates / f"open-{gate}").touch()
    subprocess.run(
        [*PACELINE, "run", *RUN, "--out", str(plain), str(SCRIPT), str(gates)],
        check=True,
        capture_output=True,
    )
    for path in gates.iterdir():
        path.unlink()
    out = tmp_path / "on-ray"
    with RayNodes(cpus=0) as nodes:
        first, lost = nodes.add(1, market="on-demand"), nodes.add(1, market="spot")
        on_ray = ["--on", "ray", "--address", nodes.address, "--server-label", "market=!spot"]
        process = subprocess.Popen(
            [*PACELINE, "run", *on_ray, *RUN, "--out", str(out), str(SCRIPT), str(gates)],
            env=nodes.env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        wait_for(out / "trace.jsonl", process)
        nodes.add(1, market="spot")  # until now, there is room for one worker of two
        wait_for(gates / "at-10", process)
        nodes.remove(lost)
        nodes.add(1, market="spot")
        (gates / "open-10").touch()
        wait_for(gates / "at-20", process)
        nodes.remove(first)
        nodes.add(1, market="on-demand")
        (gates / "open-20").touch()
        printed, _ = process.communicate()
    assert process.returncode == 0, printed
    for name in ("worker [01]", "server"):
        lost = rf"{name} was lost( with|:) its node 127.0.0.1.*; restarting in 0.5 s"
        assert re.search(lost, printed), printed
    expected, found = (torch.load(folder / "weights.pt") for folder in (plain, out))
    assert all(torch.equal(value, found[name]) for name, value in expected.items())
    audit(read_trace(out / "trace.jsonl"))
