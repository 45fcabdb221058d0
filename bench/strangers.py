# SPDX-License-Identifier: BSD-3-Clause
"""Measure what strangers cost a run: clients that connect to its server and don't know the token.

One run with four TCP workers trains all the time. Windows of a few seconds alternate: nobody
disturbs it; strangers disturb another socket, which shows what they cost this machine by
themselves; strangers disturb the server. The table has the medians over several rounds. All
strangers are on loopback, and limited in number and rate.
"""

import argparse
import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from statistics import median
from time import monotonic, sleep

from paceline.run.net.channel import frame
from paceline.run.net.messages import PROTOCOL, Hello, encode

HERE = Path(__file__).parent
HALF_OPEN, SLOW_READERS = 1000, 200
REOPENED_A_SECOND = 200  # connections of a stranger that the server has closed
FLOOD_A_SECOND = 250  # connections of each of two processes
SETTLE_S = 0.5  # before each window
GARBAGE = b"\xfe" * 4096
SCRIPT = """
import sys
from time import monotonic

import torch
from workloads import WORKLOADS

import paceline

workload = WORKLOADS[sys.argv[1]]()
optimizer = torch.optim.SGD(workload.model.parameters(), lr=1e-4, momentum=0.9)
run = paceline.join()
model, optimizer = run.prepare(workload.model, optimizer)
with open(sys.argv[2], "a" if run.is_first else "r", buffering=1) as file:
    while not run.finished:
        optimizer.zero_grad()
        workload.loss().backward()
        optimizer.step()
        if run.is_first:
            file.write(f"{monotonic()}\\n")
"""

Address = tuple[str, int]


def connect(address: Address) -> socket.socket | None:
    """Connect; None if the server's queue is full."""
    sock = socket.socket()
    sock.settimeout(0.2)
    with suppress(OSError):
        sock.connect(address)
        return sock
    sock.close()
    return None


def hold(address: Address, count: int, first: bytes) -> None:
    """Keep this many connections open, which send `first` and never read."""
    open_ones: list[socket.socket] = []
    while True:
        began = monotonic()
        room = REOPENED_A_SECOND // 10 if open_ones else count
        for _ in range(min(room, count - len(open_ones))):
            if (sock := connect(address)) is not None:
                with suppress(OSError):
                    sock.sendall(first)
                sock.setblocking(False)
                open_ones.append(sock)
        open_ones = [sock for sock in open_ones if not _is_closed(sock)]
        sleep(max(0.0, began + 0.1 - monotonic()))


def _is_closed(sock: socket.socket) -> bool:
    try:
        has_ended = not sock.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return False
    except OSError:
        has_ended = True
    if has_ended:
        sock.close()
    return has_ended


def half_open(address: Address) -> None:
    """Connect and send nothing."""
    hold(address, HALF_OPEN, b"")


def slow_readers(address: Address) -> None:
    """Begin the handshake, and read nothing."""
    hold(address, SLOW_READERS, frame(encode(Hello(PROTOCOL, bytes(32)))))


def flood(address: Address) -> None:
    """Connect and send garbage, again and again."""
    while True:
        began = monotonic()
        for _ in range(FLOOD_A_SECOND // 10):
            if (sock := connect(address)) is not None:
                with suppress(OSError), sock:
                    sock.sendall(GARBAGE)
        sleep(max(0.0, began + 0.1 - monotonic()))


def sink(ready: "multiprocessing.connection.Connection") -> None:
    """Accept connections and close them."""
    with socket.create_server(("127.0.0.1", 0), backlog=1024) as listening:
        ready.send(listening.getsockname())
        held: list[socket.socket] = []
        while True:
            held = [*held[-256:], listening.accept()[0]]


KINDS: dict[str, list[Callable[[Address], None]]] = {
    f"{HALF_OPEN:,} half-open connections": [half_open],
    f"{SLOW_READERS} slow readers": [slow_readers],
    f"garbage, {2 * FLOOD_A_SECOND} connections/s": [flood, flood],
}


@contextmanager
def process(target: Callable[..., None], *arguments: object) -> Iterator[None]:
    """Run a function in a process of its own."""
    child = multiprocessing.get_context("fork").Process(target=target, args=arguments, daemon=True)
    child.start()
    try:
        yield
    finally:
        child.kill()
        child.join()


@contextmanager
def training(folder: Path, options: argparse.Namespace) -> Iterator[tuple[Address, Path]]:
    """Train until the end of the context; yield the server's address and a file of step times."""
    script, steps, run_dir = folder / "train.py", folder / "steps", folder / "run"
    script.write_text(SCRIPT, encoding="ascii")
    steps.touch()
    command = [sys.executable, "-m", "paceline", "run", "--workers", "4", "--transport", "tcp"]
    command += ["--checkpoint-every", "0", "--out", run_dir, script, options.model, steps]
    environ = {**os.environ, "PYTHONPATH": str(HERE)}
    with (
        (folder / "output").open("wb") as output,
        subprocess.Popen(list(map(str, command)), env=environ, stdout=output, stderr=output) as run,
    ):
        try:
            while len(steps.read_bytes()) < 2000:
                if run.poll() is not None:
                    raise SystemExit((folder / "output").read_text(encoding="utf-8"))
                sleep(0.1)
            _, host, port = (run_dir / "address").read_text(encoding="ascii").split(":")
            yield (host, int(port)), steps
        finally:
            run.send_signal(signal.SIGINT)
            run.wait()


def step_s(steps: Path, window_s: float) -> float:
    """Return the mean seconds of a step during the next seconds."""
    began = monotonic()
    sleep(window_s)
    ended = monotonic()
    lines = steps.read_text(encoding="ascii").split("\n")[:-1]
    times = [t for t in map(float, lines) if began <= t <= ended]
    return (times[-1] - times[0]) / (len(times) - 1)


def measure(options: argparse.Namespace, folder: Path) -> list[dict[str, object]]:
    """Return the step times of every kind of strangers, one row for each."""
    here, there = multiprocessing.Pipe()
    rows = []
    with training(folder, options) as (server, steps), process(sink, there):
        other = here.recv()
        for name, attackers in KINDS.items():
            if options.only not in name:
                continue
            rounds = [
                [
                    one_window(steps, options.seconds, attackers, target)
                    for target in (None, other, server)
                ]
                for _ in range(options.rounds)
            ]
            rows.append({"strangers": name, **summary(rounds)})
            print(line(rows[-1]), flush=True)
    return rows


def one_window(
    steps: Path,
    seconds: float,
    attackers: list[Callable[[Address], None]],
    target: Address | None,
) -> float:
    """Return the mean seconds of a step while these attack the target; None: nobody does."""
    if target is None:
        sleep(SETTLE_S)
        return step_s(steps, seconds)
    with ExitStack() as stack:
        for attack in attackers:
            stack.enter_context(process(attack, target))
        sleep(SETTLE_S)
        return step_s(steps, seconds)


def summary(rounds: list[list[float]]) -> dict[str, float]:
    """Return medians: the step time alone, and ratios to it."""
    return {
        "alone_s": median(alone for alone, _, _ in rounds),
        "another socket": median(control / alone for alone, control, _ in rounds),
        "the server": median(attacked / alone for alone, _, attacked in rounds),
        "server/other": median(attacked / control for _, control, attacked in rounds),
    }


def line(row: dict[str, object]) -> str:
    """Return a row of the table."""
    return (
        f"{row['strangers']:34} {1e3 * float(str(row['alone_s'])):7.2f} ms "
        f"{row['another socket']:14.3f} {row['the server']:11.3f} {row['server/other']:13.3f}"
    )


def main() -> None:
    """Read the options and measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=2.0, help="of a window")
    parser.add_argument("--model", default="1m")
    parser.add_argument("--only", default="", help="part of the name of a kind")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    print(
        f"{'strangers':34} {'alone':>10} {'another socket':>14} {'the server':>11} {'server/other'}"
    )
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(options, Path(folder))
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=1), encoding="ascii")


if __name__ == "__main__":
    main()
