# SPDX-License-Identifier: BSD-3-Clause
"""Decisions of the launcher that a run makes visible; other files test restarts and endings."""

from failures import troubled
from paceline.run.launch import supervisor

QUIET = "def trouble(run): pass\n"


def test_slow_start_is_explained_once(launch, monkeypatch):
    monkeypatch.setattr(supervisor, "SLOW_START_S", 0.0)
    source = "if ROLE == 'server': time.sleep(0.7)\n"
    ran = launch(troubled(source + QUIET), steps=3)
    assert ran.code == 0
    assert ran.err == "paceline  | the workers start when the server has reached run.prepare()\n"
