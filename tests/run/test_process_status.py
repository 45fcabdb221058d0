# SPDX-License-Identifier: BSD-3-Clause
"""The OS says whether a worker's process was stopped."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.run import process_status
from paceline.run.process_status import children_of, descendants, is_stopped


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
        (b"7 (python) T 1 7 7 0 -1 0 0 0 0 0 5 2 0 0", True),
        (b"7 (python) S 1 7 7 0 -1 0 0 0 0 0 5 2 0 0", False),
        (b"7 (python) t 1 7 7 0 -1 0 0 0 0 0 5 2 0 0", False),  # a debugger holds it
        (b"7 (my) T (name) S 1 7 7 0 -1 0 0 0 0 0 5 2 0 0", False),
        (b"7 (my) S (name) T 1 7 7 0 -1 0 0 0 0 0 5 2 0 0", True),
        (b"7 (a\nb) T 1 7 7 0 -1 0 0 0 0 0 5 2 0 0", True),
        (b"", False),
    ],
)
def test_state_is_read_after_the_name(monkeypatch, tmp_path, stat, expected):
    """The name of a process may contain anything, parentheses included."""
    (tmp_path / "stat").write_bytes(stat)
    monkeypatch.setattr(process_status, "Path", lambda _: tmp_path)
    assert is_stopped(7) == expected


def test_process_with_a_thread_that_waits_for_a_disk_waits_for_it(monkeypatch, tmp_path):
    numbers = b"1 7 7 0 -1 0 0 0 0 0 5 2 0 0"
    for folder, state in [("", b"S"), ("task/7", b"S"), ("task/8", b"D")]:
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        (tmp_path / folder / "stat").write_bytes(b"7 (name) %b %b" % (state, numbers))
    monkeypatch.setattr(
        process_status, "Path", lambda path: tmp_path / path.removeprefix("/proc/7").strip("/")
    )
    assert process_status.process_status(7).state == "D"
    (tmp_path / "task" / "8" / "stat").unlink()  # the thread ended
    assert process_status.process_status(7).state == "S"


def test_status_of_a_process_has_its_processor_time(child):
    status = process_status.process_status(os.getpid())
    assert status.cpu_s == pytest.approx(sum(os.times()[:2]), abs=0.1)
    assert not status.is_stopped
    child.kill()
    child.wait()
    assert process_status.process_status(child.pid) is None


def test_descendants_are_children_and_their_children():
    program = "import subprocess, sys; subprocess.run([sys.executable, '-S', '-c', sys.argv[1]])"
    command = [sys.executable, "-S", "-c", program, "print(flush=True); input()"]
    streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, **streams) as parent:
        parent.stdout.readline()
        [child] = descendants(parent.pid)
        assert children_of(parent.pid) == {child}
        assert parent.pid in descendants(os.getpid())
        assert child in descendants(os.getpid())
        assert descendants(child) == []
        parent.stdin.write(b"\n")
    assert descendants(parent.pid) == []
