# SPDX-License-Identifier: BSD-3-Clause
"""The fast path gives the same trace as the shell, record by record."""

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


def run_in_the_shell(policy, cluster, spec):
    return Shell(Decider(parse_policy(policy), spec), cluster, lambda update: None).run()


@pytest.mark.parametrize("late", ["cancel", "finish"])
@pytest.mark.parametrize("latency", LATENCIES)
@pytest.mark.parametrize("policy", POLICIES)
def test_trace_equals_that_of_the_shell(policy, latency, late):
    cluster = Cluster.parse(latency)
    spec = RunSpec(workers=5, steps=80, late=late, seed=7, min_workers=2)

    fast = simulate(policy, cluster, spec).records

    assert fast == run_in_the_shell(policy, cluster, spec)


def run_on_the_fast_path(policy, cluster, spec):
    if policy.startswith(("sync", "backup")):
        needed = spec.workers - int(policy.partition(":")[2] or 0)
        times = draw_times(cluster.times, spec.workers, spec.steps, spec.seed)
        return barrier_records(times, needed, spec, cluster.batch, lambda update: None)
    rule = parse_policy(policy)
    return free_records(cluster.times, rule, spec, cluster.batch, lambda update: None)


@pytest.mark.parametrize("policy", ["sync", "backup:1", "async", "softsync:3"])
def test_simultaneous_events_have_the_order_of_the_shell(policy):
    """With constant times nearly all events are simultaneous."""
    cluster = Cluster.parse("50ms + 20% 50ms")
    spec = RunSpec(workers=6, steps=200)

    assert run_on_the_fast_path(policy, cluster, spec) == run_in_the_shell(policy, cluster, spec)


@pytest.mark.parametrize(
    ("policy", "latency", "late"), [("backup:1", "50ms", "finish"), ("async", "0s", "cancel")]
)
def test_shell_is_used_when_the_order_cannot_be_reproduced(policy, latency, late):
    cluster = Cluster.parse(latency)
    spec = RunSpec(workers=4, steps=20, late=late)

    with pytest.raises(Tie):
        run_on_the_fast_path(policy, cluster, spec)
    assert simulate(policy, cluster, spec).records == run_in_the_shell(policy, cluster, spec)


def test_very_uneven_workers_need_many_draws():
    """Times are drawn until even the slowest worker is past the end of the run."""
    cluster = Cluster.parse("exp:1ms,shift=1ms; worker 0 x0.001")
    spec = RunSpec(workers=3, steps=500)

    assert simulate("async", cluster, spec).records == run_in_the_shell("async", cluster, spec)


@pytest.mark.parametrize("late", ["cancel", "finish"])
def test_all_n_at_once_equal_each_n_separately(late):
    times = draw_times(Cluster.parse("exp:1s").times, workers=6, count=50, seed=1)
    every = np.arange(1, 7)

    together = version_durations(times, every, late)

    for n in every:
        alone = [float(r.closed[0]) for r in barrier_rounds(times, np.array([n]), late)]
        np.testing.assert_allclose(np.cumsum(together[:, n - 1]), alone, rtol=1e-12)


def test_cancelling_and_finishing_are_equal_without_backups():
    """With N = W no worker is late, so both settings give the same run."""
    times = draw_times(Cluster.parse("exp:1s").times, workers=4, count=30, seed=2)

    cancel = version_durations(times, np.array([4]), "cancel")
    finish = version_durations(times, np.array([4]), "finish")

    np.testing.assert_allclose(cancel, finish)


def test_late_worker_takes_the_time_of_the_version_that_it_begins():
    """Worker 1 is late for the first version, skips the second, and begins the third."""
    times = np.array([[1.0, 1.0, 1.0], [2.5, 9.0, 1.25]])

    *_, by_version = barrier_rounds(times, np.array([1]), "finish", by_version=True)
    *_, in_order = barrier_rounds(times, np.array([1]), "finish")

    assert by_version.began.tolist() == in_order.began.tolist() == [[2.0, 2.5]]
    assert by_version.arrives.tolist() == [[3.0, 2.5 + 1.25]]
    assert in_order.arrives.tolist() == [[3.0, 2.5 + 9.0]]


@pytest.mark.parametrize("late", ["cancel", "finish"])
def test_versions_in_which_all_are_slow_together_stay_so(late):
    """Without late workers, or if late work is cancelled, a version takes its own times only."""
    rng = np.random.default_rng(3)
    times = rng.uniform(1, 1.5, (5, 80)) * rng.choice([1, 20], 80)

    durations = version_durations(times, np.array([5]), late, by_version=True)[:, 0]

    np.testing.assert_allclose(durations, times.max(axis=0))
