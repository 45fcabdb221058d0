# SPDX-License-Identifier: BSD-3-Clause
"""The OS says whether a worker's process was stopped."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.run.server import process_status
from paceline.run.server.process_status import is_stopped


@pytest.fixture
def child():
    """Start a process that waits for its standard input to close."""
    command = [sys.executable, "-S", "-c", "import sys; sys.stdin.read()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


def wait_for_state(pid, *states):
    """Wait until the OS says that the process is in one of these states."""
    while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in states:
        os.sched_yield()


def test_running_process_is_not_stopped(child):
    assert not is_stopped(child.pid)
    assert not is_stopped(os.getpid())


def test_stopped_process_is_stopped_until_it_continues(child):
    child.send_signal(signal.SIGSTOP)
    wait_for_state(child.pid, "T")
    assert is_stopped(child.pid)
    child.send_signal(signal.SIGCONT)
    wait_for_state(child.pid, "R", "S", "D")
    assert not is_stopped(child.pid)


def test_process_that_has_ended_is_not_stopped(child):
    child.kill()
    wait_for_state(child.pid, "Z")
    assert not is_stopped(child.pid)
    child.wait()
    assert not is_stopped(child.pid)


@pytest.mark.parametrize(
    ("stat", "expected"),
    [
        (b"7 (python) T 1 7 7", True),
        (b"7 (python) S 1 7 7", False),
        (b"7 (python) t 1 7 7", False),  # a debugger holds it
        (b"7 (my) T (name) S 1 7 7", False),
        (b"7 (my) S (name) T 1 7 7", True),
        (b"7 (a\nb) T 1", True),
        (b"", False),
    ],
)
def test_state_is_read_after_the_name(monkeypatch, tmp_path, stat, expected):
    """The name of a process may contain anything, parentheses included."""
    (tmp_path / "stat").write_bytes(stat)
    monkeypatch.setattr(process_status, "Path", lambda _: tmp_path / "stat")
    assert is_stopped(7) == expected
