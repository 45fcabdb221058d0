# SPDX-License-Identifier: BSD-3-Clause
"""The quick versions of the experiments beyond the papers show the direction of each effect."""

from math import isnan

import pytest

from faults import check_misfortune
from paceline.lab.experiment import make_again, run_experiment
from paceline.lab.experiments.convex import (
    ASYNC,
    CONVEX,
    bound,
    seconds_to_near,
    slope,
    worst,
)
from paceline.lab.experiments.losing import LOSING
from paceline.lab.experiments.models import MODELS, TASKS
from paceline.lab.experiments.race import mean_seconds
from paceline.lab.experiments.settings import picked
from paceline.lab.experiments.traffic import TRAFFIC
from paceline.lab.experiments.uneven import UNEVEN


@pytest.mark.usefixtures("a9a")
def test_the_distance_to_the_optimum_stays_below_its_bound_falls_with_k_and_grows_with_staleness(
    quick, tmp_path
):
    tables = CONVEX.measure(quick)
    assert max(worst(tables, k) for k in (1, 4, 16)) < 1
    assert -1.3 < slope(tables) < -0.7
    (fresh,), (stale,) = (
        picked(tables["rates"], "floor", gradients=k, rate=0.15) for k in (1, ASYNC)
    )
    assert fresh < 0.3 * stale
    first, last = (seconds_to_near(tables, k)[0] for k in (ASYNC, 16))
    assert first < 0.2 * last
    assert "below their bounds" in run_experiment(CONVEX, quick, tmp_path)


def test_the_bound_begins_at_the_start_and_ends_at_a_floor_that_goes_with_k():
    known = {
        "rate": 0.1,
        "strong_convexity": 0.2,
        "smoothness": 2.0,
        "variance": 3.0,
        "batch": 5,
    }
    assert bound(1, 0, 0.7, known) == pytest.approx(0.7)
    ends = [bound(k, 1e6, 0.7, known) for k in (1, 4)]
    assert ends == pytest.approx([0.1 * 2 * 3 / (2 * 0.2 * 5), 0.1 * 2 * 3 / (2 * 0.2 * 4 * 5)])


@pytest.mark.usefixtures("mnist", "shakespeare")
def test_every_model_learns_from_fresh_gradients_and_a_transformer_less_from_stale_ones(
    quick, tmp_path
):
    tables = MODELS.measure(quick)
    for task in TASKS:
        first, *_ = picked(tables["curves"], "score", task=task, rule="sync")
        (last,) = picked(tables["final"], "score", task=task, rule="sync")
        assert (last > first) == TASKS[task].is_high
        assert 13 < picked(tables["final"], "staleness", task=task, rule="async")[0] < 16
    fresh, stale = (
        picked(tables["final"], "score", task="transformer", rule=rule)[0]
        for rule in ("sync", "async")
    )
    assert fresh < stale - 0.3
    assert "GAN" in run_experiment(MODELS, quick, tmp_path)
    check_misfortune(MODELS, tables)


@pytest.mark.usefixtures("mnist")
def test_slow_halves_are_waited_for_dropped_or_used(quick, tmp_path):
    tables = UNEVEN.measure(quick)
    pace = {str(row["rule"]): row for row in tables["pace"]}
    assert pace["sync"]["update_s"] > 1.8 * pace["backup:8"]["update_s"]
    assert pace["sync"]["from_slow"] == 0.5
    assert pace["backup:8"]["from_slow"] < 0.01
    assert pace["batchsync:24"]["gradients_per_s"] > 1.3 * pace["backup:8"]["gradients_per_s"]
    assert pace["async"]["lost"] < 0.01  # those that were under way at the end
    assert not any(isnan(mean_seconds(tables["race"], rule)) for rule in pace)
    assert mean_seconds(tables["race"], "backup:8") < 0.85 * mean_seconds(tables["race"], "sync")
    assert "slow half" in run_experiment(UNEVEN, quick, tmp_path)
    check_misfortune(UNEVEN, tables)


@pytest.mark.usefixtures("mnist")
def test_backups_lose_if_too_few_for_a_slow_majority_if_the_slow_own_data_and_if_too_many(
    quick, tmp_path
):
    tables = LOSING.measure(quick)
    majority, small, large, owned = (
        tables[name] for name in ("majority", "small", "large", "own_data")
    )
    sync, few, enough = (mean_seconds(majority, f) for f in ("sync", "backup:4", "backup:12"))
    assert 0.8 * sync < few  # of the slow it waits for eight
    assert enough < 0.85 * sync
    assert mean_seconds(small, "backup:12") > 1.4 * mean_seconds(small, "sync")
    assert mean_seconds(large, "sync") < 0.7 * mean_seconds(large, "backup:14")
    learnt = {rule: picked(owned, "reserved", rule=rule)[0] for rule in _rules(owned)}
    assert learnt["backup:4"] < 0.05 < learnt["sync"]
    assert learnt["backup:4, all data everywhere"] > 0.6
    (alike,) = picked(tables["requeue"], "forgotten_without", machines="alike", workers="others")
    assert 0.04 < alike < 0.09
    used, tries = (
        picked(tables["requeue"], column, machines="4 slow", workers="0-3")[0]
        for column in ("used", "tries_with")
    )
    assert used < 10
    assert tries > 50
    assert "8 and 9" in run_experiment(LOSING, quick, tmp_path)
    check_misfortune(LOSING, tables)


def _rules(rows):
    return list(dict.fromkeys(str(row["rule"]) for row in rows))


@pytest.mark.usefixtures("mnist")
def test_late_gradients_are_pushed_in_vain_unless_they_are_cancelled(quick, tmp_path):
    tables = TRAFFIC.measure(quick)
    counts = {str(row["rule"]): row for row in tables["counts"]}
    assert (counts["sync"]["pulls"], counts["sync"]["pushes"]) == (1, 1)
    assert counts["backup:4"]["pulls"] == pytest.approx(16 / 12, rel=0.02)
    assert counts["backup:4"]["pushes"] == pytest.approx(1, rel=0.02)
    assert counts["backup:4, finish"]["pushes"] == pytest.approx(16 / 12, rel=0.1)
    assert not any(isnan(float(row["megabytes"])) for row in tables["race"])
    assert not any("megabytes" in row for row in tables["tried"])  # each table has its own columns
    check_misfortune(TRAFFIC, tables)
    paragraph = run_experiment(TRAFFIC, quick, tmp_path)
    assert make_again(TRAFFIC, tmp_path, quick=True) == paragraph
