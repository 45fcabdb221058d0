# SPDX-License-Identifier: BSD-3-Clause
"""Requests to the OS, tried in processes of their own."""

import signal
import subprocess
import sys

from descendants import wait_until_gone

IMPORTS = "import os, signal, sys\nfrom paceline.run.launch import prctl\n"
CHILD_THAT_WAITS = """
pid = os.fork()
if pid == 0:
    {}
    print(os.getpid(), flush=True)
    signal.pause()
os.read(0, 1)
"""


def start(source):
    """Start a Python that executes this."""
    return subprocess.Popen(
        [sys.executable, "-c", IMPORTS + source],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def test_process_dies_with_its_parent():
    with start(CHILD_THAT_WAITS.format("prctl.die_with(os.getppid())")) as parent:
        child = int(parent.stdout.readline())
        parent.kill()
        wait_until_gone(child)


def test_process_whose_parent_has_already_exited_exits():
    with start("prctl.die_with(1 + os.getppid())\nprint('lives')") as process:
        assert process.communicate() == ("", None)
        assert process.returncode == 1


def test_process_can_outlive_its_parent_again():
    source = CHILD_THAT_WAITS.format(
        "prctl.die_with(os.getppid()); prctl.outlive_parent(); "
        "signal.signal(signal.SIGHUP, lambda *_: (print('lives', flush=True), os._exit(0)))"
    )
    with start(source) as parent:
        child = int(parent.stdout.readline())
        parent.kill()
        parent.wait()
        subprocess.run(["kill", f"-{signal.SIGHUP:d}", str(child)], check=True)
        assert parent.stdout.readline() == "lives\n"
        wait_until_gone(child)


def test_orphans_are_adopted():
    source = """
prctl.adopt_orphans()
if os.fork() == 0:
    if os.fork() == 0:
        signal.pause()
    os._exit(0)
os.wait()
orphan = int(open(f"/proc/self/task/{os.getpid()}/children").read())
os.kill(orphan, signal.SIGKILL)
print(os.wait() == (orphan, signal.SIGKILL))
"""
    with start(source) as process:
        assert process.communicate()[0] == "True\n"


def test_processes_have_names():
    with start("prctl.set_process_name('w3')\nprint(open('/proc/self/comm').read())") as process:
        assert process.communicate()[0].strip() == "paceline-w3"
