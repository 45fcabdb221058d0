# SPDX-License-Identifier: BSD-3-Clause
"""Stragglers: the model that all experiments share is what the fit gives, and what it implies."""

import tempfile

import pytest

from paceline.lab.arrivals import mean_arrival
from paceline.lab.bench import Bench
from paceline.lab.experiment import Lab
from paceline.lab.experiments.settings import CHEN, picked
from paceline.lab.experiments.stragglers import STRAGGLERS, fitted, rounded
from paceline.latency import parse_latency


@pytest.fixture
def quick(tmp_path):
    return Lab(
        data=tmp_path,
        cache=tmp_path,
        bench=Bench(tmp_path / ".trials", 1),
        seeds=(0,),
        quick=True,
        progress=lambda done, of, share: None,
    )


def test_the_machines_of_all_experiments_are_the_fitted_ones():
    assert rounded(fitted()) == CHEN


def test_the_model_has_what_the_paper_says_in_words():
    """Most mean times lie between 1.4 and 1.8 s, and the last gradient costs 0.6 s."""
    model = parse_latency(CHEN).base
    means = {k: mean_arrival(model, k, 100) for k in (1, 97, 99, 100)}
    assert 1.4 < means[1] < means[97] < 1.8
    assert means[100] - means[99] == pytest.approx(0.62, abs=0.05)


def test_the_quick_version_shows_every_effect(quick, tmp_path, monkeypatch):
    room = tmp_path / "room"
    room.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(room))
    tables = STRAGGLERS.measure(quick)
    assert list(room.iterdir()) == []  # the folder of the real run is gone
    check_the_fit(tables)
    check_updates(tables["update"])
    check_the_machine(tables["machine"])
    assert CHEN in STRAGGLERS.tell(tables)
    assert len(STRAGGLERS.draw(tables).axes) == 4


def check_the_fit(tables):
    for row in tables["means"]:
        assert row["model_s"] == pytest.approx(row["paper_s"], abs=0.04)
    for row in tables["distribution"]:
        if row["fitted"] == "yes":
            assert row["model"] == pytest.approx(row["paper"], abs=0.03)


def check_updates(rows):
    for row in rows:  # who is late is late again, unless its work is cancelled
        assert row["finished_s"] > row["cancelled_s"] - 1e-9
    [whole], [most] = (picked(rows, "finished_s", machines=100, needed=n) for n in (100, 96))
    assert most < 0.8 * whole


def check_the_machine(rows):
    assert [row["k"] for row in rows] == list(range(1, 9))
    assert [row["updates"] for row in rows] == [54] * 8  # a tenth is left out
    assert 0 < rows[0]["mean_s"] < rows[-1]["mean_s"] < 10
