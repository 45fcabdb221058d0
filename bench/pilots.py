# SPDX-License-Identifier: BSD-3-Clause
"""Check the planner's advice against real runs with injected delays; takes about 50 minutes.

For each latency, a pilot run under `sync` is recorded, and `paceline plan --trace` recommends a b.
Then every b from 0 to 4 is trained several times, and the time to a target accuracy is measured.
The learning rate is proportional to N, as in Chen et al. 2016. With each seed all b are trained
before the next seed, so that a busy period of the machine doesn't affect one b only.

Every result is added to a file as soon as it is known. Start the script again to continue: what is
in the file isn't measured again. The results in docs/planning.md are in pilots.csv.
"""

import argparse
import contextlib
import csv
import io
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from math import inf, sqrt
from pathlib import Path
from statistics import median, stdev
from time import monotonic
from typing import NamedTuple

from paceline.run.launch.forkserver import ForkServer
from paceline.run.launch.launcher import Launcher
from paceline.run.settings import Settings
from paceline.spec import RunSpec
from paceline.trace.reader import read_trace
from paceline.watch.curves import Target

HERE = Path(__file__).parent
WORKERS = 8
BACKUPS = range(5)
RATE = 0.2  # of sync
ACCURACY = 0.9
PILOT_UPDATES = 300
PILOT_SEED = 100  # the trainings have other delays and another order of the data

LATENCIES = [
    "20ms + exp:1ms; worker 7 x3",
    "20ms + exp:1ms; workers 6-7 x3",
    "20ms + exp:1ms + 5% exp:150ms",
    "20ms + exp:1ms; phases x10 for 500ms every 4500ms together",
    "20ms + exp:1ms; phases x5 for 500ms every 4s",
    "20ms + exp:8ms",
]


class Case(NamedTuple):
    """A run to measure: a pilot, or a training with this many backups."""

    latency: str
    kind: str  # "pilot" or "training"
    backups: int
    seed: int


class Result(NamedTuple):
    """What was measured."""

    seconds: float  # to the target; for a pilot, to its end
    advice: str  # of a pilot: the recommended b and its promised gain, or why there is none


Results = dict[Case, Result]


def cases(seeds: int, latencies: list[str]) -> Iterator[Case]:
    """Yield the runs to measure, in order: first all pilots."""
    for number, latency in enumerate(latencies):
        yield Case(latency, "pilot", 0, PILOT_SEED + number)
    for seed in range(seeds):
        for latency in latencies:
            for backups in BACKUPS:
                yield Case(latency, "training", backups, seed)


def measure(case: Case, forkserver: ForkServer) -> Result:
    """Run it for real."""
    is_pilot = case.kind == "pilot"
    share = (WORKERS - case.backups) / WORKERS
    with tempfile.TemporaryDirectory() as folder:
        settings = Settings(
            spec=RunSpec(
                workers=WORKERS, steps=PILOT_UPDATES if is_pilot else None, seed=case.seed
            ),
            policy=f"backup:{case.backups}",
            latency=case.latency,
            script=str(HERE / "noisy_digits.py"),
            arguments=(str(RATE * share), "2" if is_pilot else str(ACCURACY)),
        )
        with contextlib.redirect_stdout(io.StringIO()):
            code = Launcher(settings, Path(folder), forkserver).run()
        assert code == 0, case
        trace = read_trace(Path(folder, "trace.jsonl"))
        if is_pilot:
            return Result(trace.records[-1].t, advice(folder))
        return Result(Target("accuracy", ">=", ACCURACY).reached_at(trace), "")


def advice(folder: str) -> str:
    """Return what `paceline plan` recommends, such as "2, 1.30 to 1.45", or why nothing."""
    command = [sys.executable, "-m", "paceline", "plan", "--trace", folder, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        return done.stderr.strip()
    plan = json.loads(done.stdout)["plan"]
    low, high = (f"{plan['gain_interval'][end]:.2f}" for end in ("low", "high"))
    return f"{plan['best']['backups']}, {low} to {high}"


def read(path: Path) -> Results:
    """Return the results in the file."""
    if not path.exists():
        return {}
    with path.open(encoding="utf-8", newline="") as file:
        return {
            Case(row[0], row[1], int(row[2]), int(row[3])): Result(float(row[4]), row[5])
            for row in csv.reader(file)
        }


def table(results: Results, latencies: list[str]) -> Iterator[str]:
    """Yield the lines of a Markdown table, one row per latency."""
    yield (
        "| latency | "
        + " | ".join(f"b = {b}" for b in BACKUPS)
        + " | chosen b | result | gain: promised | measured |"
    )
    yield "|---|" + "---|" * (len(BACKUPS) + 4)
    for number, latency in enumerate(latencies):
        pilot = results.get(Case(latency, "pilot", 0, PILOT_SEED + number))
        times = seconds_by_seed(latency, results)
        if pilot is not None and times:
            medians = [median(each[b] for each in times) for b in BACKUPS]
            cells = " | ".join(f"{seconds:.2f} s" for seconds in medians)
            yield f"| `{latency}` | {cells} | {judged(pilot.advice, times)} |"


def judged(advised: str, times: list[dict[int, float]]) -> str:
    """Return the last cells of a row: the advice, compared with the measured times."""
    planned, _, promised = advised.partition(", ")
    if not planned.isdecimal() or int(planned) not in BACKUPS:
        return f"{advised} | not measured | - | -"
    chosen = int(planned)
    gain, error = ratio(0, chosen, times)
    return f"{chosen} | {compared(chosen, times)} | {promised} | {gain:.2f} ± {error:.2f}"


def seconds_by_seed(latency: str, results: Results) -> list[dict[int, float]]:
    """Return the time to the target for each b, one mapping per seed that has all of them."""
    by_seed: dict[int, dict[int, float]] = {}
    for case, result in results.items():
        if case.latency == latency and case.kind == "training":
            by_seed.setdefault(case.seed, {})[case.backups] = result.seconds
    return [times for times in by_seed.values() if len(times) == len(BACKUPS)]


def compared(chosen: int, times: list[dict[int, float]]) -> str:
    """Return in words how this b compares with the best other one."""
    medians = {b: median(each[b] for each in times) for b in BACKUPS}
    other = min((b for b in BACKUPS if b != chosen), key=lambda b: medians[b])
    if medians[chosen] <= medians[other]:
        return f"the best; b = {other} is {slower(other, chosen, times)} slower"
    return f"{slower(chosen, other, times)} slower than b = {other}"


def slower(one: int, other: int, times: list[dict[int, float]]) -> str:
    """Return by how much one b is slower than the other."""
    value, error = ratio(one, other, times)
    return f"{100 * (value - 1):.1f} ± {100 * error:.1f} %"


def ratio(one: int, other: int, times: list[dict[int, float]]) -> tuple[float, float]:
    """Return the ratio of the median times of two b, and twice its standard error by seed."""
    value = median(each[one] for each in times) / median(each[other] for each in times)
    ratios = [each[one] / each[other] for each in times]
    return value, 2 * stdev(ratios) / sqrt(len(ratios)) if len(ratios) > 1 else inf


def main() -> None:
    """Read the options, measure what is missing, print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=8, help="trainings for each b and latency")
    parser.add_argument("--quick", action="store_true", help="one latency and one seed")
    parser.add_argument("--minutes", type=float, default=inf, help="stop then, to continue later")
    parser.add_argument("--file", type=Path, default=Path("pilots-out.csv"), help="the results")
    parser.add_argument("--table", action="store_true", help="measure nothing, print the table")
    options = parser.parse_args()
    latencies = LATENCIES[:1] if options.quick else LATENCIES
    every = list(cases(1 if options.quick else options.seeds, latencies))
    results = read(options.file)
    if not options.table:
        measure_all(every, results, options.file, monotonic() + 60 * options.minutes)
    print("\n".join(table(results, latencies)))


def measure_all(every: list[Case], results: Results, path: Path, until: float) -> None:
    """Measure what has no result yet, and add it to the results and to the file."""
    missing = [case for case in every if case not in results]
    with ForkServer() as forkserver, path.open("a", encoding="utf-8", newline="") as file:
        for number, case in enumerate(missing, start=1 + len(every) - len(missing)):
            if monotonic() > until:
                break
            what = f"{case.kind}, b = {case.backups}, seed {case.seed}, {case.latency}"
            print(f"{number} of {len(every)}: {what}", file=sys.stderr, flush=True)
            results[case] = result = measure(case, forkserver)
            csv.writer(file).writerow([*case, f"{result.seconds:.3f}", result.advice])
            file.flush()
            print(f"    {result.seconds:.2f} s", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
