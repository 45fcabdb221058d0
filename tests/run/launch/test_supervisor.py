# SPDX-License-Identifier: BSD-3-Clause
"""Decisions of the launcher that a run makes visible; other files test restarts and endings."""

from failures import troubled
from paceline.run.launch import hang_report

QUIET = "def trouble(run): pass\n"


def test_slow_start_is_explained_once(launch, monkeypatch):
    monkeypatch.setattr(hang_report, "SLOW_START_S", 0.0)
    source = "if ROLE == 'server': time.sleep(1.5)\n"
    ran = launch(troubled(source + QUIET), steps=3)
    assert ran.code == 0
    [line] = ran.err.splitlines()
    assert line.startswith("paceline  | waiting for the server to reach run.prepare()")
