# SPDX-License-Identifier: BSD-3-Clause
"""The shared latency model is what the fit gives, and the quick experiment works."""

import tempfile

import pytest

from paceline.lab.arrival_times import mean_arrival
from paceline.lab.experiment import Lab
from paceline.lab.experiments.settings import CHEN
from paceline.lab.experiments.stragglers import STRAGGLERS, fit_model, format_latency
from paceline.lab.experiments.tables import column
from paceline.lab.trial_pool import TrialPool
from paceline.latency import parse_latency


@pytest.fixture
def quick(tmp_path):
    return Lab(
        data=tmp_path,
        cache=tmp_path,
        pool=TrialPool(tmp_path / ".trials", 1),
        seeds=(0,),
        quick=True,
        progress=lambda done, of, share: None,
    )


def test_shared_latency_is_the_fitted_one():
    assert format_latency(fit_model()) == CHEN


def test_model_matches_the_paper_text():
    """Most mean times are between 1.4 and 1.8 s, and the last gradient costs 0.6 s."""
    model = parse_latency(CHEN).base
    means = {k: mean_arrival(model, k, 100) for k in (1, 97, 99, 100)}
    assert 1.4 < means[1] < means[97] < 1.8
    assert means[100] - means[99] == pytest.approx(0.62, abs=0.05)


def test_quick_version_shows_every_effect(quick, tmp_path, monkeypatch):
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    tables = STRAGGLERS.measure(quick)
    assert list(temporary.iterdir()) == []  # the folder of the real run is deleted
    check_the_fit(tables)
    check_updates(tables["update"])
    check_the_machine(tables["machine"])
    assert CHEN in STRAGGLERS.describe(tables)
    assert len(STRAGGLERS.draw(tables).axes) == 4


def check_the_fit(tables):
    for row in tables["means"]:
        assert row["model_s"] == pytest.approx(row["paper_s"], abs=0.04)
    for row in tables["distribution"]:
        if row["fitted"] == "yes":
            assert row["model"] == pytest.approx(row["paper"], abs=0.03)


def check_updates(rows):
    for row in rows:  # late work that is finished delays the next update
        assert row["finished_s"] > row["cancelled_s"] - 1e-9
    [whole], [most] = (column(rows, "finished_s", machines=100, needed=n) for n in (100, 96))
    assert most < 0.8 * whole


def check_the_machine(rows):
    assert [row["k"] for row in rows] == list(range(1, 9))
    assert [row["updates"] for row in rows] == [54] * 8  # without the first tenth
    assert 0 < rows[0]["mean_s"] < rows[-1]["mean_s"] < 10
