# SPDX-License-Identifier: BSD-3-Clause
"""Trial runs: results, stored results, and resuming after an interruption."""

from dataclasses import replace
from math import inf

import pytest

from paceline.lab import trial_runner
from paceline.lab.recipe import Recipe
from paceline.lab.trial import Trial
from paceline.lab.trial_runner import run_trial, stored_result, train
from toys import Clouds

TRIAL = Trial(Clouds(), Recipe(0.1, ema=0.9), "backup:1", 4, "10ms + exp:10ms", epochs=1.0, rows=5)


def nothing(epochs):
    del epochs


def test_trial_uses_its_epochs_of_data_under_every_rule():
    for policy in ("sync", "backup:1", "async", "softsync:2", "delayed:1"):
        result = train(replace(TRIAL, policy=policy))
        assert result.rows[-1].epochs == pytest.approx(1.0, abs=0.05)
        assert result.updates == result.rows[-1].update
        assert result.used * 4 == pytest.approx(400, abs=16)


def test_evaluations_are_spread_evenly_from_the_start():
    rows = train(TRIAL).rows
    assert [row.update for row in rows] == [0, 7, 14, 21, 28, 34]
    assert [row.time for row in rows] == sorted(row.time for row in rows)


def test_sending_takes_time_if_there_is_a_network():
    trial = replace(TRIAL, policy="sync", latency="10ms")
    sent = replace(trial, network="model=1MB,bandwidth=800MB")
    free, slow = train(trial), train(sent)
    assert free.seconds == pytest.approx(free.updates * 0.01)
    # Four workers share the link; pulls and pushes don't overlap.
    assert slow.seconds == pytest.approx(slow.updates * (0.01 + 2 * 4 / 800))
    assert [row.scores for row in slow.rows] == [row.scores for row in free.rows]


def test_trial_ends_at_its_target():
    whole = train(TRIAL)
    goal = whole.rows[2].scores["accuracy"]
    result = train(replace(TRIAL, target=f"accuracy>={goal}"))
    row = result.rows[-1]
    assert row.scores["accuracy"] >= goal > result.rows[-2].scores["accuracy"]
    assert result.updates == row.update < whole.updates
    assert result.seconds == row.time


def test_stored_result_is_not_computed_again(tmp_path, monkeypatch):
    first = run_trial(TRIAL, tmp_path, nothing)
    assert [path.suffix for path in tmp_path.iterdir()] == [".json"]

    def never(self, model, draws):
        raise AssertionError("the trial was computed again")

    monkeypatch.setattr(Clouds, "losses", never)
    assert run_trial(TRIAL, tmp_path, nothing) == first
    with pytest.raises(AssertionError):
        run_trial(replace(TRIAL, policy="sync"), tmp_path, nothing)


def test_partial_files_of_another_process_are_left_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(trial_runner, "SAVE_EVERY_S", 0.0)
    others = [tmp_path / f".{TRIAL.digest()}.{kind}.partial" for kind in ("json", "pt")]
    for other in others:
        other.write_bytes(b"another's")
    run_trial(TRIAL, tmp_path, nothing)
    assert [other.read_bytes() for other in others] == [b"another's"] * 2


def test_damaged_stored_result_is_ignored(tmp_path):
    run_trial(TRIAL, tmp_path, nothing)
    (file,) = tmp_path.iterdir()
    file.write_bytes(file.read_bytes()[:100])
    assert stored_result(TRIAL, tmp_path) is None


def test_interrupted_trial_resumes(tmp_path, monkeypatch):
    trial = replace(TRIAL, policy="async", problem=Clouds(dropout=0.2))
    whole = train(trial)
    monkeypatch.setattr(trial_runner, "SAVE_EVERY_S", 0.0)
    used = []

    def interrupt(epochs):
        used.append(epochs)
        if epochs > 0.6:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_trial(trial, tmp_path, interrupt)
    resumed_at = []
    assert run_trial(trial, tmp_path, resumed_at.append) == whole
    assert min(resumed_at) > 0.55
    assert [path.suffix for path in tmp_path.iterdir()] == [".json"]


def test_trial_with_an_unreadable_state_starts_again(tmp_path):
    (tmp_path / f"{TRIAL.digest()}.pt").write_bytes(b"rubbish")
    assert run_trial(TRIAL, tmp_path, nothing) == train(TRIAL)


def test_divergence_is_reported():
    result = train(replace(TRIAL, recipe=Recipe(inf)))
    assert result.is_diverged
    assert result.last("accuracy") != result.last("accuracy")
