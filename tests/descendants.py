# SPDX-License-Identifier: BSD-3-Clause
"""Processes that a script starts in every usual way, and what has become of them."""

import os
import select
from pathlib import Path

__all__ = ["KINDS", "STARTS_PROCESSES", "is_running", "pids_in", "wait_until_gone"]

PATIENCE_S = 60

KINDS = {"popen", "session", "group", "shell", "fork", "daemon", "stubborn"}

STARTS_PROCESSES = """
import os, signal, subprocess, sys, time
from pathlib import Path

def note_pid(folder, name, pid):
    partial = Path(folder) / f"{name}.{pid}.partial"
    partial.write_text(str(pid))
    partial.rename(partial.with_suffix(".pid"))

def wait_for_pid(folder, name):
    while not list(Path(folder).glob(f"{name}.*.pid")):
        time.sleep(0.002)

def start_processes(folder):
    SLEEP = ["sleep", "1000"]
    note_pid(folder, "popen", subprocess.Popen(SLEEP).pid)
    note_pid(folder, "session", subprocess.Popen(SLEEP, start_new_session=True).pid)
    note_pid(folder, "group", subprocess.Popen(SLEEP, process_group=0).pid)
    os.system(f"cd '{folder}'; sleep 1000 & echo $! > shell.partial; mv shell.partial shell.$!.pid")
    if (pid := os.fork()) == 0:
        signal.pause()
    note_pid(folder, "fork", pid)
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            note_pid(folder, "daemon", os.getpid())
            signal.pause()
        os._exit(0)
    wait_for_pid(folder, "daemon")
    if os.fork() == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        note_pid(folder, "stubborn", os.getpid())
        while True:
            signal.pause()
    wait_for_pid(folder, "stubborn")
"""


def pids_in(folder: Path) -> dict[str, int]:
    """Return the pids that a script noted in this folder, by the kind of the process."""
    return {path.name.partition(".")[0]: int(path.read_text()) for path in folder.glob("*.pid")}


def is_running(pid: int) -> bool:
    """Return whether there is such a process."""
    return Path(f"/proc/{pid}").exists()


def wait_until_gone(*pids: int) -> None:
    """Wait until these processes have exited."""
    for pid in pids:
        try:
            fd = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        assert poll.poll(PATIENCE_S * 1000), f"process {pid} is still running"
        os.close(fd)
