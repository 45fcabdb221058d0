# SPDX-License-Identifier: BSD-3-Clause
"""How near a real run comes to the limit of the very schedule that it draws; `make bench`.

Eight workers take 50 ms for a gradient, and in 5 of 100 cases an extra of 500 ms on average. Each
draws its times from the seed, and the simulator draws the same, so that its time for an update is
the prediction, and the limit: what it would take if nothing but waiting took any time.
"""

import argparse
import contextlib
import io
import tempfile
from pathlib import Path

from paceline.cli.show import print_table
from paceline.run.launch.forkserver import ForkServer
from paceline.run.launch.launcher import Launcher
from paceline.run.settings import Settings
from paceline.sim.cluster import Cluster
from paceline.sim.simulate import simulate
from paceline.spec import Late, RunSpec
from paceline.trace.schema import Trace, read_trace

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
    """The trace of a real run."""
    with tempfile.TemporaryDirectory() as folder:
        settings = Settings(
            spec=spec,
            policy=policy,
            slow=LATENCY,
            script=str(HERE / "paced.py"),
            arguments=("tiny", str(Path(folder, "times"))),
        )
        launch = Launcher(settings, Path(folder), forkserver)
        with contextlib.redirect_stdout(io.StringIO()):
            code = launch.run()
        assert code == 0
        return read_trace(Path(folder, "trace.jsonl"))


def step_ms(trace: Trace) -> float:
    """Milliseconds from the first update to the last, for each."""
    times = [update.t for update in trace.updates()]
    return 1e3 * (times[-1] - times[0]) / (len(times) - 1)


def main() -> None:
    """Read the options, and measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=1, help="how many schedules to draw")
    options = parser.parse_args()
    with ForkServer() as forkserver:
        measure(options.seeds, forkserver)


def measure(seeds: int, forkserver: ForkServer) -> None:
    """Measure and print."""
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
