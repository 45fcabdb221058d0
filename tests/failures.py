# SPDX-License-Identifier: BSD-3-Clause
"""Scripts that fail on purpose, and questions about the traces of their runs.

Processes synchronize through files in the run's folder (`tell` and `wait_for` in a script), and
never by sleeping and hoping.
"""

from typing import Any

from paceline.trace.schema import Gradient, Joined, Left, Trace
from plain import SETUP

HELPERS = """
import json
import os
import signal
import socket
import struct
import time

ROLE = os.environ["PACELINE_ROLE"]
WORKER = int(os.environ.get("PACELINE_WORKER", "-1"))  # before `join`, too

def wait_until(condition):
    patience_s = time.monotonic() + 60  # reached only by a failing test
    while not condition():
        assert time.monotonic() < patience_s
        time.sleep(0.002)

def tell(word, value=""):
    (OUT / f"{word}.partial").write_text(str(value))
    (OUT / f"{word}.partial").rename(OUT / f"{word}.word")

def was_told(word):
    return (OUT / f"{word}.word").exists()

def wait_for(word):
    wait_until(lambda: was_told(word))
    return (OUT / f"{word}.word").read_text()

def strike(number=signal.SIGKILL):
    tell(f"struck-{WORKER}", os.getpid())
    os.kill(os.getpid(), number)

def server_pid():
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(os.environ["PACELINE_ADDRESS"].replace("unix:@", chr(0)))
        credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    return struct.unpack("3i", credentials)[0]

def in_the_trace(**wanted):
    text = (OUT / "trace.jsonl").read_text()
    records = map(json.loads, text[: text.rfind("\\n") + 1].splitlines())
    return any(wanted.items() <= record.items() for record in records)
"""

TRAINING = SETUP + "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"

LOOP = """
run = paceline.join()
model, optimizer = run.prepare(model, optimizer)
while not run.finished:
    trouble(run)
    optimizer.zero_grad()
    loss_of(run.worker, run.version).backward()
    optimizer.step()
keep(run, weights=[p.detach().clone() for p in model.parameters()], version=run.version)
"""
"""The usual loop; a test defines `trouble(run)`."""


def troubled(trouble: str, loop: str = LOOP) -> str:
    """Return the source of a script that calls this `trouble(run)` in its loop."""
    return HELPERS + TRAINING + trouble + loop


def counts(trace: Trace) -> list[int]:
    """Return the number of contributions to each update."""
    return [len(update.contributors) for update in trace.updates()]


def fates(trace: Trace, worker: int) -> list[str]:
    """Return the fates of this worker's gradients."""
    return [str(gradient.fate) for gradient in trace.gradients() if gradient.worker == worker]


def joins_and_leaves(trace: Trace, worker: int) -> list[str]:
    """Return "joined" for each time this worker joined, and the reason for each time it left."""
    found = []
    for record in trace.records:
        if isinstance(record, Joined) and record.worker == worker:
            found.append("joined")
        elif isinstance(record, Left) and record.worker == worker:
            found.append(record.reason)
    return found


def assert_nothing_was_lost(trace: Trace) -> None:
    """Check that every accepted gradient is in exactly one update."""
    accepted = [(g.worker, g.version) for g in trace.gradients() if g.fate == "accepted"]
    assert sum(counts(trace)) == len(accepted) == len(set(accepted))


def last_left(trace: Trace, worker: int) -> Left:
    """Return the last record of this worker leaving."""
    return [r for r in trace.records if isinstance(r, Left) and r.worker == worker][-1]


def gradients_of(trace: Trace, worker: int, **wanted: Any) -> list[Gradient]:
    """Return this worker's gradients that have these values."""
    return [
        gradient
        for gradient in trace.gradients()
        if gradient.worker == worker
        and all(getattr(gradient, name) == value for name, value in wanted.items())
    ]
