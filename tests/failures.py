# SPDX-License-Identifier: BSD-3-Clause
"""What scripts need that get into trouble on purpose, and what is asked of their runs after it.

Processes hold a moment open for each other by files in the folder of the run, `tell` and `wait_for`
in a script, and never by waiting for some time and hoping.
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
    patience_s = time.monotonic() + 60  # only a test that fails has to wait for so long
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
"""The usual loop; `trouble(run)` is what a test adds to it."""


def troubled(trouble: str, loop: str = LOOP) -> str:
    """The source of a script that runs into this trouble."""
    return HELPERS + TRAINING + trouble + loop


def counts(trace: Trace) -> list[int]:
    """How many contributions each update took."""
    return [len(update.contributors) for update in trace.updates()]


def fates(trace: Trace, worker: int) -> list[str]:
    """What became of this worker's gradients."""
    return [str(gradient.fate) for gradient in trace.gradients() if gradient.worker == worker]


def comings_and_goings(trace: Trace, worker: int) -> list[str]:
    """When this worker joined and left: "joined", and why it left."""
    found = []
    for record in trace.records:
        if isinstance(record, Joined) and record.worker == worker:
            found.append("joined")
        elif isinstance(record, Left) and record.worker == worker:
            found.append(record.reason)
    return found


def assert_nothing_was_lost(trace: Trace) -> None:
    """Every gradient that was accepted is in an update, once."""
    accepted = [(g.worker, g.version) for g in trace.gradients() if g.fate == "accepted"]
    assert sum(counts(trace)) == len(accepted) == len(set(accepted))


def last_left(trace: Trace, worker: int) -> Left:
    """How this worker left the last time."""
    return [r for r in trace.records if isinstance(r, Left) and r.worker == worker][-1]


def gradients_of(trace: Trace, worker: int, **wanted: Any) -> list[Gradient]:
    """This worker's gradients that have these values."""
    return [
        gradient
        for gradient in trace.gradients()
        if gradient.worker == worker
        and all(getattr(gradient, name) == value for name, value in wanted.items())
    ]
