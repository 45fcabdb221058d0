# SPDX-License-Identifier: BSD-3-Clause
"""Runs on a full disk and with a tiny /dev/shm, on real small file systems in memory.

They are mounted in their own namespace, so nothing else sees them and nothing is left of them.
"""

import os
import subprocess

import pytest

from paceline.trace.reader import read_trace
from paceline.trace.schema import Restored
from paceline.watch.audit import audit
from sandbox import PACELINE, SCRIPT

PATIENCE_S = 120


def may_mount() -> bool:
    """Return whether we can mount file systems."""
    tried = subprocess.run(
        ["unshare", "-m", "mount", "-t", "tmpfs", "none", "/mnt"], check=False, capture_output=True
    )
    return tried.returncode == 0


pytestmark = pytest.mark.skipif(not may_mount(), reason="mounting needs root")


def in_namespace(commands: str) -> subprocess.CompletedProcess[str]:
    """Run these shell commands in their own mount namespace."""
    return subprocess.run(
        ["unshare", "-m", "sh", "-ec", commands],
        check=False,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )


@pytest.fixture
def script(tmp_path):
    """Return a script whose argument is the size of its hidden layer."""
    path = tmp_path / "train.py"
    source = SCRIPT.replace("16", "int(__import__('sys').argv[1])").replace("lr=0.05", "lr=1e-6")
    path.write_text(source, encoding="utf-8")
    return path


def test_run_needs_no_dev_shm(script, tmp_path):
    run = f"{PACELINE} run -w 3 -p backup:1 --steps 10 --out {tmp_path}/run {script} 100000"
    ran = in_namespace(f"mount -t tmpfs -o size=64k none /dev/shm\n{run}\ndf -k /dev/shm")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "at the end: 10" in ran.stdout
    assert (tmp_path / "run" / "weights.pt").stat().st_size > 4_000_000  # that is 1.1 million


def test_full_disk_costs_checkpoints_and_the_run_fails_but_can_be_resumed(script, tmp_path):
    """There is space for one checkpoint of 650 kB and not for two."""
    disk = tmp_path / "disk"
    disk.mkdir()
    new = f"{PACELINE} run -w 2 --steps 40 --checkpoint-every 10 --out {disk}/run"
    ran = in_namespace(
        f"""
        mount -t tmpfs -o size=1m none {disk}
        {new} {script} 8000 || echo exit code $?
        ls {disk}/run/checkpoints
        mount -o remount,size=9m {disk}
        {PACELINE} run --resume {disk}/run --steps 45
        {PACELINE} trace check {disk}/run
        cp {disk}/run/trace.jsonl {tmp_path}
        """
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    said = ran.stdout
    assert "No space left on device; keeping that of version 10" in said
    assert "exit code 1" in said
    assert "trace.jsonl is consistent: run of sync, 2 workers, 45 updates" in said
    assert "0000000010.ckpt\n" in said
    assert "partial" not in said
    assert "at the end: 40" in said
    assert "at the end: 45" in said
    trace = read_trace(tmp_path / "trace.jsonl")
    audit(trace)
    assert [record.version for record in trace.records if isinstance(record, Restored)] == [10]
    assert os.listdir(disk) == []
