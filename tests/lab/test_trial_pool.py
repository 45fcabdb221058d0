# SPDX-License-Identifier: BSD-3-Clause
"""Trial pools run trials here or in processes, and reuse stored results."""

from dataclasses import replace

import pytest

from paceline.lab.recipe import Recipe
from paceline.lab.trial import Trial
from paceline.lab.trial_pool import TrialPool
from paceline.lab.trial_runner import train
from toys import Clouds, Failing

TRIAL = Trial(Clouds(), Recipe(0.1, ema=0.9), "backup:1", 4, "10ms + exp:10ms", epochs=1.0, rows=5)


@pytest.mark.parametrize("processes", [1, 2])
def test_trials_run_in_this_process_or_in_several(tmp_path, processes):
    trials = [replace(TRIAL, policy=policy) for policy in ("backup:1", "async", "backup:1")]
    calls = []

    def describe(done, of, share):
        calls.append((done, of, share))

    results = TrialPool(tmp_path, processes).run(trials, describe)
    assert results == [train(trial) for trial in trials]
    assert calls[-1] == (2, 2, 1.0)
    shares = [share for _, _, share in calls]
    assert shares == sorted(shares)
    calls.clear()
    assert TrialPool(tmp_path, processes).run(trials, describe) == results
    assert calls == []


def test_failure_of_one_trial_stops_the_others(tmp_path):
    """If the others weren't stopped, the test would take very long."""
    trials = [replace(TRIAL, problem=Failing(seed=seed), epochs=100.0) for seed in (0, 1)]
    with pytest.raises(ValueError, match="seed 1 fails"):
        TrialPool(tmp_path, 2).run(trials, lambda done, of, share: None)
