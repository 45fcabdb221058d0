# SPDX-License-Identifier: BSD-3-Clause
"""Measure what strangers cost a run: clients that connect to its server and don't know the token.

One run with four TCP workers trains all the time. Windows of a few seconds alternate: nobody
disturbs it; strangers disturb another socket, which shows what they cost this machine by
themselves; strangers disturb the server. The table has medians over several rounds: the time of a
step, as a ratio to that of an undisturbed run, and how much of one core the server uses. All
strangers are on loopback, and limited in number and rate.
"""

import argparse
import json
import multiprocessing
import os
import select
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
from typing import NamedTuple

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
    open_ones: dict[int, socket.socket] = {}
    closed = select.epoll()
    while True:
        began = monotonic()
        room = REOPENED_A_SECOND // 10 if open_ones else count
        for _ in range(min(room, count - len(open_ones))):
            if (sock := connect(address)) is not None:
                with suppress(OSError):
                    sock.sendall(first)
                open_ones[sock.fileno()] = sock
                closed.register(sock, select.EPOLLRDHUP)
        sleep(max(0.0, began + 0.1 - monotonic()))
        for fd, _ in closed.poll(0):
            open_ones.pop(fd).close()


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
def training(folder: Path, options: argparse.Namespace) -> Iterator[tuple[Address, "Steps"]]:
    """Train until the end of the context; yield the server's address and its steps."""
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
            yield (host, int(port)), Steps(steps, server_of(run.pid))
        finally:
            run.send_signal(signal.SIGINT)
            run.wait()


class Window(NamedTuple):
    """The mean cost of a step for a while."""

    step_s: float
    server_share: float  # of one core


class Steps(NamedTuple):
    """The steps of a run."""

    times: Path
    server: int  # pid

    def measure(self, window_s: float) -> Window:
        """Return the costs of a step during the next seconds."""
        began, used = monotonic(), self._used_s()
        sleep(window_s)
        ended, used = monotonic(), self._used_s() - used
        lines = self.times.read_text(encoding="ascii").split("\n")[:-1]
        times = [t for t in map(float, lines) if began <= t <= ended]
        step_s = (times[-1] - times[0]) / (len(times) - 1)
        return Window(step_s, used / (ended - began))

    def _used_s(self) -> float:
        ticks = Path(f"/proc/{self.server}/stat").read_text(encoding="ascii").rsplit(")")[1].split()
        return (int(ticks[11]) + int(ticks[12])) / os.sysconf("SC_CLK_TCK")


def server_of(launcher: int) -> int:
    """Return the pid of the server of a launcher."""
    status = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            name, _, rest = path.read_text(encoding="utf-8").partition("(")[2].rpartition(")")
            status[int(path.parent.name)] = name, int(rest.split()[1])
    for pid, (name, parent) in status.items():
        above = parent, status.get(parent, ("", 0))[1]
        if name == "paceline-server" and launcher in above:
            return pid
    raise SystemExit("found no server")


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
    steps: Steps,
    seconds: float,
    attackers: list[Callable[[Address], None]],
    target: Address | None,
) -> Window:
    """Return the costs of a step while these attack the target; None: nobody does."""
    if target is None:
        sleep(SETTLE_S)
        return steps.measure(seconds)
    with ExitStack() as stack:
        for attack in attackers:
            stack.enter_context(process(attack, target))
        sleep(SETTLE_S)
        return steps.measure(seconds)


def summary(rounds: list[list[Window]]) -> dict[str, float]:
    """Return the medians of all windows, and of the ratios within a round."""
    found = {"step_s": median(alone.step_s for alone, _, _ in rounds)}
    for i, where in enumerate(("alone", "other", "server")):
        found[f"step_{where}"] = median(one[i].step_s / one[0].step_s for one in rounds)
        found[f"share_{where}"] = median(one[i].server_share for one in rounds)
    return found


def line(row: dict[str, object]) -> str:
    """Return a row of the table."""
    steps = f"{row['step_other']:14.3f} {row['step_server']:10.3f}"
    shares = " ".join(f"{row[f'share_{where}']:10.1%}" for where in ("alone", "other", "server"))
    return f"{row['strangers']:34} {1e3 * float(str(row['step_s'])):6.2f} ms {steps} {shares}"


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
        f"{'':34} {'step':>9} {'step, strangers at':^25} {'core of the server, strangers at':^32}"
    )
    words = ("alone", "another socket", "the server", "nothing", "other", "server")
    widths = (9, 14, 10, 10, 10, 10)
    print(" " * 34, *(f"{word:>{width}}" for word, width in zip(words, widths, strict=True)))
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(options, Path(folder))
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=1), encoding="ascii")


if __name__ == "__main__":
    main()
