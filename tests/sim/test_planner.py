# SPDX-License-Identifier: BSD-3-Clause
"""The planner agrees with the simulator, obeys laws, and states its assumptions."""

from functools import cache

import numpy as np
import pytest

from paceline.errors import SpecError
from paceline.latency import Recorded
from paceline.sim import step_times
from paceline.sim.cluster import Cluster
from paceline.sim.convergence import every_gradient_counts, noise_scale
from paceline.sim.planner import FLAT, plan
from paceline.sim.recorded_times import recorded_times
from paceline.sim.simulate import simulate
from paceline.spec import RunSpec
from paceline.watch.summary import summarize

GRID = [
    "exp:20ms,shift=50ms",
    "lognormal:1.4s,0.3",
    "gamma:1s,4",
    "weibull:1s,1.5",
    "45ms + exp:5ms; worker 7 x2.2",
    "90% exp:10ms,shift=50ms | 10% exp:100ms,shift=50ms",
]
WORKERS = 8

long = pytest.mark.uncounted


@cache
def planned(latency, late="cancel"):
    spec = RunSpec(workers=WORKERS, late=late)
    return plan(Cluster.parse(latency), spec, every_gradient_counts(WORKERS, 1000))


@long
@pytest.mark.parametrize("latency", GRID)
@pytest.mark.parametrize(("backups", "late"), [(0, "cancel"), (1, "finish"), (3, "cancel")])
def test_predicted_step_time_is_within_3_percent_of_the_simulator(latency, late, backups):
    predicted = planned(latency).options[-1 - backups].step_s[late]
    # Another seed than the planner's, or the two would share their luck.
    spec = RunSpec(workers=WORKERS, steps=4000, late=late, seed=991)

    simulated = summarize(simulate(f"backup:{backups}", Cluster.parse(latency), spec))

    assert predicted == pytest.approx(simulated.step_s.mean, rel=0.03)


@pytest.mark.parametrize("latency", GRID)
def test_step_time_grows_with_n_and_finishing_is_never_faster_than_cancelling(
    latency,
):
    options = planned(latency).options
    cancel = np.array([o.step_s["cancel"] for o in options])
    finish = np.array([o.step_s["finish"] for o in options])

    assert np.all(np.diff(cancel) >= 0)
    assert np.all(finish >= cancel * (1 - 0.02))
    # The best is within 2 % of the least time, with the fewest backups; sync is the last row.
    result = planned(latency)
    limit = min(o.seconds for o in options) * (1 + FLAT)
    assert result.best is [o for o in result.options if o.seconds <= limit][-1]
    assert result.baseline.backups == 0
    assert result.gain.least == pytest.approx(result.baseline.seconds / result.best.seconds)


def test_time_to_target_is_step_time_times_updates_and_machine_hours_count_all_machines():
    for option in planned(GRID[0]).options:
        assert option.seconds == pytest.approx(option.step_s["cancel"] * option.updates)
        assert option.machine_hours == pytest.approx(WORKERS * option.seconds / 3600)


def test_constant_times_need_no_backups():
    result = plan(Cluster.parse("1s"), RunSpec(workers=4), every_gradient_counts(4, 1000))

    assert result.best.backups == 0
    assert result.gain == (1.0, 1.0)
    assert "Use sync" in result.sentence()
    assert result.cheapest.machines == 4


def test_less_noise_means_more_backups():
    cluster, spec = Cluster.parse("exp:20ms,shift=50ms"), RunSpec(workers=20)
    scales = [0.0, 1000.0, 10_000.0, float("inf")]

    best = [plan(cluster, spec, noise_scale(s, 32, 20, 1000)).best.backups for s in scales]

    assert best == sorted(best, reverse=True)
    assert best[0] == 19  # without noise one gradient is as good as all
    assert best[-1] < best[1]


def test_slow_majority_cannot_be_helped_by_backups():
    """Six of eight are three times slower: leaving them out costs more than it gains."""
    cluster = Cluster.parse("exp:1ms,shift=50ms; workers 0-5 x3")

    result = plan(cluster, RunSpec(workers=8), every_gradient_counts(8, 1000))

    assert result.best.needed >= 6


def test_cheapest_option_uses_fewer_machines_and_is_no_slower_than_sync():
    result = planned("45ms + exp:5ms; worker 7 x2.2")

    assert result.cheapest is not None
    assert result.cheapest.machines <= 7
    assert result.cheapest.seconds <= result.baseline.seconds
    assert result.cheapest.machine_hours < result.baseline.machine_hours
    assert result.cheapest.machine_hours <= result.best.machine_hours * 1.01


def test_interval_contains_the_truth_and_the_sentence_states_it():
    result = planned(GRID[0])

    assert result.best.interval.low <= result.best.seconds <= result.best.interval.high
    assert result.best_backups.low <= result.best.backups <= result.best_backups.high
    assert result.flat[0] <= result.best.backups <= result.flat[1]
    assert f"Use backup:{result.best.backups}" in result.sentence()
    assert any("every gradient counts" in a for a in result.assumptions)
    assert any("cancelled at once" in a for a in result.assumptions)
    assert any("finished and then dropped" in a for a in planned(GRID[0], "finish").assumptions)


def test_plan_from_a_recording_agrees_with_a_plan_from_its_model():
    model = Cluster.parse("exp:20ms,shift=50ms")
    trace = simulate("sync", model, RunSpec(workers=WORKERS, steps=600, seed=4))
    times = Recorded(recorded_times(trace, seed=0, with_travel=True).times)

    result = plan(Cluster(times), RunSpec(workers=WORKERS), every_gradient_counts(WORKERS, 1000))

    exact = planned("exp:20ms,shift=50ms")
    for option, expected in zip(result.options, exact.options, strict=True):
        assert option.step_s["cancel"] == pytest.approx(expected.step_s["cancel"], rel=0.05)
    assert result.flat[0] <= exact.best.backups <= result.flat[1]


def test_short_recording_is_less_certain_than_a_long_one():
    model = Cluster.parse("exp:20ms,shift=50ms")

    def width(steps):
        trace = simulate("sync", model, RunSpec(workers=WORKERS, steps=steps, seed=4))
        times = Recorded(recorded_times(trace, seed=0, with_travel=True).times)
        spec = RunSpec(workers=WORKERS)
        interval = plan(Cluster(times), spec, every_gradient_counts(WORKERS, 1000)).gain_interval
        return interval.high - interval.low

    assert width(20) > 2 * width(600)


NETWORK = Cluster.parse("exp:20ms,shift=50ms", "model=1MB,bandwidth=100MB,delay=1ms")


def test_plan_with_a_network_uses_the_full_simulator(monkeypatch):
    monkeypatch.setattr(step_times, "GRADIENTS_SLOW", 0)  # only as many updates as it must make
    done = []

    result = plan(NETWORK, RunSpec(workers=4), every_gradient_counts(4, 1000), done.append)

    assert "simulated in full" in result.assumptions[1]
    assert done == sorted(done)
    assert done[-1] == 1.0


@long
def test_plan_with_a_network_agrees_with_the_simulator():
    result = plan(NETWORK, RunSpec(workers=4), every_gradient_counts(4, 1000))

    spec = RunSpec(workers=4, steps=3000, seed=991)
    simulated = summarize(simulate("backup:1", NETWORK, spec))
    assert result.options[2].step_s["cancel"] == pytest.approx(simulated.step_s.mean, rel=0.03)


@long
def test_updates_with_fewer_contributions_count_for_less():
    """With half of the workers dead, sync makes updates of half the size: twice the time."""
    dead = Cluster.parse("exp:1ms,shift=50ms", faults="kill 0 at 0s; kill 1 at 0s")
    alive = Cluster.parse("exp:1ms,shift=50ms", "model=1,bandwidth=1GB")
    spec = RunSpec(workers=4)

    half = plan(dead, spec, every_gradient_counts(4, 1000))
    whole = plan(alive, spec, every_gradient_counts(4, 1000))

    assert half.baseline.seconds == pytest.approx(2 * whole.baseline.seconds, rel=0.03)
    assert half.cheapest is None


@long
def test_seeds_agree_within_their_intervals_with_slow_phases():
    """Replicates are independent runs; parts of one run would give too narrow intervals."""
    cluster = Cluster.parse("50ms + exp:5ms; phases x3 for 6s every 60s")

    first, second = (
        plan(cluster, RunSpec(workers=6, seed=s), every_gradient_counts(6, 1000)) for s in (1, 2)
    )

    assert first.gain_interval.low < second.gain_interval.high
    assert second.gain_interval.low < first.gain_interval.high


def test_worker_with_a_single_recorded_time_does_not_spoil_a_plan():
    model = Cluster.parse("exp:20ms,shift=50ms", faults="kill 7 at 150ms")
    trace = simulate("sync", model, RunSpec(workers=WORKERS, steps=600, seed=4))
    times = Recorded(recorded_times(trace, seed=0, with_travel=True).times)

    one, other = (
        plan(Cluster(times), RunSpec(workers=WORKERS, seed=s), every_gradient_counts(WORKERS, 1000))
        for s in (1, 2)
    )

    assert one.baseline.seconds == pytest.approx(other.baseline.seconds, rel=0.03)


def test_plan_for_many_workers_simulates_some_n():
    result = plan(
        Cluster.parse("exp:20ms,shift=50ms"), RunSpec(workers=300), every_gradient_counts(300, 1000)
    )

    assert [o.needed for o in result.options] == list(range(1, 301))
    finish = np.array([o.step_s["finish"] for o in result.options])
    assert np.all(np.diff(finish) > -1e-4)


def test_plan_for_a_cluster_whose_workers_all_die_is_refused():
    cluster = Cluster.parse("1s", faults="kill 0 at 5s; kill 1 at 5s")

    with pytest.raises(SpecError, match="let killed workers come back"):
        plan(cluster, RunSpec(workers=2), every_gradient_counts(2, 1000))


def test_plan_with_zero_computation_times_is_refused():
    with pytest.raises(SpecError, match="times > 0, but all of them are 0"):
        plan(Cluster.parse("0s"), RunSpec(workers=2), every_gradient_counts(2, 1000))
