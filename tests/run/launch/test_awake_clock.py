# SPDX-License-Identifier: BSD-3-Clause
"""Time limits don't count the time in which the launcher slept."""

from dataclasses import replace

from paceline.run.launch.awake_clock import STEP_S, with_awake_clock
from paceline.run.system import SYSTEM


def test_clock_runs_as_usual_while_it_is_looked_at():
    now = [100.0]
    clock = with_awake_clock(replace(SYSTEM, monotonic=lambda: now[0])).monotonic
    assert clock() == 100.0
    for _ in range(10):
        now[0] += 0.25
        clock()
    assert clock() == 102.5


def test_leap_counts_as_one_step():
    now = [100.0]
    clock = with_awake_clock(replace(SYSTEM, monotonic=lambda: now[0])).monotonic
    now[0] += 1e6
    assert clock() == 100.0 + STEP_S
    now[0] += 0.5
    assert clock() == 100.5 + STEP_S
