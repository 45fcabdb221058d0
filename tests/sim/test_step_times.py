# SPDX-License-Identifier: BSD-3-Clause
"""The time of an update for every N: from recorded versions, from draws, from full simulations."""

import numpy as np
import pytest

from paceline.errors import SpecError
from paceline.latency import Recorded
from paceline.sim import step_times
from paceline.sim.cluster import Cluster
from paceline.sim.convergence import at_least
from paceline.sim.fast import version_durations
from paceline.sim.simulate import simulate
from paceline.sim.step_times import (
    choose_some,
    draw_replicates,
    mean_steps,
    resampled_steps,
    steps_from_simulations,
    steps_from_times,
    updates_needed,
)
from paceline.spec import RunSpec
from paceline.watch.summary import summarize

long = pytest.mark.uncounted

EVERY = np.arange(1, 5)
SPEC = RunSpec(workers=4)
TABLE = np.random.default_rng(0).exponential(size=(4, 60)) + 1
JOINT = Cluster(Recorded(dict(enumerate(TABLE)), together=True))


def ignore(done):
    pass


def test_recorded_versions_are_simulated_as_they_are():
    steps = steps_from_times(JOINT, SPEC, ignore)

    assert steps["cancel"].shape == (1, 4)
    np.testing.assert_allclose(steps["cancel"][0], np.sort(TABLE, axis=0).mean(axis=1))
    # The late work of the last versions is late for the first ones: the recording is a circle.
    twice = version_durations(np.tile(TABLE, 2), EVERY, "finish", by_version=True)
    np.testing.assert_allclose(steps["finish"][0], twice[60:].mean(axis=0), rtol=0.02)


def test_recording_shorter_than_the_warm_up_is_repeated():
    short = Cluster(Recorded(dict(enumerate(TABLE[:, :3])), together=True))

    steps = steps_from_times(short, SPEC, ignore)

    np.testing.assert_allclose(steps["cancel"][0], np.sort(TABLE[:, :3], axis=0).mean(axis=1))


def test_only_the_last_versions_of_a_long_recording_are_simulated(monkeypatch):
    monkeypatch.setattr(step_times, "ROUNDS_RECORDED", 10)

    steps = steps_from_times(JOINT, SPEC, ignore)

    np.testing.assert_allclose(steps["cancel"][0], np.sort(TABLE[:, -10:], axis=0).mean(axis=1))


def test_worker_that_was_not_recorded_is_refused():
    with pytest.raises(SpecError, match="worker 4 is not in the recording"):
        steps_from_times(JOINT, RunSpec(workers=5), ignore)


def test_replicates_of_a_model_are_independent_and_long_enough():
    cluster = Cluster.parse("exp:1s")

    few, many = (list(draw_replicates(cluster, RunSpec(workers=w), 3)) for w in (4, 100))

    assert [times.shape for times in few] == [(4, 1020)] * 3
    assert [times.shape for times in many] == [(100, 220)] * 3
    assert len({float(times.sum()) for times in few}) == 3


def test_independent_recordings_are_drawn():
    cluster = Cluster(Recorded(dict(enumerate(TABLE))))
    progress = []

    steps = steps_from_times(cluster, SPEC, progress.append)

    assert steps["cancel"].shape == (step_times.REPLICATES, 4)
    assert progress == sorted(progress)
    assert progress[-1] == 1.0


def test_resamples_of_a_recording_scatter_around_it():
    own = steps_from_times(JOINT, SPEC, ignore)["cancel"]

    resampled = resampled_steps(own, JOINT, SPEC)

    assert resampled.shape == (step_times.RESAMPLES_RECORDED, 4)
    np.testing.assert_allclose(resampled.mean(axis=0), own[0], rtol=0.05)
    # 60 exponential times have a mean with a standard error of about 1/√60.
    assert 0.3 / np.sqrt(60) < resampled[:, -1].std() < 3 / np.sqrt(60)


def test_resamples_of_a_model_are_means_of_its_replicates():
    steps = steps_from_times(Cluster.parse("exp:1s"), SPEC, ignore)["cancel"]

    resampled = resampled_steps(steps, Cluster.parse("exp:1s"), SPEC)

    assert resampled.shape == (step_times.RESAMPLES, 4)
    assert np.all((steps.min(axis=0) <= resampled) & (resampled <= steps.max(axis=0)))


def test_warm_up_is_left_out():
    """At the start no worker is late, so the first versions are too short."""
    times = np.ones((4, 120))
    times[0] = 50.0
    cluster = Cluster.parse("1s")

    [step_s] = mean_steps(cluster, times, np.array([4]), "cancel")
    times[:, : step_times.WARM_UP] = 1000.0
    [again] = mean_steps(cluster, times, np.array([4]), "cancel")

    assert step_s == again == 50.0


def test_updates_have_a_row_for_each_scenario():
    convergence = at_least(64.0, 32, 4, 1000.0)

    updates = updates_needed(convergence, EVERY)

    assert updates.shape == (len(convergence.scenarios), 4)
    np.testing.assert_allclose(updates[:, -1], 1000)
    np.testing.assert_allclose(updates[-1], 4000 / EVERY)


@long
def test_full_simulations_give_the_time_and_the_seconds_of_each_scenario():
    cluster = Cluster.parse("1s + exp:1s", "model=1,bandwidth=1GB")
    convergence = at_least(64.0, 32, 4, 1000.0)

    steps, seconds = steps_from_simulations(cluster, SPEC, convergence, ignore)

    assert list(steps) == ["cancel"]
    assert seconds.shape == (len(convergence.scenarios), *steps["cancel"].shape)
    expected = steps["cancel"] * updates_needed(convergence, EVERY)[:, None, :]
    np.testing.assert_allclose(seconds, expected)
    truth = summarize(simulate("backup:1", cluster, RunSpec(workers=4, steps=3000, seed=9)))
    assert steps["cancel"][:, 2].mean() == pytest.approx(truth.step_s.mean, rel=0.03)


@pytest.mark.parametrize(("workers", "at_most"), [(5, 8), (8, 8), (100, 12), (1000, 128)])
def test_chosen_n_are_denser_near_sync(workers, at_most):
    chosen = choose_some(workers, at_most)

    assert chosen[0] == 1
    assert chosen[-1] == workers
    assert len(chosen) <= max(at_most, 1)
    gaps = np.diff(chosen)
    assert np.all(gaps > 0)
    assert gaps[-1] == 1
    assert np.all(np.diff(gaps) <= 1)  # rounding
