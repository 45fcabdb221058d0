# SPDX-License-Identifier: BSD-3-Clause
"""Measure the time of a step across hosts, in network namespaces on this machine; needs root.

Each system trains the same model in turn on new hosts. The table has the medians over several
rounds. `bound` is the time that the busiest link needs for the bytes of a ring all-reduce, which
all-reduces can't beat unless they first add up the gradients within each host.
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from workloads import WORKLOADS

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))  # this folder has a hosts.py too
from hosts import GBIT, MBIT, Hosts
from namespaces import why_unavailable

HERE = Path(__file__).parent
WORKLOAD = "25m"
WARM_UP = 2  # steps that are not measured: DDP regroups its buckets after the first
PORT = 29500
STEP_S_MAX = 60.0  # a run that takes longer than this per step is stuck


@dataclass(frozen=True)
class Case:
    """Hosts and what is wrong with them."""

    name: str
    hosts: int = 4
    workers_per_host: int = 1
    bandwidth: float = GBIT
    slow_bandwidth: float | None = None  # of the last host
    steps: int = 10  # that are measured

    @property
    def workers(self) -> int:
        """The number of workers on all hosts."""
        return self.hosts * self.workers_per_host

    def start(self) -> Hosts:
        """Return the hosts, not built yet. Cubic is the default of most machines."""
        return Hosts(self.hosts, bandwidth=self.bandwidth, congestion="cubic")

    def bound_s(self, model_bytes: int) -> float:
        """Return the seconds of a ring all-reduce on the slowest link."""
        share = 2 * (self.workers - 1) / self.workers
        return share * model_bytes / (self.slow_bandwidth or self.bandwidth)


CASES = [
    Case("equal"),
    Case("slow-link", slow_bandwidth=100 * MBIT, steps=3),
    Case("2x4", hosts=2, workers_per_host=4),
]


def step_s_of_ddp(case: Case, hosts: Hosts, folder: Path) -> float:
    """Train with DDP on Gloo and return the median seconds of a step."""
    times = folder / "times"
    command = [sys.executable, HERE / "ddp_loop.py", WORKLOAD, WARM_UP + case.steps, times]
    variables = {
        "MASTER_ADDR": hosts.address(0),
        "MASTER_PORT": str(PORT),
        "WORLD_SIZE": str(case.workers),
        "GLOO_SOCKET_IFNAME": "eth0",
        "TORCH_CPP_LOG_LEVEL": "ERROR",  # it warns of addresses without a name
    }
    common = os.environ | variables
    programs = [
        hosts.popen(rank // case.workers_per_host, command, env=common | {"RANK": str(rank)})
        for rank in range(case.workers)
    ]
    for program in programs:
        code = program.wait(STEP_S_MAX * (WARM_UP + case.steps))
        assert code == 0, f"a rank of DDP ended with exit code {code}"
    return median(float(line) for line in times.read_text(encoding="ascii").split()[WARM_UP:])


SYSTEMS: dict[str, Callable[[Case, Hosts, Path], float]] = {"DDP": step_s_of_ddp}


def measure(system: str, case: Case) -> float:
    """Return the seconds of a step of this system on new hosts."""
    with case.start() as hosts, tempfile.TemporaryDirectory() as folder:
        if case.slow_bandwidth is not None:
            hosts.shape(case.hosts - 1, case.slow_bandwidth)
        return SYSTEMS[system](case, hosts, Path(folder))


def main() -> None:
    """Read the options, measure every case and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="", help="cases, such as equal,2x4")
    options = parser.parse_args()
    if reason := why_unavailable():
        sys.exit(reason)
    model = WORKLOADS[WORKLOAD]().model
    model_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
    print("".join(f"{title:>13}" for title in ("case", "bound", *SYSTEMS)))
    for case in CASES:
        if options.only and case.name not in options.only.split(","):
            continue
        rounds = [[measure(system, case) for system in SYSTEMS] for _ in range(options.rounds)]
        times = [case.bound_s(model_bytes), *map(median, zip(*rounds, strict=True))]
        print(f"{case.name:>13}" + "".join(f"{1e3 * t:10.0f} ms" for t in times), flush=True)


if __name__ == "__main__":
    main()
