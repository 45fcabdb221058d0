# SPDX-License-Identifier: BSD-3-Clause
"""Real runs on this machine: arrival times, failures, Ctrl-C, and cleaning up."""

import os
import tempfile
from pathlib import Path

import numpy as np
import pytest

from paceline.errors import PacelineError
from paceline.lab.real_run import arrival_times, record_run
from paceline.lab.scripts import cnn_on_noise
from paceline.latency import parse_latency
from paceline.sim.cluster import Cluster
from paceline.sim.fast import draw_times
from paceline.sim.simulate import simulate
from paceline.spec import RunSpec

LATENCY = "10ms + exp:10ms"

SPEC = RunSpec(workers=4, steps=6)


def test_arrival_times_count_from_the_first_assignment():
    found = arrival_times(simulate("sync", Cluster.parse(LATENCY), SPEC))
    times = draw_times(parse_latency(LATENCY), 4, 6, seed=0)
    assert found == pytest.approx(np.sort(times.T, axis=1))


def test_first_updates_can_be_skipped():
    trace = simulate("sync", Cluster.parse(LATENCY), SPEC)
    assert np.array_equal(arrival_times(trace, skip=2), arrival_times(trace)[2:])


def test_ctrl_c_raises_keyboard_interrupt_and_cleans_up(tmp_path, monkeypatch):
    script = tmp_path / "interrupting.py"
    stop = f"os.kill({os.getpid()}, signal.SIGINT)"
    steps = Path(cnn_on_noise.__file__).read_text(encoding="utf-8")
    script.write_text(f"import os, signal\n{stop}\n{steps}", encoding="utf-8")
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    with pytest.raises(KeyboardInterrupt):
        record_run(script, RunSpec(workers=1, steps=1_000_000))
    assert list(temporary.iterdir()) == []


def test_failed_run_raises_its_output_and_cleans_up(tmp_path, monkeypatch, capfd):
    script = tmp_path / "broken.py"
    script.write_text("raise ValueError('the disk is on fire')\n", encoding="utf-8")
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    with pytest.raises(PacelineError, match="the disk is on fire"):
        record_run(script, RunSpec(workers=2, steps=5))
    assert list(temporary.iterdir()) == []
    assert capfd.readouterr().out == ""
