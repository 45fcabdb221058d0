# SPDX-License-Identifier: BSD-3-Clause
"""Measure how many gradients per second the simulator simulates; part of `make bench`.

Each rule runs five times, as `paceline simulate` runs it and with the event-driven shell alone.
The table has the medians. `simulate` uses vectors where only computation times matter.
"""

from statistics import median
from time import perf_counter

from paceline.cli.printing import print_table
from paceline.core.decider import Decider
from paceline.core.policies import parse_policy
from paceline.sim.cluster import Cluster
from paceline.sim.shell import Shell
from paceline.sim.simulate import simulate
from paceline.spec import RunSpec
from paceline.trace.schema import Gradient

ROUNDS = 5
GRADIENTS = 100_000
TARGET = 200_000
CLUSTERS = {name: Cluster.parse(name) for name in ("exp:20ms,shift=50ms", "50ms + 5% exp:500ms")}


def by_default(policy: str, latency: str, spec: RunSpec) -> float:
    """Return the gradients per second of `paceline simulate`."""
    began = perf_counter()
    trace = simulate(policy, CLUSTERS[latency], spec)
    took_s = perf_counter() - began
    return sum(1 for _ in trace.gradients()) / took_s


def by_the_shell(policy: str, latency: str, spec: RunSpec) -> float:
    """Return the gradients per second of the event-driven shell."""
    began = perf_counter()
    decider = Decider(parse_policy(policy), spec)
    records = Shell(decider, CLUSTERS[latency], lambda update: None).run()
    took_s = perf_counter() - began
    return sum(type(r) is Gradient for r in records) / took_s


def main() -> None:
    """Measure and print."""
    cases = [
        ("sync", 100, 100),
        ("backup:5", 100, 95),
        ("async", 100, 1),
        ("softsync:10", 100, 10),
        ("backup:500", 10_000, 9500),
    ]
    specs = {
        (policy, latency, workers): RunSpec(workers=workers, steps=max(10, GRADIENTS // each))
        for policy, workers, each in cases
        for latency in CLUSTERS
    }
    fast: dict[tuple[str, str, int], list[float]] = {case: [] for case in specs}
    shell: dict[tuple[str, str, int], list[float]] = {case: [] for case in specs}
    for _ in range(ROUNDS):
        for case, spec in specs.items():
            policy, latency, _ = case
            fast[case].append(by_default(policy, latency, spec))
            shell[case].append(by_the_shell(policy, latency, spec))
    rows = [
        [
            policy,
            latency,
            f"{workers:,}",
            f"{median(fast[policy, latency, workers]):,.0f}",
            f"{median(shell[policy, latency, workers]):,.0f}",
            f"{median(fast[policy, latency, workers]) / TARGET:.1f}",
        ]
        for policy, latency, workers in specs
    ]
    title = f"simulated gradients per second, medians of {ROUNDS}"
    columns = ["policy", "latency", "workers", "simulate", "shell alone", "x target"]
    print_table(title, columns, rows)
    print(f"The target is {TARGET:,} per second with 100 workers.")


if __name__ == "__main__":
    main()
