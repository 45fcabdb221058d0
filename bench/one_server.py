# SPDX-License-Identifier: BSD-3-Clause
"""Measure what one server needs; `bench/scale.py` calculates with the results.

Two kinds of runs under `sync`, in turn: 8 to 64 tiny workers that wait 100 ms in each step, and
four workers with 25 million parameters. Each is a row of one_server.csv, in milliseconds per step:

    overhead_ms   the time of a step beyond the injected delay
    server_ms     the processor time of the server, all threads together
    optimizer_ms  the part of it that the optimizer's step takes

Processor time depends less on what else runs than time does, but it does depend on it.
"""

import argparse
import contextlib
import csv
import io
import os
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from paceline.run.launch.forkserver import ForkServer
from paceline.run.launch.launcher import Launcher
from paceline.run.settings import Settings
from paceline.spec import RunSpec
from paceline.trace.reader import read_trace

HERE = Path(__file__).parent
FILE = HERE / "one_server.csv"
WARM_UP = 3  # steps that are not measured
DELAY_S = 0.1  # of tiny workers


class Case(NamedTuple):
    """A run."""

    model: str  # of bench/workloads.py
    workers: int
    transport: str = "auto"
    optimizer: str = "sgd"

    @property
    def delay_s(self) -> float:
        """What is injected, so that many workers don't compete for the cores."""
        return DELAY_S if self.model == "tiny" else 0.0

    @property
    def steps(self) -> int:
        """How many are measured."""
        return 50 if self.model == "tiny" else 10


class PerStep(NamedTuple):
    """The costs of a step; columns of the table."""

    overhead_ms: float
    server_ms: float
    optimizer_ms: float


CASES = [
    *(Case("tiny", workers, how) for workers in (8, 16, 32, 64) for how in ("auto", "tcp")),
    *(Case("25m", 4, how) for how in ("auto", "tcp")),
    Case("25m", 4, "tcp", "adamw"),
]


def train(case: Case, forkserver: ForkServer) -> PerStep:
    """Train, and return the mean costs of a step."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "times")
        settings = Settings(
            spec=RunSpec(workers=case.workers, steps=WARM_UP + case.steps + 1),
            latency=f"{case.delay_s}s" if case.delay_s else "",
            transport=case.transport,
            checkpoint_every="0",
            script=str(HERE / "counted.py"),
            arguments=(case.model, case.optimizer, str(out)),
        )
        with contextlib.redirect_stdout(io.StringIO()):
            assert Launcher(settings, Path(folder), forkserver).run() == 0
        ends = [update.t for update in read_trace(Path(folder, "trace.jsonl")).updates()]
        used = [list(map(float, line.split())) for line in out.read_text("ascii").splitlines()]
    # Every step begins after an update. The last one is left out: it includes the end of the run.
    first, last = WARM_UP - 1, WARM_UP + case.steps - 1
    stepping = sum(after - before for before, after in used[first + 1 : last + 1])
    per_step = 1e3 / case.steps
    return PerStep(
        per_step * (ends[last] - ends[first]) - 1e3 * case.delay_s,
        per_step * (used[last][1] - used[first][1]),
        per_step * stepping,
    )


def main() -> None:
    """Read the options, measure all cases in turn, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--file", type=Path, default=FILE)
    options = parser.parse_args()
    os.environ["PYTHONPATH"] = str(HERE)  # where the processes find the workloads
    sys.path.insert(0, str(HERE))
    with options.file.open("w", encoding="ascii", newline="") as file, ForkServer() as forkserver:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["round", *Case._fields, *PerStep._fields])
        for number in range(options.rounds):
            for case in CASES:
                costs = train(case, forkserver)
                row = [number, *case, *(f"{cost:.3f}" for cost in costs)]
                writer.writerow(row)
                file.flush()
                print(*row, flush=True)


if __name__ == "__main__":
    main()
