# SPDX-License-Identifier: BSD-3-Clause
"""The process of the fork server: what happens to everything below it when it ends.

These fork servers import nothing large, so that they start quickly.
"""

import os
import signal
import subprocess
import sys

import pytest

from descendants import KINDS, STARTS_PROCESSES, is_running, pids_in, wait_until_gone
from forked import ForkedScript
from paceline.run.launch.forkserver import ForkServer

WAITS = STARTS_PROCESSES + "start_processes('.')\nnote_pid('.', 'script', os.getpid())\n"


@pytest.fixture
def small(monkeypatch):
    """Fork servers that import only this."""
    monkeypatch.setattr("paceline.run.launch.forkserver.PRELOAD", ["json"])
    with ForkServer() as forkserver:
        yield forkserver


def test_closing_it_ends_running_processes_and_what_they_started(small, tmp_path):
    path = tmp_path / "script.py"
    path.write_text(WAITS + "print('ready')\nsignal.pause()\n")
    one = ForkedScript(small, path)
    assert os.read(one.out, 100).startswith(b"ready")
    small.close()
    pids = pids_in(tmp_path)
    assert set(pids) == KINDS | {"script"}
    assert not any(map(is_running, pids.values()))
    one.output()


LAUNCHER = """
import sys
sys.path[:0] = {path!r}
from pathlib import Path
from forked import ForkedScript
from paceline.run.launch import forkserver
forkserver.PRELOAD = ["json"]
one = ForkedScript(forkserver.ForkServer(), Path({script!r}))
print("forked", flush=True)
sys.stdin.read()
"""


def test_killed_launcher_takes_everything_with_it(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(WAITS + "signal.pause()\n")
    source = LAUNCHER.format(path=sys.path, script=str(path))
    with subprocess.Popen(
        [sys.executable, "-c", source], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as launcher:
        assert launcher.stdout.readline() == "forked\n"
        while "script" not in pids_in(tmp_path):
            os.sched_yield()
        launcher.kill()
        wait_until_gone(*pids_in(tmp_path).values())
    assert set(pids_in(tmp_path)) == KINDS | {"script"}


def test_process_that_an_import_started_is_left_alone(tmp_path, monkeypatch):
    (tmp_path / "starts_one.py").write_text(
        STARTS_PROCESSES
        + f"note_pid({str(tmp_path)!r}, 'imported', subprocess.Popen(['sleep', '1000']).pid)"
    )
    (tmp_path / "script.py").write_text(WAITS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("paceline.run.launch.forkserver.PRELOAD", ["starts_one"])
    with ForkServer() as forkserver:
        one = ForkedScript(forkserver, tmp_path / "script.py")
        assert one.code() == 0
        pids = pids_in(tmp_path)
        imported = pids.pop("imported")
        try:
            wait_until_gone(*pids.values())
            assert is_running(imported)
        finally:
            os.kill(imported, signal.SIGKILL)
    one.output()


IMPORTING = """
import sys
sys.path[:0] = {path!r}
from paceline.run.launch import forkserver
forkserver.PRELOAD = ["never_ends"]
forkserver.ForkServer().start()
sys.stdin.read()
"""


def test_killed_launcher_takes_a_fork_server_that_is_importing_with_it(tmp_path):
    (tmp_path / "never_ends.py").write_text(
        STARTS_PROCESSES
        + f"note_pid({str(tmp_path)!r}, 'importing', os.getpid())\nsignal.pause()\n"
    )
    source = IMPORTING.format(path=[str(tmp_path), *sys.path])
    with subprocess.Popen([sys.executable, "-c", source], stdin=subprocess.PIPE) as launcher:
        while not (pids := pids_in(tmp_path)):
            os.sched_yield()
        launcher.kill()
        wait_until_gone(*pids.values())
