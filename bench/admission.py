# SPDX-License-Identifier: BSD-3-Clause
"""Choose how many gradients are sent to a server at a time, in the simulator.

Each row is a cluster, the state of its links, and a rule. Each column is a number of transfers per
server; "all" means that every worker sends as soon as it has computed. A cell has the time per
update and the share of the gradients' bytes that were sent in vain, because the gradient was
dropped. The first updates don't count.
"""

from typing import NamedTuple

from paceline.cli.printing import print_table
from paceline.core.events import Fate
from paceline.sim.cluster import Cluster
from paceline.sim.simulate import simulate
from paceline.spec import RunSpec
from paceline.trace.schema import Trace

TRANSFERS = ("all", "1", "2", "3", "4")
RULES = ("sync", "backup:1", "async")
COMPUTATION = "50ms + exp:2ms"
LARGE = "model=100MB,bandwidth=125MB,delay=0.1ms"  # 25 million parameters, 1 Gbit/s
SMALL = "model=1MB,bandwidth=125MB,delay=0.5ms"
GRADIENTS = 60  # of each worker
WARM_UP = 0.2  # of the updates


class Case(NamedTuple):
    """Hosts and their links."""

    name: str
    workers: int
    network: str
    links: str
    own_links: str = ""
    faults: str = ""


def cases() -> list[Case]:
    """Return each cluster with equal links, and with a link that is slow or stalls at times.

    That one is the link of the last worker. No server runs on its host: it would slow down all.
    """
    found = []
    for name, workers, network, beside, stalls in (
        ("1 server, 4 workers", 4, LARGE, 0, "every 60s for 20s"),
        ("1 server, 16 workers", 16, LARGE, 0, "every 240s for 80s"),
        ("servers beside 4 workers", 4, LARGE, 4, "every 12s for 4s"),
        ("1 server, 16 workers, 1 MB", 16, SMALL, 0, "every 3s for 1s"),
    ):
        last = workers - 1
        all_hosts = f"{network},servers={beside},beside=true" if beside else network
        others = f"{network},servers={beside - 1},beside=true" if beside else network
        found += [
            Case(name, workers, all_hosts, "equal"),
            Case(name, workers, others, "one 10 x slower", f"; worker {last} 12.5MB"),
            Case(name, workers, others, "one stalls at times", faults=f"stall {last} {stalls}"),
        ]
    return found


def run(case: Case, rule: str, transfers: str) -> Trace:
    """Simulate one rule."""
    network = f"{case.network},transfers={transfers}{case.own_links}"
    cluster = Cluster.parse(COMPUTATION, network, case.faults)
    steps = GRADIENTS * (case.workers if rule == "async" else 1)
    return simulate(rule, cluster, RunSpec(workers=case.workers, steps=steps))


def cell(trace: Trace) -> str:
    """Return the time per update, and the share of bytes sent in vain."""
    steps = trace.header.steps or 0
    skipped = round(WARM_UP * steps)
    times = [update.t for update in trace.updates()]
    sent = [g for g in trace.gradients() if g.version >= skipped]
    vain = sum(g.pushed_bytes for g in sent if g.fate is not Fate.ACCEPTED)
    step_s = (times[-1] - times[skipped]) / (steps - 1 - skipped)
    return f"{step_s:.3g} s {100 * vain / sum(g.pushed_bytes for g in sent):.1f} %"


def main() -> None:
    """Simulate and print."""
    rows = [
        [case.name, case.links, rule, *(cell(run(case, rule, count)) for count in TRANSFERS)]
        for case in cases()
        for rule in RULES
    ]
    title = "time per update, and bytes sent in vain, by the number of transfers per server"
    print_table(title, ["cluster", "links", "rule", *TRANSFERS], rows)


if __name__ == "__main__":
    main()
