# SPDX-License-Identifier: BSD-3-Clause
"""The recipes in docs/clusters.md work as they are written.

Other tests run the parts of a recipe; these run its commands.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from failures import LOOP, TRAINING
from hosts import Hosts, needs_hosts
from paceline.trace.reader import read_trace
from paceline.watch.audit import audit
from plain import IMPORTS
from slurm import SlurmCluster, needs_slurm
from torchrun_runs import PATIENCE_S, QUIET

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "clusters.md").read_text()

WAIT = """
    if run.version >= 20 and not Path("go").exists():
        Path("reached").touch()
        while not Path("go").exists():
            time.sleep(0.01)
"""
"""Workers wait at version 20 until the test tells them to go on."""

SCRIPT = "import paceline\n" + IMPORTS + TRAINING + QUIET + LOOP.rpartition("keep(")[0]

WAITING_SCRIPT = "import time\nfrom pathlib import Path\n" + SCRIPT.replace("pass", WAIT).replace(
    "while not run.finished", "while run.version < 40"
)


def recipe(section: str) -> list[str]:
    """Return the blocks of a section."""
    [text] = re.findall(rf"^## {section}\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
    return re.findall(r"^```\w*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


@pytest.fixture
def shell(tmp_path):
    """Return a function that starts a shell command, in a folder of its own with a train.py."""
    programs = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": programs, "OMP_NUM_THREADS": "1"}

    def start(command, name, popen=subprocess.Popen):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "train.py").write_text(SCRIPT)
        with (folder / "out").open("w") as out:
            words = ["bash", "-c", command]
            return popen(words, cwd=folder, env=environment, stdout=out, stderr=out)

    return start


def updates_of(folder):
    return len(list(read_trace(folder / "runs" / "train-1" / "trace.jsonl").updates()))


def test_torchrun_on_one_host(shell, tmp_path):
    command, _ = recipe("torchrun")
    assert shell(command, "host").wait(PATIENCE_S) == 0, (tmp_path / "host" / "out").read_text()
    assert updates_of(tmp_path / "host") == 100


@needs_hosts
def test_torchrun_on_two_hosts(shell, tmp_path):
    """The command that sets the options is run on both."""
    options, *commands = recipe("torchrun")[1].splitlines()
    with Hosts(2) as hosts:
        started = [
            shell(
                "\n".join([options, command.replace("10.0.0.5", hosts.address(0))]),
                f"host-{host}",
                lambda *words, host=host, **others: hosts.popen(host, *words, **others),
            )
            for host, command in enumerate(commands)
        ]
        codes = [each.wait(PATIENCE_S) for each in started]
    printed = [(tmp_path / f"host-{host}" / "out").read_text() for host in range(2)]
    assert codes == [0, 0], "\n".join(printed)
    assert updates_of(tmp_path / "host-0") == 100
    assert not (tmp_path / "host-1" / "runs").exists()


@needs_slurm
def test_slurm_job_is_stopped_and_submitted_again(tmp_path):
    """One node has all workers of the two that the script asks for."""
    folder = tmp_path / "shared"
    folder.mkdir()
    [batch] = [block for block in recipe("Slurm") if block.startswith("#!/bin/bash")]
    (folder / "train.sbatch").write_text(batch)
    (folder / "train.py").write_text(WAITING_SCRIPT)
    programs = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    (tmp_path / "slurm").mkdir()
    with SlurmCluster(tmp_path / "slurm") as slurm:

        def call(*words):
            return slurm.call(*words, cwd=folder, env={"PATH": programs, "OMP_NUM_THREADS": "1"})

        job = call("sbatch", "--parsable", "--nodes=1", "train.sbatch").strip()
        log = folder / f"slurm-{job}.out"
        slurm.wait_until(f"[ -e {folder}/reached ]", log)
        call("scancel", job)
        slurm.wait_until(f"grep -q 'Continue with' {log}", log)
        slurm.wait_until(f'[ -z "$(squeue --noheader --jobs={job})" ]', log)
        (folder / "go").touch()
        submit = ("sbatch", "--parsable", "--wait", "--nodes=1", "train.sbatch")
        again, finished = [folder / f"slurm-{call(*submit).strip()}.out" for _ in range(2)]
    assert "backup:1 with 4 workers: 40 updates" in again.read_text()
    assert finished.read_text() == "runs/train.sbatch is finished\n"
    trace = read_trace(folder / "runs" / "train.sbatch" / "trace.jsonl")
    audit(trace)
    assert [update.update for update in trace.updates()][-1] == 40
    assert trace.header.workers == 4
    assert (folder / "runs" / "train.sbatch" / "finished").exists()
