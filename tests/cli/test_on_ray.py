# SPDX-License-Identifier: BSD-3-Clause
"""`paceline run --on ray` with the Ray that it starts on this machine."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import ray

from paceline.run.process_status import descendants
from ray_nodes import environment, wait_for

SCRIPT = Path(__file__).parents[1] / "scripts" / "gated.py"
NO_RAY = (
    "paceline: --on ray needs ray, which is not installed; "
    "install it with: pip install 'paceline[ray]'\n"
)


def listening(pids):
    """Return the IPv4 and IPv6 addresses, in hexadecimal, at which these processes listen."""
    inodes = set()
    for pid in pids:
        for fd in Path(f"/proc/{pid}/fd").glob("*"):
            link = os.readlink(fd) if os.path.lexists(fd) else ""
            inodes.add(link.removeprefix("socket:[").removesuffix("]"))
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text(encoding="ascii").splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                found.add(fields[1].rpartition(":")[0])
    return found


@pytest.mark.timeout(240)
def test_run_on_one_machine_reports_like_any_other_and_listens_on_loopback(tmp_path):
    (tmp_path / "open-20").touch()
    options = ["--on", "ray", "-w", "2", "--steps", "30", "--out", str(tmp_path / "out")]
    env = environment()
    del env["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"]
    process = subprocess.Popen(
        [sys.executable, "-m", "paceline", "run", *options, str(SCRIPT), str(tmp_path)],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    wait_for(tmp_path / "at-10", process)
    addresses = listening(descendants(process.pid))
    (tmp_path / "open-10").touch()
    out, err = process.communicate()
    assert process.returncode == 0, out + err
    assert addresses
    assert addresses <= {"0100007F", "0000000000000000FFFF00000100007F"}
    assert (
        err.splitlines()[0]
        == f"training {SCRIPT} with 2 workers under sync; folder {tmp_path / 'out'}"
    )
    assert "sync with 2 workers: 30 updates in" in out
    assert f"Weights: {tmp_path / 'out' / 'weights.pt'}" in err


def test_machine_without_ray_gets_the_line_that_installs_it(call, monkeypatch):
    monkeypatch.setattr("paceline.cli.find_spec", lambda _: None)
    answer = call("run", "--on", "ray", SCRIPT)
    assert (answer.code, answer.out, answer.err) == (2, "", NO_RAY)


def test_option_of_ray_needs_ray(call):
    answer = call("run", "--cpus-per-worker", 2, SCRIPT)
    assert answer.code == 2
    assert answer.err == "paceline: --cpus-per-worker is only for Ray; add --on ray\n"


def test_cluster_that_is_not_there_leaves_no_folder(call, tmp_path):
    assert ray is not None  # importing it, which the command does, changes the environment
    answer = call("run", "--on", "ray", "--address", "127.0.0.1:1", SCRIPT)
    assert answer.code == 2
    assert answer.err.startswith("paceline: there is no Ray cluster at 127.0.0.1:1: ")
    assert not (tmp_path / "runs").exists()
