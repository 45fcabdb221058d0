# SPDX-License-Identifier: BSD-3-Clause
"""Calculate how many servers large clusters need: the tables of docs/scale.md.

The costs of a server come from one_server.csv, which `bench/one_server.py` measures. Workers are
equal, have one link each, and all servers have their own hosts. A step under `sync` or `backup` is

    the network    parameters travel to W workers and gradients from N of them, over links and
                   through server processes of limited speed: `network_s`, or the simulator
  + computing      which is left out: the tables show the rest
  + the optimizer  on the parameters of one server
  + messages       the head handles those of W workers one after the other

Nothing overlaps, so these are upper bounds. `--simulate` compares `network_s` with the simulator.
"""

import argparse
import csv
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import linear_regression, median
from typing import NamedTuple

from one_server import FILE, Case, PerStep

from paceline.cli.printing import human_bytes, human_seconds, three_digits
from paceline.sim.cluster import Cluster
from paceline.sim.simulate import simulate
from paceline.spec import RunSpec

PAGE = Path(__file__).parents[1] / "docs" / "scale.md"
MODEL_BYTES = 4 * 6 * 2041 * 2042  # of the model "25m" of bench/workloads.py
EFFICIENCY = 0.956  # the share of a link that carries payload: 1448 of 1514 bytes of a packet
DELAY_S = 1e-4  # of a message
GBIT = 1e9 / 8

MODELS = {"25 M": 100e6, "250 M": 1e9, "2.5 G": 10e9}  # parameters of 4 bytes
LINKS = (10, 100)  # Gbit/s
WORKERS = (100, 1000, 10_000)
BUDGETS_S = (0.1, 1.0, 10.0, 100.0)
IN_TIME = [f"in {human_seconds(budget_s)}" for budget_s in BUDGETS_S]

STRAGGLERS = "10s + 5% exp:10s"  # in the table of rules; with 100 workers, 250 M and 10 Gbit/s
SERVERS = (1, 5, 20, 50, 100)
STEPS, WARM_UP = 45, 5


class Costs(NamedTuple):
    """Processor time of one server process."""

    per_gradient_s: float  # whatever its size
    per_byte_s: float  # of a gradient: send its parameters, receive it, add it
    sgd_s: float  # for a step, per byte of the parameters; with momentum
    adamw_s: float  # likewise
    shared_gradient_s: float  # as the first one, with shared memory
    shared_byte_s: float  # likewise: only add it

    @property
    def process_rate(self) -> float:
        """Bytes a second that a process moves in each direction, if both are equally expensive."""
        return 2 / self.per_byte_s


class Step(NamedTuple):
    """A cluster, and what a step needs besides computing."""

    costs: Costs
    model_bytes: float
    gbits: float  # of every host's link
    workers: int
    servers: int = 1
    backups: int = 0

    @property
    def rate(self) -> float:
        """Bytes a second in each direction of a host."""
        return min(self.gbits * GBIT * EFFICIENCY, self.costs.process_rate)

    @property
    def network_s(self) -> float:
        """Return what the simulator says about equal workers, in closed form.

        All workers pull at a time, then 2 S of them push at a time.
        """
        turns, rest = divmod(self.workers - self.backups, 2 * self.servers)
        shares = max(1.0, self.workers / self.servers) + 2 * turns
        shares += max(1.0, rest / self.servers) if rest else 0.0
        messages = 2 + 2 * (turns + (rest > 0))
        return shares * self.model_bytes / self.rate + messages * DELAY_S

    @property
    def server_s(self) -> float:
        """Return the time for the optimizer and for messages."""
        share = self.costs.sgd_s * self.model_bytes / self.servers
        return share + self.costs.per_gradient_s * self.workers

    @property
    def communication_s(self) -> float:
        """Return the time of a step beyond computing."""
        return self.network_s + self.server_s

    def simulated_s(self, latency: str, steps: int, warm_up: int) -> float:
        """Return the mean seconds of a step in the simulator, without `server_s`."""
        network = f"model={self.model_bytes},bandwidth={self.rate},delay={DELAY_S}"
        network += f",servers={self.servers}"
        spec = RunSpec(workers=self.workers, steps=steps)
        trace = simulate(f"backup:{self.backups}", Cluster.parse(latency, network), spec)
        times = [update.t for update in trace.updates()]
        return (times[-1] - times[warm_up - 1]) / (steps - warm_up)


# ------------------------------------------------------------------------------------ measurements

Measured = dict[Case, PerStep]


def medians(file: Path) -> Measured:
    """Return the medians over all rounds."""
    found: dict[Case, list[list[float]]] = defaultdict(list)
    with file.open(encoding="ascii") as lines:
        for row in csv.DictReader(lines):
            case = Case(row["model"], int(row["workers"]), row["transport"], row["optimizer"])
            found[case].append([float(row[name]) for name in PerStep._fields])
    return {case: PerStep(*map(median, zip(*rows, strict=True))) for case, rows in found.items()}


def costs_of(measured: Measured) -> Costs:
    """Return what follows from the measurements."""

    def per_gradient_s(transport: str) -> float:
        """Return the slope over the number of tiny workers."""
        tiny = [case for case in measured if case[::2] == ("tiny", transport)]
        workers, ms = [case.workers for case in tiny], [measured[case].server_ms for case in tiny]
        return linear_regression(workers, ms).slope / 1e3

    def per_byte_s(transport: str) -> float:
        case = Case("25m", 4, transport)
        ms = measured[case].server_ms - measured[case].optimizer_ms
        return ms / 1e3 / (case.workers * MODEL_BYTES)

    def step_s(optimizer: str) -> float:
        return measured[Case("25m", 4, "tcp", optimizer)].optimizer_ms / 1e3 / MODEL_BYTES

    return Costs(
        per_gradient_s=per_gradient_s("tcp"),
        per_byte_s=per_byte_s("tcp"),
        sgd_s=step_s("sgd"),
        adamw_s=step_s("adamw"),
        shared_gradient_s=per_gradient_s("auto"),
        shared_byte_s=per_byte_s("auto"),
    )


# ------------------------------------------------------------------------------------------ tables

Rows = list[list[str]]


def smallest(cluster: Step, budget_s: float) -> int | None:
    """Return how many servers are enough to communicate in this time; None: no number is."""
    every = (cluster._replace(servers=servers) for servers in range(1, cluster.workers + 1))
    return next((one.servers for one in every if one.communication_s <= budget_s), None)


def saturating(cluster: Step, budget_s: float) -> int:
    """Return the largest number of workers that one server serves in this time; 0: none."""
    workers = 0
    while cluster._replace(workers=workers + 1).communication_s <= budget_s:
        workers += 1
    return workers


def clusters(costs: Costs) -> Iterator[tuple[str, Step]]:
    """Yield every number of workers, model and link, with the model's name."""
    for name, model_bytes in MODELS.items():
        for workers in WORKERS:
            for gbits in LINKS:
                yield name, Step(costs, model_bytes, gbits, workers)


def costs_table(costs: Costs) -> Rows:
    """Return the rows about the processor time of a server."""
    per_gradient = [
        f"{1e6 * one:.0f} µs" for one in (costs.per_gradient_s, costs.shared_gradient_s)
    ]
    per_gb = [three_digits(1e9 * one) + " s" for one in (costs.per_byte_s, costs.shared_byte_s)]
    optimizers = [three_digits(1e9 * one) + " s" for one in (costs.sgd_s, costs.adamw_s)]
    return [
        ["what the server does", "TCP", "shared memory"],
        ["handle a gradient, whatever its size", *per_gradient],
        ["send parameters, receive a gradient and add it, per GB; only add it", *per_gb],
        ["SGD with momentum, per GB of parameters", optimizers[0], "the same"],
        ["AdamW, per GB of parameters", optimizers[1], "the same"],
        ["so it moves at most, in each direction", f"{costs.process_rate / 1e9:.1f} GB/s", "–"],
    ]


def overhead_table(measured: Measured) -> Rows:
    """Return the rows about 8 to 64 workers on this machine."""
    rows = [["workers", "shared memory", "its server", "TCP", "its server"]]
    for workers in sorted({case.workers for case in measured if case.model == "tiny"}):
        both = [measured[Case("tiny", workers, transport)] for transport in ("auto", "tcp")]
        ms = [number for one in both for number in (one.overhead_ms, one.server_ms)]
        rows.append([str(workers), *(f"{number:.1f} ms" for number in ms)])
    return rows


def saturation_table(costs: Costs) -> Rows:
    """Return the rows about the workers that one server serves."""
    rows = [["model", "links", *IN_TIME]]
    for name, model_bytes in MODELS.items():
        for gbits in LINKS:
            found = [saturating(Step(costs, model_bytes, gbits, 1), b) for b in BUDGETS_S]
            rows.append([name, f"{gbits} Gbit/s", *(f"{n:,}" if n else "–" for n in found)])
    heads = [float(f"{budget_s / costs.per_gradient_s:.3g}") for budget_s in BUDGETS_S]
    rows.append(
        ["any", "the head alone, with any number of servers", *(f"{n:,.0f}" for n in heads)]
    )
    return rows


def servers_table(costs: Costs) -> Rows:
    """Return the rows about the servers that clusters need."""
    title = ["model", "workers", "links", "memory", "one server takes"]
    rows = [[*title, *IN_TIME]]
    for name, one in clusters(costs):
        memory = human_bytes(one.workers * one.model_bytes)
        found = [smallest(one, budget_s) for budget_s in BUDGETS_S]
        servers = [f"{n:,}" if n else "–" for n in found]
        alone = human_seconds(one.communication_s)
        rows.append([name, f"{one.workers:,}", f"{one.gbits} Gbit/s", memory, alone, *servers])
    return rows


def rules_table(costs: Costs) -> Rows:
    """Return the rows about workers of which some are slow, from the simulator."""
    rows = [["servers", "`sync`", "`backup:5`", "ratio"]]
    for servers in SERVERS:
        both = [Step(costs, MODELS["250 M"], 10, 100, servers, backups) for backups in (0, 5)]
        sync, backup = (one.simulated_s(STRAGGLERS, STEPS, WARM_UP) + one.server_s for one in both)
        ratio = f"{sync / backup:.2f}"
        rows.append([str(servers), human_seconds(sync), human_seconds(backup), ratio])
    return rows


TABLES: dict[str, Callable[[Measured, Costs], Rows]] = {
    "overhead": lambda measured, _: overhead_table(measured),
    "costs": lambda _, costs: costs_table(costs),
    "saturation": lambda _, costs: saturation_table(costs),
    "servers": lambda _, costs: servers_table(costs),
    "rules": lambda _, costs: rules_table(costs),
}


def table(name: str, measured: Measured) -> str:
    """Return a table as the page shows it."""
    rows = TABLES[name](measured, costs_of(measured))
    lines = ["| " + " | ".join(row) + " |\n" for row in rows]
    return "".join([lines[0], "|---" * len(rows[0]) + "|\n", *lines[1:]])


def with_tables(page: str, tables: dict[str, str]) -> str:
    """Return the page with these tables, each after a comment with its name."""
    for name, text in tables.items():
        comment = f"<!-- table: {name} -->\n\n"
        page = re.sub(rf"{comment}(\|.*\n)*\n?", lambda _, new=f"{comment}{text}\n": new, page)
    return page


def print_deviations(costs: Costs, workers_max: int) -> None:
    """Simulate each cell of the table of servers, and print by how much the formula differs."""
    found = {
        cluster._replace(servers=servers)
        for _, cluster in clusters(costs)
        for servers in [1, *(smallest(cluster, budget_s) for budget_s in BUDGETS_S)]
        if servers and cluster.workers <= workers_max
    }
    deviations = []
    for one in sorted(found):
        simulated_s = one.simulated_s("1s", steps=4, warm_up=2) - 1.0
        deviations.append(abs(one.network_s / simulated_s - 1))
        what = f"{human_bytes(one.model_bytes)}, {one.workers:,} workers, {one.gbits} Gbit/s"
        both = f"{human_seconds(simulated_s)}, {human_seconds(one.network_s)}"
        print(f"{what}, servers: {one.servers}; {both}", flush=True)
    print(f"{len(found)} clusters; the largest deviation is {100 * max(deviations):.2f} %")


def main() -> None:
    """Read the options, and print the tables or the comparison."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--file", type=Path, default=FILE, help="the measurements")
    parser.add_argument("--write", action="store_true", help="put the tables into docs/scale.md")
    parser.add_argument("--simulate", type=int, metavar="W", help="all clusters up to W workers")
    options = parser.parse_args()
    measured = medians(options.file)
    if options.simulate:
        print_deviations(costs_of(measured), options.simulate)
        return
    tables = {name: table(name, measured) for name in TABLES}
    print(*tables.values(), sep="\n", end="")
    if options.write:
        PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8"), tables), encoding="utf-8")


if __name__ == "__main__":
    main()
