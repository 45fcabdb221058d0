# SPDX-License-Identifier: BSD-3-Clause
"""The vectorised way gives the same trace as the shell, record by record."""

import numpy as np
import pytest

from paceline.core.decider import Decider
from paceline.core.policies import parse_policy
from paceline.sim.cluster import Cluster
from paceline.sim.fast import (
    Tie,
    barrier_records,
    barrier_rounds,
    draw_times,
    free_records,
    version_durations,
)
from paceline.sim.shell import Shell
from paceline.sim.simulate import simulate
from paceline.spec import RunSpec

LATENCIES = [
    "exp:20ms,shift=50ms",
    "lognormal:1.4s,0.5",
    "45ms + exp:1ms + 5% exp:500ms; worker 3 x2.2",
    "pareto:10ms,1.5",
    "50ms",
    "50ms + 20% exp:300ms; worker 1 x2",
]
POLICIES = ["sync", "backup:0", "backup:1", "backup:3", "async", "async:lr=inverse"]
POLICIES += ["softsync:1", "softsync:3", "softsync:11"]


def by_the_shell(policy, cluster, spec):
    return Shell(Decider(parse_policy(policy), spec), cluster, lambda update: None).run()


@pytest.mark.parametrize("late", ["cancel", "finish"])
@pytest.mark.parametrize("latency", LATENCIES)
@pytest.mark.parametrize("policy", POLICIES)
def test_the_trace_equals_the_shells(policy, latency, late):
    cluster = Cluster.parse(latency)
    spec = RunSpec(workers=5, steps=80, late=late, seed=7, min_workers=2)

    fast = simulate(policy, cluster, spec).records

    assert fast == by_the_shell(policy, cluster, spec)


def by_the_fast_way(policy, cluster, spec):
    if policy.startswith(("sync", "backup")):
        needed = spec.workers - int(policy.partition(":")[2] or 0)
        times = draw_times(cluster.times, spec.workers, spec.steps, spec.seed)
        return barrier_records(times, needed, spec, cluster.batch, lambda update: None)
    rule = parse_policy(policy)
    return free_records(cluster.times, rule, spec, cluster.batch, lambda update: None)


@pytest.mark.parametrize("policy", ["sync", "backup:1", "async", "softsync:3"])
def test_what_happens_at_the_same_moment_keeps_the_shells_order(policy):
    """With constant times nearly everything does."""
    cluster = Cluster.parse("50ms + 20% 50ms")
    spec = RunSpec(workers=6, steps=200)

    assert by_the_fast_way(policy, cluster, spec) == by_the_shell(policy, cluster, spec)


@pytest.mark.parametrize(
    ("policy", "latency", "late"), [("backup:1", "50ms", "finish"), ("async", "0s", "cancel")]
)
def test_what_cannot_be_put_in_order_is_left_to_the_shell(policy, latency, late):
    cluster = Cluster.parse(latency)
    spec = RunSpec(workers=4, steps=20, late=late)

    with pytest.raises(Tie):
        by_the_fast_way(policy, cluster, spec)
    assert simulate(policy, cluster, spec).records == by_the_shell(policy, cluster, spec)


def test_one_worker_that_is_always_far_behind_needs_many_draws_of_the_others():
    """Asynchronous workers are drawn until the slowest is past the end, however uneven they are."""
    cluster = Cluster.parse("exp:1ms,shift=1ms; worker 0 x0.001")
    spec = RunSpec(workers=3, steps=500)

    assert simulate("async", cluster, spec).records == by_the_shell("async", cluster, spec)


@pytest.mark.parametrize("late", ["cancel", "finish"])
def test_all_n_at_once_equal_one_n_at_a_time(late):
    times = draw_times(Cluster.parse("exp:1s").times, workers=6, count=50, seed=1)
    every = np.arange(1, 7)

    together = version_durations(times, every, late)

    for n in every:
        alone = [float(r.closed[0]) for r in barrier_rounds(times, np.array([n]), late)]
        np.testing.assert_allclose(np.cumsum(together[:, n - 1]), alone, rtol=1e-12)


def test_finishing_late_work_is_never_faster_than_cancelling_it_for_all_to_wait_for():
    """With N = W nobody is late, so both forms are the same run."""
    times = draw_times(Cluster.parse("exp:1s").times, workers=4, count=30, seed=2)

    cancel = version_durations(times, np.array([4]), "cancel")
    finish = version_durations(times, np.array([4]), "finish")

    np.testing.assert_allclose(cancel, finish)
