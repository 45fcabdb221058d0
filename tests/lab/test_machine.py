# SPDX-License-Identifier: BSD-3-Clause
"""Real runs of the lab: their arrivals, what is left of them, and what they say when they fail."""

import os
import tempfile
from pathlib import Path

import numpy as np
import pytest

from paceline.errors import PacelineError
from paceline.lab.machine import arrivals, recorded
from paceline.lab.scripts import noise
from paceline.latency import parse_latency
from paceline.sim.cluster import Cluster
from paceline.sim.fast import draw_times
from paceline.sim.simulate import simulate
from paceline.spec import RunSpec

LATENCY = "10ms + exp:10ms"
SPEC = RunSpec(workers=4, steps=6)


def test_arrivals_count_from_the_beginning_of_their_update():
    found = arrivals(simulate("sync", Cluster.parse(LATENCY), SPEC))
    times = draw_times(parse_latency(LATENCY), 4, 6, seed=0)
    assert found == pytest.approx(np.sort(times.T, axis=1))


def test_the_first_updates_can_be_skipped():
    trace = simulate("sync", Cluster.parse(LATENCY), SPEC)
    assert np.array_equal(arrivals(trace, skip=2), arrivals(trace)[2:])


def test_ctrl_c_is_ctrl_c_and_no_failure(tmp_path, monkeypatch):
    script = tmp_path / "impatient.py"
    stop = f"os.kill({os.getpid()}, signal.SIGINT)"
    steps = Path(noise.__file__).read_text(encoding="utf-8")
    script.write_text(f"import os, signal\n{stop}\n{steps}", encoding="utf-8")
    room = tmp_path / "room"
    room.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(room))
    with pytest.raises(KeyboardInterrupt):
        recorded(script, RunSpec(workers=1, steps=1_000_000))
    assert list(room.iterdir()) == []


def test_a_run_that_fails_tells_why_and_leaves_nothing_behind(tmp_path, monkeypatch, capfd):
    script = tmp_path / "broken.py"
    script.write_text("raise ValueError('the disk is on fire')\n", encoding="utf-8")
    room = tmp_path / "room"
    room.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(room))
    with pytest.raises(PacelineError, match="the disk is on fire"):
        recorded(script, RunSpec(workers=2, steps=5))
    assert list(room.iterdir()) == []
    assert capfd.readouterr().out == ""
