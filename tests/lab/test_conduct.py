# SPDX-License-Identifier: BSD-3-Clause
"""Trials: their outcomes, what is remembered of them, and what goes on after a stop."""

from dataclasses import replace
from math import inf

import pytest

from paceline.lab import conduct as conducting
from paceline.lab.bench import Bench
from paceline.lab.conduct import conduct, remembered, train
from paceline.lab.recipe import Recipe
from paceline.lab.trial import Trial
from toys import Clouds, Failing

TRIAL = Trial(Clouds(), Recipe(0.1, ema=0.9), "backup:1", 4, "10ms + exp:10ms", epochs=1.0, rows=5)


def nothing(epochs):
    del epochs


def test_a_trial_uses_as_much_data_as_it_says_whatever_the_rule():
    for policy in ("sync", "backup:1", "async", "softsync:2", "delayed:1"):
        outcome = train(replace(TRIAL, policy=policy))
        assert outcome.rows[-1].epochs == pytest.approx(1.0, abs=0.05)
        assert outcome.updates == outcome.rows[-1].update
        assert outcome.used * 4 == pytest.approx(400, abs=16)


def test_rows_are_spread_over_the_run_and_begin_before_it():
    rows = train(TRIAL).rows
    assert [row.update for row in rows] == [0, 7, 14, 21, 28, 34]
    assert [row.time for row in rows] == sorted(row.time for row in rows)


def test_staleness_and_what_was_dropped_are_told():
    stale = train(replace(TRIAL, policy="async"))
    assert 2 < stale.staleness < 3.5
    assert (stale.dropped, stale.cancelled) == (0, 0)
    backup = train(TRIAL)
    assert backup.staleness == 0
    assert backup.cancelled > 20
    assert train(replace(TRIAL, late="finish")).dropped > 20


def test_what_is_sent_takes_time_where_there_is_a_network():
    trial = replace(TRIAL, policy="sync", latency="10ms")
    sent = replace(trial, network="model=1MB,bandwidth=800MB")
    free, slow = train(trial), train(sent)
    assert free.seconds == pytest.approx(free.updates * 0.01)
    # Four workers share the link, one way after the other.
    assert slow.seconds == pytest.approx(slow.updates * (0.01 + 2 * 4 / 800))
    assert [row.scores for row in slow.rows] == [row.scores for row in free.rows]


def test_a_trial_ends_at_its_target():
    whole = train(TRIAL)
    goal = whole.rows[2].scores["accuracy"]
    outcome = train(replace(TRIAL, target=f"accuracy>={goal}"))
    row = outcome.rows[-1]
    assert row.scores["accuracy"] >= goal > outcome.rows[-2].scores["accuracy"]
    assert outcome.updates == row.update < whole.updates
    assert outcome.seconds == row.time


def test_an_outcome_is_remembered_and_not_computed_again(tmp_path, monkeypatch):
    first = conduct(TRIAL, tmp_path, nothing)
    assert [path.suffix for path in tmp_path.iterdir()] == [".json"]

    def never(self, model, draws):
        raise AssertionError("it was computed again")

    monkeypatch.setattr(Clouds, "losses", never)
    assert conduct(TRIAL, tmp_path, nothing) == first
    with pytest.raises(AssertionError):
        conduct(replace(TRIAL, policy="sync"), tmp_path, nothing)


@pytest.mark.parametrize(
    "change",
    [
        {"policy": "sync"},
        {"workers": 5},
        {"epochs": 2.0},
        {"latency": "10ms"},
        {"problem": Clouds(seed=1)},
        {"recipe": Recipe(0.2)},
        {"late": "finish"},
        {"network": "model=1MB,bandwidth=1GB"},
        {"target": "accuracy>=1"},
    ],
)
def test_another_trial_has_another_digest(change):
    assert replace(TRIAL, **change).digest() != TRIAL.digest()
    assert replace(TRIAL).digest() == TRIAL.digest()


def test_what_another_process_is_writing_is_let_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(conducting, "SAVE_EVERY_S", 0.0)
    others = [tmp_path / f".{TRIAL.digest()}.{kind}.partial" for kind in ("json", "pt")]
    for other in others:
        other.write_bytes(b"another's")
    conduct(TRIAL, tmp_path, nothing)
    assert [other.read_bytes() for other in others] == [b"another's"] * 2


def test_a_damaged_memory_is_no_memory(tmp_path):
    conduct(TRIAL, tmp_path, nothing)
    (file,) = tmp_path.iterdir()
    file.write_bytes(file.read_bytes()[:100])
    assert remembered(TRIAL, tmp_path) is None


def test_a_trial_that_was_stopped_goes_on_where_it_was(tmp_path, monkeypatch):
    trial = replace(TRIAL, policy="async", problem=Clouds(dropout=0.2))
    whole = train(trial)
    monkeypatch.setattr(conducting, "SAVE_EVERY_S", 0.0)
    used = []

    def stop_later(epochs):
        used.append(epochs)
        if epochs > 0.6:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        conduct(trial, tmp_path, stop_later)
    went_on = []
    assert conduct(trial, tmp_path, went_on.append) == whole
    assert min(went_on) > 0.55
    assert [path.suffix for path in tmp_path.iterdir()] == [".json"]


def test_a_state_that_cannot_be_read_is_begun_anew(tmp_path):
    (tmp_path / f"{TRIAL.digest()}.pt").write_bytes(b"rubbish")
    assert conduct(TRIAL, tmp_path, nothing) == train(TRIAL)


def test_divergence_is_told():
    outcome = train(replace(TRIAL, recipe=Recipe(inf)))
    assert outcome.is_diverged
    assert outcome.last("accuracy") != outcome.last("accuracy")


@pytest.mark.parametrize("processes", [1, 2])
def test_a_bench_conducts_several_here_or_side_by_side(tmp_path, processes):
    trials = [replace(TRIAL, policy=policy) for policy in ("backup:1", "async", "backup:1")]
    told = []

    def tell(done, of, share):
        told.append((done, of, share))

    outcomes = Bench(tmp_path, processes).outcomes(trials, tell)
    assert outcomes == [train(trial) for trial in trials]
    assert told[-1] == (2, 2, 1.0)
    shares = [share for _, _, share in told]
    assert shares == sorted(shares)
    told.clear()
    assert Bench(tmp_path, processes).outcomes(trials, tell) == outcomes
    assert told == []


def test_where_one_fails_the_others_are_stopped_and_nothing_is_left(tmp_path):
    """If they were not, the test would last for long."""
    trials = [replace(TRIAL, problem=Failing(seed=seed), epochs=100.0) for seed in (0, 1)]
    with pytest.raises(ValueError, match="a problem of its own"):
        Bench(tmp_path, 2).outcomes(trials, lambda done, of, share: None)
