# SPDX-License-Identifier: BSD-3-Clause
"""`paceline serve` as a child; test_torchrun_runs.py has whole runs."""

import signal
import subprocess
import sys

import pytest

from descendants import is_running, wait_until_gone
from paceline.run.launch.environment import check_private
from paceline.run.launch.serving_child import ServingChild

SCRIPT = """
import torch, paceline
model = torch.nn.Linear(1, 1)
paceline.join().prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
"""

PARENT = """
import os, signal, sys
from paceline.run.launch.serving_child import ServingChild
child = ServingChild(sys.argv[2:], saves=sys.argv[1] == "saves")
assert child.wait_listening() is not None
child.stop_first(lambda: print("prepared", flush=True))
print(child._process.pid, flush=True)
signal.pause()
"""


FORKS = """
if (pid := os.fork()) == 0:
    while True:
        signal.pause()
os.kill(pid, signal.SIGTERM)
_, status = os.waitpid(pid, 0)
state = "has stopped" if child.has_exited else "runs"
print(f"ended by signal {-os.waitstatus_to_exitcode(status)}, the server {state}", flush=True)
child.stop()
"""


@pytest.fixture
def words(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(SCRIPT)
    return ["--workers", "1", "--out", "run", "--", "train.py"]


def test_child_tells_how_its_server_is_reached(words, tmp_path):
    child = ServingChild(words, saves=True)
    server = child.wait_listening()
    assert server.address.startswith("tcp:127.0.0.1:")
    assert server.run_dir == tmp_path / "run"
    check_private(server.token_file)
    assert not child.has_exited
    assert child.stop() == 128 + signal.SIGTERM
    assert child.has_exited


def test_child_that_cannot_start_has_said_why(words, capfd):
    child = ServingChild(["--policy", "backup:4", *words], saves=True)
    assert child.wait_listening() is None
    assert child.wait() == 2
    assert "paceline: b must be smaller than the number of workers" in capfd.readouterr().err


def start_parent(kind, words):
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, kind, *words], stdout=subprocess.PIPE, text=True
    )
    return parent, int(parent.stdout.readline())


@pytest.mark.parametrize("kind", ["saves", "vanishes"])
def test_child_ends_when_its_parent_is_killed(words, kind):
    parent, pid = start_parent(kind, words)
    with parent:
        parent.kill()
    wait_until_gone(pid)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_signal_ends_the_parent_after_the_child(words, number):
    parent, pid = start_parent("saves", words)
    with parent:
        parent.send_signal(number)
        assert parent.stdout.read() == "prepared\n"
    assert parent.returncode == -number
    assert not is_running(pid)


def test_signal_to_a_process_that_the_script_has_forked_stops_nothing(words):
    """For example the processes of a data loader, which are ended in this way."""
    source = PARENT.replace("signal.pause()", FORKS)
    parent = subprocess.Popen(
        [sys.executable, "-c", source, "vanishes", *words], stdout=subprocess.PIPE, text=True
    )
    with parent:
        out = parent.stdout.read().splitlines()
    assert out[1:] == ["ended by signal 15, the server runs"]
    assert parent.returncode == 0


def test_handler_of_the_script_is_kept(words):
    def own(*_):
        pass

    child = ServingChild(words, saves=False)
    before = signal.signal(signal.SIGTERM, own)
    try:
        child.stop_first(lambda: None)
        assert signal.getsignal(signal.SIGTERM) is own
    finally:
        signal.signal(signal.SIGTERM, before)
    assert child.stop() == 128 + signal.SIGKILL
