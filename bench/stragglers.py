# SPDX-License-Identifier: BSD-3-Clause
"""Measure how close a real run comes to the limit of its schedule; part of `make bench`.

Eight workers take 50 ms for a gradient, and in 5 % of the cases 500 ms longer on average. Workers
and simulator draw the same times from the same seed. So the simulator's time for an update is both
a prediction and a limit: the time it would take if everything except the delays were free.
"""

import argparse
import contextlib
import io
import tempfile
from pathlib import Path

from paceline.cli.printing import print_table
from paceline.run.launch.forkserver import ForkServer
from paceline.run.launch.launcher import Launcher
from paceline.run.settings import Settings
from paceline.sim.cluster import Cluster
from paceline.sim.simulate import simulate
from paceline.spec import Late, RunSpec
from paceline.trace.reader import read_trace
from paceline.trace.schema import Trace

HERE = Path(__file__).parent
LATENCY = "50ms + 5% exp:500ms"
WORKERS = 8
CASES: list[tuple[str, Late, int]] = [
    ("sync", "cancel", 200),
    ("backup:1", "cancel", 400),
    ("backup:1", "finish", 400),
    ("backup:2", "cancel", 400),
    ("backup:2", "finish", 400),
    ("softsync:4", "cancel", 400),
    ("async", "cancel", 1000),
]


def measured(policy: str, spec: RunSpec, forkserver: ForkServer) -> Trace:
    """Train for real and return the trace."""
    with tempfile.TemporaryDirectory() as folder:
        settings = Settings(
            spec=spec,
            policy=policy,
            latency=LATENCY,
            script=str(HERE / "paced.py"),
            arguments=("tiny", str(Path(folder, "times"))),
        )
        launch = Launcher(settings, Path(folder), forkserver)
        with contextlib.redirect_stdout(io.StringIO()):
            code = launch.run()
        assert code == 0
        return read_trace(Path(folder, "trace.jsonl"))


def step_ms(trace: Trace) -> float:
    """Return the mean time between updates in milliseconds."""
    times = [update.t for update in trace.updates()]
    return 1e3 * (times[-1] - times[0]) / (len(times) - 1)


def main() -> None:
    """Read the options and measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=1, help="number of schedules to draw")
    options = parser.parse_args()
    with ForkServer() as forkserver:
        measure(options.seeds, forkserver)


def measure(seeds: int, forkserver: ForkServer) -> None:
    """Measure every case and print the table."""
    rows = []
    for policy, late, steps in CASES:
        for seed in range(seeds):
            spec = RunSpec(workers=WORKERS, steps=steps, late=late, seed=seed)
            limit = step_ms(simulate(policy, Cluster.parse(LATENCY), spec))
            real = step_ms(measured(policy, spec, forkserver))
            row = [f"{limit:.1f} ms", f"{real:.1f} ms", f"{100 * (real / limit - 1):+.1f} %"]
            rows.append([policy, late, f"{seed}", *row])
            print(*rows[-1], sep="  ", flush=True)
    columns = ["rule", "late", "seed", "predicted", "measured", "off by"]
    print_table(f"{WORKERS} workers, {LATENCY}", columns, rows)


if __name__ == "__main__":
    main()
