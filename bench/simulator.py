# SPDX-License-Identifier: BSD-3-Clause
"""How many gradients a second the simulator simulates; `make bench` prints it.

Each rule runs in turn, both ways side by side, five times; the medians are shown. The shell is the
full event-driven simulator; the vectorised way serves where only computation times matter.
"""

from statistics import median
from time import perf_counter

from paceline.cli.show import print_table
from paceline.core.decider import Decider
from paceline.core.policies import parse_policy
from paceline.sim.cluster import Cluster
from paceline.sim.shell import Shell
from paceline.sim.simulate import simulate
from paceline.spec import RunSpec
from paceline.watch.trace import Gradient

ROUNDS = 5
GRADIENTS = 100_000
TARGET = 200_000
CLUSTER = Cluster.parse("exp:20ms,shift=50ms")


def by_default(policy: str, spec: RunSpec) -> float:
    """Gradients a second as `paceline simulate` runs it."""
    began = perf_counter()
    trace = simulate(policy, CLUSTER, spec)
    took_s = perf_counter() - began
    return sum(1 for _ in trace.gradients()) / took_s


def by_the_shell(policy: str, spec: RunSpec) -> float:
    """Gradients a second by the event-driven shell."""
    began = perf_counter()
    records = Shell(Decider(parse_policy(policy), spec), CLUSTER, lambda update: None).run()
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
        (policy, workers): RunSpec(workers=workers, steps=max(10, GRADIENTS // per_update))
        for policy, workers, per_update in cases
    }
    fast: dict[tuple[str, int], list[float]] = {case: [] for case in specs}
    shell: dict[tuple[str, int], list[float]] = {case: [] for case in specs}
    for _ in range(ROUNDS):
        for (policy, workers), spec in specs.items():
            fast[policy, workers].append(by_default(policy, spec))
            shell[policy, workers].append(by_the_shell(policy, spec))
    rows = [
        [
            policy,
            f"{workers:,}",
            f"{median(fast[policy, workers]):,.0f}",
            f"{median(shell[policy, workers]):,.0f}",
            f"{median(fast[policy, workers]) / TARGET:.1f}",
        ]
        for policy, workers in specs
    ]
    title = f"gradients simulated a second, medians of {ROUNDS}"
    print_table(title, ["policy", "workers", "simulate", "shell alone", "x target"], rows)
    print(f"The target is {TARGET:,} a second.")


if __name__ == "__main__":
    main()
