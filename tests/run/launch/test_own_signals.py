# SPDX-License-Identifier: BSD-3-Clause
"""Handlers that forked processes don't inherit."""

import signal
import subprocess
import sys

import pytest

PROGRAM = """
import os, signal, sys, threading
from paceline.run.launch.own_signals import handle_in_this_process
handled = []
"""


def run(source):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM + source], capture_output=True, text=True, check=False
    )
    assert done.stderr == ""
    return done.returncode, done.stdout.split()


def test_signal_is_handled_in_this_process():
    source = """
handle_in_this_process([signal.SIGTERM, signal.SIGHUP], handled.append)
os.kill(os.getpid(), signal.SIGTERM)
os.kill(os.getpid(), signal.SIGHUP)
print(*map(int, handled))
"""
    assert run(source) == (0, ["15", "1"])


@pytest.mark.parametrize("fork", ["os.fork()", "os.forkpty()[0]"])
def test_forked_process_is_ended_by_the_signal_whenever_it_arrives(fork):
    """The first instruction that such a process executes may come after the signal."""
    source = f"""
handle_in_this_process([signal.SIGTERM], handled.append)
for _ in range(100):
    if (pid := {fork}) == 0:
        while True:
            signal.pause()
    os.kill(pid, signal.SIGTERM)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == -signal.SIGTERM
os.kill(os.getpid(), signal.SIGTERM)
print(len(handled))
"""
    assert run(source) == (0, ["1"])


def test_handler_of_the_script_is_kept():
    source = """
def own(*_):
    print("own")
signal.signal(signal.SIGTERM, own)
handle_in_this_process([signal.SIGTERM], handled.append)
os.kill(os.getpid(), signal.SIGTERM)
print(len(handled))
"""
    assert run(source) == (0, ["own", "0"])


def test_other_threads_change_nothing():
    source = """
thread = threading.Thread(target=handle_in_this_process, args=([signal.SIGTERM], handled.append))
thread.start()
thread.join()
os.kill(os.getpid(), signal.SIGTERM)
"""
    assert run(source) == (-signal.SIGTERM, [])
