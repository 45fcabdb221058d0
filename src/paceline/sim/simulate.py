# SPDX-License-Identifier: BSD-3-Clause
"""Simulate a policy on a cluster; the result is a trace.

The same policy, spec and cluster always give the same trace. The k-th computation time of a worker
depends only on the seed, the worker and k, so two rules with the same seed see the same times.
"""

from collections.abc import Callable

from paceline.core.decider import Decider
from paceline.core.ledger import Ledger
from paceline.core.policies import Async, Backup, SoftSync, Sync, parse_policy
from paceline.core.policy import Policy
from paceline.errors import SpecError
from paceline.sim.cluster import Cluster
from paceline.sim.fast import Tie, barrier_records, draw_times, free_records
from paceline.sim.shell import Shell
from paceline.spec import RunSpec
from paceline.trace.schema import Header, Record, Trace

__all__ = ["simulate"]

FAST_LIMIT = 20_000_000  # gradients; above this the fast path would take too much memory


def simulate(
    policy: str | Policy,
    cluster: Cluster,
    spec: RunSpec,
    *,
    until: float | None = None,
    on_progress: Callable[[float], None] | None = None,
) -> Trace:
    """Simulate a run of `spec.steps` updates, or until the virtual time `until`.

    `on_progress` is called after each update with the share of the run that is done.
    """
    policy = parse_policy(policy)
    policy.validate(spec)
    if spec.steps is None and spec.samples is None and until is None:
        raise SpecError("the simulation needs an end; set steps, samples, or a time with until")
    if until is not None and not until >= 0:
        raise SpecError(f"until must be >= 0 seconds, got {until}")
    cluster.validate(spec)
    about = {"latency": str(cluster.times), "batch": str(cluster.batch)}
    if cluster.network is not None:
        about["network"] = str(cluster.network)
    if cluster.faults:
        about["faults"] = "; ".join(map(str, cluster.faults))
    decider = Decider(policy, spec)

    def report(update: int) -> None:
        if on_progress is not None:
            on_progress(_share(update, decider.ledger, until))

    records = _fast(policy, cluster, spec, report) if until is None else None
    if records is None:
        records = Shell(decider, cluster, report).run(until)
    return Trace(Header.of("sim", policy, spec, about), records)


def _share(update: int, ledger: Ledger, until: float | None) -> float:
    """Return the share of the run that is done, by the goal that will end it."""
    spec = ledger.spec
    shares = [
        now / goal
        for now, goal in ((update, spec.steps), (ledger.samples, spec.samples), (ledger.now, until))
        if goal
    ]
    return min(1.0, max(shares, default=1.0))


def _fast(
    policy: Policy, cluster: Cluster, spec: RunSpec, on_update: Callable[[int], None]
) -> list[Record] | None:
    """Return the records by the vectorized path, or None if it doesn't apply."""
    only_times = cluster.times.is_stationary and cluster.network is None and not cluster.faults
    steps = spec.steps or 0
    if not only_times or spec.samples is not None or steps * spec.workers > FAST_LIMIT:
        return None
    try:
        # By exact type: a subclass may answer differently, so it needs the decider.
        if type(policy) is Sync or type(policy) is Backup:
            needed = spec.workers - (policy.b if type(policy) is Backup else 0)
            times = draw_times(cluster.times, spec.workers, steps, spec.seed)
            return barrier_records(times, needed, spec, cluster.batch, on_update)
        if (type(policy) is Async or type(policy) is SoftSync) and policy.bound is None:
            return free_records(cluster.times, policy, spec, cluster.batch, on_update)
    except Tie:
        pass
    return None
