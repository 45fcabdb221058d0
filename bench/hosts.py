# SPDX-License-Identifier: BSD-3-Clause
"""Measure the time of a step across hosts, in network namespaces on this machine; needs root.

Each system trains the same model in turn on new hosts. The table has the medians over several
rounds. `bound` is the time that the busiest link needs for the bytes of a ring all-reduce, which
all-reduces can't beat unless they first add up the gradients within each host. Paceline has servers
beside the workers of every host with a fast link, and one agent for several workers of a host;
`bfloat16` sends gradients and parameters in half precision. `predicted` is what the simulator says
about the run to its left, given how long the workers computed; the workers of a host count as one.
`sent` is what the busiest host sends in a step of the exact run, in sizes of the model; `in vain`
is the share of the gradients' bytes that went into no update.
"""

import argparse
import os
import secrets
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from subprocess import DEVNULL

from workloads import WORKLOADS

from paceline.core.events import Fate
from paceline.sim.cluster import Cluster
from paceline.sim.simulate import simulate
from paceline.spec import RunSpec
from paceline.trace.reader import read_trace
from paceline.trace.schema import Gradient, Trace

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))  # this folder has a hosts.py too
from hosts import GBIT, MBIT, Hosts
from namespaces import why_unavailable

HERE = Path(__file__).parent
WORKLOAD = "25m"
WARM_UP = 2  # steps that are not measured: DDP regroups its buckets after the first
PORT = 29500
STEP_S_MAX = 60.0  # a run that takes longer than this per step is stuck
EFFICIENCY = 0.956  # the share of a link that carries payload: 1448 of 1514 bytes of a packet


@dataclass(frozen=True)
class Case:
    """Hosts and what is wrong with them."""

    name: str
    hosts: int = 4
    workers_per_host: int = 1
    bandwidth: float = GBIT
    slow_bandwidth: float | None = None  # of the last host
    policy: str = "sync"  # of Paceline
    servers: int = 4  # of Paceline, beside the workers of the first hosts
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
    Case("backup", policy="backup:1"),
    Case("slow-link", slow_bandwidth=100 * MBIT, policy="backup:1", servers=3, steps=5),
    Case("2x4", hosts=2, workers_per_host=4, servers=2),
]


def step_s_of_ddp(case: Case, hosts: Hosts, folder: Path) -> tuple[float]:
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
    seconds = [float(line) for line in times.read_text(encoding="ascii").split()]
    return (median(seconds[WARM_UP:]),)


def run_paceline(case: Case, hosts: Hosts, folder: Path, wire: str) -> tuple[Trace, float]:
    """Train once; return the trace, and what the busiest host has sent in a step, in bytes."""
    steps, run_dir = WARM_UP + case.steps, folder / "run"
    address = f"{hosts.address(0)}:{PORT}"
    paceline = [sys.executable, "-m", "paceline"]
    script = [HERE / "paced.py", WORKLOAD, folder / "times"]
    token = ["--token-file", folder / "token"]
    run = ["-w", case.workers, "-p", case.policy, "--steps", steps, "--out", run_dir]
    run += ["--servers", case.servers, "--wire", wire, "--wire-parameters", wire]
    (folder / "token").touch(0o600)
    (folder / "token").write_text(secrets.token_hex(32), encoding="ascii")
    environment = os.environ | {"PYTHONPATH": str(HERE), "OMP_NUM_THREADS": "1"}
    options = {"env": environment, "stdout": DEVNULL, "stderr": DEVNULL}
    serve = [*paceline, "serve", *token]
    head = [*serve, *run, "--listen", address, "--checkpoint-every", "0"]
    programs = [hosts.popen(0, [*head, *script], **options)]
    for number in range(1, case.servers):
        listen = f"{hosts.address(number)}:{PORT}"
        other = [*serve, "--connect", address, "--number", number, "--listen", listen]
        programs.append(hosts.popen(number, [*other, *script], **options))
    for host in range(case.hosts):
        work = [*paceline, "work", "--connect", address, *token]
        work += ["--processes", case.workers_per_host]
        programs.append(hosts.popen(host, [*work, *script], **options))
    for program in programs:
        code = program.wait(STEP_S_MAX * steps)
        assert code == 0, f"a process of Paceline ended with exit code {code}"
    sent = max(hosts.bytes_sent(host) for host in range(case.hosts))
    return read_trace(run_dir / "trace.jsonl"), sent / steps


def step_s_of(trace: Trace) -> float:
    """Return the median seconds of an update."""
    times = [update.t for update in trace.updates()][WARM_UP - 1 :]
    return median(later - earlier for earlier, later in pairwise(times))


def share_in_vain(trace: Trace) -> float:
    """Return the share of the gradients' bytes that was of no use, after the warm-up."""
    began = list(trace.updates())[WARM_UP - 1].t
    gradients = [g for g in trace.records if isinstance(g, Gradient) and g.t > began]
    used = sum(g.pushed_bytes for g in gradients if g.fate is Fate.ACCEPTED)
    return 1 - used / sum(g.pushed_bytes for g in gradients)


def columns_of_exact(case: Case, hosts: Hosts, folder: Path) -> tuple[float, ...]:
    """Return the seconds of an update, the predicted ones, what the busiest host sends, in vain."""
    trace, sent = run_paceline(case, hosts, folder, "exact")
    return step_s_of(trace), predicted_s(case, trace), sent, share_in_vain(trace)


def columns_of_bfloat16(case: Case, hosts: Hosts, folder: Path) -> tuple[float, ...]:
    """Return the seconds of an update with half precision on the wire, and the predicted ones."""
    trace, _ = run_paceline(case, hosts, folder, "bfloat16")
    return step_s_of(trace), predicted_s(case, trace)


def predicted_s(case: Case, trace: Trace) -> float:
    """Return what the simulator predicts for an update of this run."""
    gradients = [one for one in trace.records if isinstance(one, Gradient)]
    computed_s = median(one.compute_s for one in gradients)
    pushed = [one.pushed_bytes for one in gradients if one.fate is Fate.ACCEPTED]
    model_bytes = median(one for one in pushed if one)  # a sum counts for one of its workers
    network = f"model={model_bytes:.0f},bandwidth={case.bandwidth * EFFICIENCY:.0f}"
    network += f",servers={case.servers},beside=true"
    if case.slow_bandwidth is not None:
        network += f"; worker {case.hosts - 1} {case.slow_bandwidth * EFFICIENCY:.0f}"
    spec = RunSpec(workers=case.hosts, steps=WARM_UP + case.steps)
    simulated = simulate(case.policy, Cluster.parse(f"{computed_s}s", network), spec)
    applied_s = median(update.apply_s for update in trace.updates())
    times = [update.t for update in simulated.updates()][WARM_UP - 1 :]
    return median(later - earlier for earlier, later in pairwise(times)) + applied_s


SYSTEMS: dict[str, Callable[[Case, Hosts, Path], tuple[float, ...]]] = {
    "DDP": step_s_of_ddp,
    "Paceline": columns_of_exact,
    "bfloat16": columns_of_bfloat16,
}


def measure(system: str, case: Case) -> tuple[float, ...]:
    """Return the seconds of a step of this system on new hosts, and further columns."""
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
    titles = ("case", "bound", "DDP", "Paceline", "predicted", "sent", "in vain")
    titles += ("bfloat16", "predicted")
    print("".join(f"{title:>13}" for title in titles))
    for case in CASES:
        if options.only and case.name not in options.only.split(","):
            continue
        rounds = [
            [seconds for system in SYSTEMS for seconds in measure(system, case)]
            for _ in range(options.rounds)
        ]
        ddp, exact, predicted, sent, vain, *half = map(median, zip(*rounds, strict=True))
        row = [milliseconds(t) for t in (case.bound_s(model_bytes), ddp, exact, predicted)]
        row += [f"{sent / model_bytes:11.2f} x", f"{100 * vain:11.1f} %"]
        row += [milliseconds(t) for t in half]
        print(f"{case.name:>13}" + "".join(row), flush=True)


def milliseconds(seconds: float) -> str:
    """Return a time as a column of the table."""
    return f"{1e3 * seconds:10.0f} ms"


if __name__ == "__main__":
    main()
