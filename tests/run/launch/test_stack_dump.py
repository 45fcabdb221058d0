# SPDX-License-Identifier: BSD-3-Clause
"""A living process writes its stack when it is asked, whatever it is doing."""

import os
import select
import signal
import subprocess
import sys

import pytest

from forked import PATIENCE_S
from paceline.run.launch.stack_dump import SIGNAL, request_stack

WAYS = {
    "loop": "while True: pass",
    "lock": "lock.acquire()",
    "read": "os.read(os.pipe()[0], 1)",
    "sleep": "time.sleep(1000)",
}

LINE = 'script.py", line 6 in <module>'
END = 'script.py", line '


def wait_for_stack(process):
    """Return the stack, which the process writes in a moment."""
    request = request_stack(process.pid)
    while END not in (text := request.read()):
        os.sched_yield()
    return text


def kill(process):
    os.kill(process.pid, signal.SIGKILL)
    process.code()
    process.is_gone = True


@pytest.fixture
def hanging(fork):
    started = []

    def start(statement, before=""):
        source = "import os, signal, threading, time\nlock = threading.Lock()\nlock.acquire()\n"
        source += f"{before}\nprint(flush=True)\n{statement}\n"
        process = fork(source)
        process.is_gone = False
        started.append(process)
        assert select.select([process.out], [], [], PATIENCE_S)[0]
        return process

    yield start
    for process in started:
        if not process.is_gone:
            kill(process)
        process.output()


@pytest.mark.parametrize("way", WAYS)
def test_process_writes_its_stack_and_continues_to_hang(hanging, way):
    process = hanging(WAYS[way])
    while LINE not in wait_for_stack(process):  # it may not be there yet
        pass
    assert wait_for_stack(process).count(END) == 1  # without the earlier ones
    assert os.path.exists(f"/proc/{process.pid}")


def test_nothing_is_sent_to_a_process_that_would_die_of_it(hanging):
    process = hanging("time.sleep(1000)", f"signal.signal({int(SIGNAL)}, signal.SIG_DFL)")
    assert request_stack(process.pid) is None
    program = [sys.executable, "-S", "-c", "input()"]
    with subprocess.Popen(program, stdin=subprocess.PIPE) as other:
        assert request_stack(other.pid) is None
        other.communicate(b"\n")
        assert other.returncode == 0
    assert request_stack(other.pid) is None


def test_stack_of_a_process_that_is_gone_is_empty(hanging):
    process = hanging("time.sleep(1000)")
    request = request_stack(process.pid)
    kill(process)
    assert request.read() == ""
