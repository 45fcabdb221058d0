# SPDX-License-Identifier: BSD-3-Clause
"""The planner's advice from recordings, against truths that are known from the recordings."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.latency import Recorded
from paceline.sim.arrivals import read_arrivals
from paceline.sim.cluster import Cluster
from paceline.sim.convergence import at_least, every_gradient_counts, noise_scale
from paceline.sim.fast import version_durations
from paceline.sim.pilot import study
from paceline.sim.planner import FLAT, Plan, plan
from paceline.sim.recorded_times import Recording, Replayed, recorded_times
from paceline.sim.simulate import simulate
from paceline.spec import RunSpec

WORKERS = 8
UPDATES = 1000.0
LATES = ("cancel", "finish")
ALL_COUNT = every_gradient_counts(WORKERS, UPDATES)

long = pytest.mark.uncounted


def jitter(rng, versions):
    """Return times of about 50 ms, one row per worker, one column per version."""
    return 0.05 + rng.exponential(0.002, (WORKERS, versions))


def all_slow_together(share=0.1, factor=20.0, versions=300):
    """In some versions all workers are slow."""
    rng = np.random.default_rng(7)
    return jitter(rng, versions) * np.where(rng.random(versions) < share, factor, 1.0)


def one_slow_in_each(factor=4.5, versions=300):
    """In each version exactly one worker is slow, a different one each time."""
    rng = np.random.default_rng(8)
    times = jitter(rng, versions)
    times[rng.integers(WORKERS, size=versions), np.arange(versions)] *= factor
    return times


def run_with(times, policy="sync"):
    """Return the trace of a run in which the k-th computation of each worker takes these times."""
    recording = Recording(dict(enumerate(times)), drawn=0, bounds=0)
    spec = RunSpec(workers=len(times), steps=times.shape[1])
    return simulate(policy, Cluster(Replayed(recording)), spec)


def plan_from(trace, late="cancel", convergence=ALL_COUNT, seed=0) -> Plan:
    pilot = study(trace, seed=0)
    recording = pilot.recording
    spec = RunSpec(workers=len(recording.times), late=late, seed=seed)
    cluster, most = Cluster(recording.model()), recording.finished
    return plan(cluster, spec, convergence, most=most, ran=pilot.needed)


def mean_update_s(trace):
    times = [update.t for update in trace.updates()]
    return (times[-1] - times[0]) / (len(times) - 1)


def replayed_gain(times, backups, late="cancel"):
    """Return the gain over sync if the recorded versions happen once more, in their order."""
    workers = len(times)
    lasted = version_durations(times, np.array([workers - backups, workers]), late, by_version=True)
    some, sync = lasted.mean(axis=0)
    return sync / some * (workers - backups) / workers


# ---- slowness that workers share ----


@pytest.mark.parametrize("late", LATES)
def test_no_backups_if_all_workers_are_slow_together(late):
    result = plan_from(run_with(all_slow_together()), late)

    assert result.best.rule == "sync"
    assert result.gain == (1.0, 1.0)
    assert result.gain_interval.low == result.gain_interval.high == 1.0
    assert result.sentence() == (
        "Use sync: with 8 workers, backups would not save more than 2 % of the time."
    )


def test_independent_draws_would_promise_a_gain_that_is_not_there():
    """What the planner did before it drew whole versions."""
    times = Recorded(dict(enumerate(all_slow_together())))

    result = plan(Cluster(times), RunSpec(workers=WORKERS), ALL_COUNT)

    assert result.gain.least > 2


@pytest.mark.parametrize("seed", [0, 1])
def test_one_backup_if_exactly_one_worker_is_slow_in_each_version(seed):
    times = one_slow_in_each()
    truth = replayed_gain(times, backups=1)
    assert truth == pytest.approx(3.79, abs=0.15)  # 4.5 x 7/8, less some jitter

    result = plan_from(run_with(times), seed=seed)

    assert result.best.rule == "backup:1"
    assert result.gain.least == pytest.approx(truth, rel=0.01)
    assert result.gain_interval.low <= truth <= result.gain_interval.high
    assert result.best_backups.low == result.best_backups.high == 1


@long
@pytest.mark.parametrize(
    ("latency", "best"),
    [
        ("50ms + exp:2ms; phases x20 for 1s every 9s together", "sync"),
        ("50ms + exp:2ms; phases x10 for 2s every 2s on workers 0-1 together", "backup:2"),
    ],
)
def test_plan_from_shared_phases_and_from_a_run_with_them_agree(latency, best):
    cluster, spec = Cluster.parse(latency), RunSpec(workers=WORKERS)
    trace = simulate("sync", cluster, RunSpec(workers=WORKERS, steps=1500))

    assert plan(cluster, spec, ALL_COUNT).best.rule == best
    assert plan_from(trace).best.rule == best


def test_processes_that_share_two_cores_need_no_backups():
    """Eight processes of a real run on two cores.

    Measured there, on average over two runs of 200 updates each: 14.4 s under sync, 15.3 s under
    backup:1 and 13.8 s under backup:2. So, with every gradient counting the same, one backup would
    reach a target 0.82 times as fast, and two backups 0.78 times.
    """
    path = Path(__file__).with_name("arrivals_8_on_2_cores.csv")
    recording = read_arrivals(path, seed=0)

    result = plan(Cluster(recording.model()), RunSpec(workers=8), ALL_COUNT)

    assert result.best.rule == "sync"
    gains = [option.gain_over(result.baseline).least for option in result.options]
    assert gains[-2] == pytest.approx(0.82, abs=0.1)
    assert gains[-3] == pytest.approx(0.78, abs=0.1)


# ---- promises ----


@st.composite
def tables(draw):
    """Return times with stragglers, shared slowness, a slow worker and slow periods."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    workers, versions = draw(st.integers(2, 10)), draw(st.integers(30, 400))
    shape = workers, versions
    times = 0.05 + rng.exponential(draw(st.sampled_from([1e-4, 0.005, 0.05])), shape)
    share = draw(st.sampled_from([0.0, 0.05, 0.3]))
    times += (rng.random(shape) < share) * rng.exponential(0.3, shape)
    times *= np.where(rng.random(versions) < draw(st.sampled_from([0.0, 0.1])), 10, 1)
    times[0] *= draw(st.sampled_from([1.0, 2.0]))
    period = draw(st.sampled_from([0.0, 0.5]))
    times[:, : versions // 3] *= 1 + period * rng.random((workers, 1))
    return times


@long
@settings(max_examples=40, deadline=None)
@given(times=tables(), late=st.sampled_from(LATES))
def test_no_gain_is_promised_beyond_a_replay_of_the_recording(times, late):
    """The promise exceeds the replay by at most the width of the interval."""
    recorded = Recorded(dict(enumerate(times)), together=True)
    workers = len(times)
    spec = RunSpec(workers=workers, late=late)

    result = plan(Cluster(recorded), spec, every_gradient_counts(workers, UPDATES))

    truth = replayed_gain(times, result.best.backups, late)
    assert result.gain_interval.low <= truth * (1 + 1e-9)
    assert result.gain.most - truth <= result.gain_interval.high - result.gain_interval.low + 1e-9


LATENCIES = st.builds(
    "{}{}{}".format,
    st.sampled_from(["50ms + exp:5ms", "50ms + exp:40ms", "lognormal:50ms,0.5", "50ms"]),
    st.sampled_from(["", " + 5% exp:500ms", " + 20% 300ms"]),
    st.sampled_from(
        [
            "",
            "; worker 0 x3",
            "; phases x5 for 1s every 5s",
            "; phases x10 for 500ms every 5s together",
            "; workers 0-1 x2; phases x3 for 1s every 2s on workers 0-1 together",
        ]
    ),
)


@settings(max_examples=25, deadline=None)
@given(
    latency=LATENCIES,
    policy=st.sampled_from(["sync", "backup:1"]),
    workers=st.integers(3, 8),
    steps=st.integers(40, 200),
    seed=st.integers(0, 99),
)
def test_no_gain_is_promised_beyond_a_replay_of_the_trace(latency, policy, workers, steps, seed):
    """As before, but from a trace, which is replayed as `paceline simulate --trace` does it."""
    spec = RunSpec(workers=workers, steps=steps, seed=seed)
    trace = simulate(policy, Cluster.parse(latency), spec)

    result = plan_from(trace, convergence=every_gradient_counts(workers, UPDATES))

    replayed = Cluster(Replayed(recorded_times(trace, seed=0, with_travel=True)))
    rules = (result.baseline, result.best)
    was, now = (mean_update_s(simulate(each.rule, replayed, spec)) for each in rules)
    truth = was / now * result.best.needed / result.baseline.needed
    width = result.gain_interval.high - result.gain_interval.low
    # The plan leaves the first update out, because workers are still joining.
    assert result.gain.most - truth <= width + 0.01


# ---- following the advice ----

FOLLOWED = [
    "50ms + exp:5ms + 5% exp:500ms; worker 7 x2",
    "50ms + exp:5ms; phases x5 for 2s every 20s",
    "lognormal:50ms,0.5",
]


@long
@pytest.mark.parametrize(
    ("latency", "convergence"),
    [
        *((latency, ALL_COUNT) for latency in FOLLOWED),
        (FOLLOWED[0], at_least(200.0, 32, WORKERS, UPDATES)),
    ],
)
@pytest.mark.parametrize("late", LATES)
def test_advice_does_not_go_in_circles(latency, late, convergence):
    """A plan from the run that followed the advice confirms it."""
    cluster = Cluster.parse(latency)
    first = plan_from(
        simulate("sync", cluster, RunSpec(workers=WORKERS, steps=1000)), late, convergence
    )
    assert first.best.backups > 0
    spec = RunSpec(workers=WORKERS, steps=1000, late=late, seed=1)

    again = plan_from(simulate(first.best.rule, cluster, spec), late, convergence)

    assert again.baseline.rule == first.best.rule
    assert again.best is again.baseline
    assert again.gain == (1.0, 1.0)
    assert ("fewer would, this recording can't tell" in again.sentence()) == (late == "cancel")


def test_recorded_backups_are_kept_if_no_larger_number_is_better():
    trace = simulate("backup:1", Cluster.parse("50ms + exp:5ms"), RunSpec(workers=8, steps=100))

    result = plan_from(trace)

    assert result.best is result.baseline
    assert result.sentence() == (
        "Use backup:1: with 8 workers, more backups would not save more than 2 % of the time; "
        "whether fewer would, this recording can't tell, because late work was cancelled."
    )


@pytest.mark.parametrize(
    ("late", "reason"),
    [
        ("cancel", "it isn't certain that more backups would save more than 2 % of the time; wh"),
        ("finish", "it isn't certain that another number of backups would save more than 2 %"),
    ],
)
def test_recorded_backups_are_kept_if_the_recording_is_too_short_to_tell(late, reason):
    """One worker is always slow, and another one for a while."""
    times = jitter(np.random.default_rng(9), versions=60)
    times[0] *= 4
    times[1, 20:27] *= 3
    recorded = Recorded(dict(enumerate(times)), together=True)
    spec, most = RunSpec(workers=WORKERS, late=late), 7 if late == "cancel" else None

    result = plan(Cluster(recorded), spec, ALL_COUNT, most=most, ran=7)

    assert result.best is result.baseline
    assert result.sentence().startswith(f"Use backup:1: with 8 workers, {reason}")
    assert result.in_short().startswith(f"the best number of backups is 1: {reason}")


def test_much_better_choice_is_recommended_even_if_late_work_was_cancelled():
    """Two workers are always slow, and the pilot still waits for one of them."""
    cluster = Cluster.parse("50ms + exp:5ms; workers 6-7 x10")
    trace = simulate("backup:1", cluster, RunSpec(workers=WORKERS, steps=200))

    result = plan_from(trace)

    assert (result.baseline.rule, result.best.rule) == ("backup:1", "backup:2")
    assert result.gain.least > 5
    assert "times as fast as backup:1" in result.sentence()
    assert result.in_short() == (
        "backup:2 (waiting for 6 of 8 workers) would reach the same target "
        f"{result.gain.least:.2f} times as fast as backup:1"
    )
    assert [option.needed for option in result.options] == list(range(1, 8))
    assert result.cheapest is None
    assert result.flat == (2, 2)


# ---- the noise scale ----


def test_choice_has_the_smallest_regret_over_all_noise_scales():
    cluster, spec = Cluster.parse("50ms + exp:20ms"), RunSpec(workers=20)
    convergence = at_least(100.0, 32, 20, UPDATES)

    result = plan(cluster, spec, convergence)

    step_s = np.array([option.step_s["cancel"] for option in result.options])
    needed = np.arange(1.0, 21)
    seconds = np.stack([step_s * updates(needed) for updates in convergence.scenarios])
    regret = (seconds / seconds.min(axis=1, keepdims=True)).max(axis=0)
    good = np.flatnonzero(regret <= regret.min() * (1 + FLAT))
    assert result.best.needed == needed[good[-1]]
    most, least = (
        plan(cluster, spec, model).best.backups
        for model in (noise_scale(100.0, 32, 20, UPDATES), every_gradient_counts(20, UPDATES))
    )
    assert least < result.best.backups < most


def test_gain_is_a_range_if_the_noise_scale_is_uncertain():
    result = plan(
        Cluster.parse("50ms + exp:20ms"), RunSpec(workers=20), at_least(100.0, 32, 20, UPDATES)
    )

    assert 1 < result.gain.least < result.gain.most
    assert result.gain_interval.low < result.gain.least
    assert result.gain.most < result.gain_interval.high
    words = f"{result.gain.least:.2f} to {result.gain.most:.2f} times as fast as sync (depending on"
    assert words in result.sentence()
    assert result.in_short().endswith("times as fast as sync, depending on the noise scale")
    assert result.intervals.endswith("and on the noise scale")


def test_range_is_not_printed_if_the_noise_scale_is_given():
    result = plan(
        Cluster.parse("50ms + exp:20ms"), RunSpec(workers=20), noise_scale(100.0, 32, 20, UPDATES)
    )

    assert result.gain.least == result.gain.most
    assert f"{result.gain.least:.2f} times as fast as sync (95 % interval: " in result.sentence()
    assert result.intervals.endswith("errors in the assumed number of updates are not included")


def test_sentence_says_if_backups_would_pay_off_with_little_noise_only():
    result = plan(
        Cluster.parse("50ms + exp:5ms"), RunSpec(workers=4), at_least(0.0, 32, 4, UPDATES)
    )

    assert result.best.rule == "sync"
    assert result.sentence() == (
        "Use sync: with 4 workers, backups would save time only if the noise scale stayed small."
    )
