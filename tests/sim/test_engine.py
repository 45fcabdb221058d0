# SPDX-License-Identifier: BSD-3-Clause
"""The virtual clock: order, ties, and the time during a callback."""

import pytest

from paceline.errors import InternalError
from paceline.sim.engine import LAST, NORMAL, URGENT, Engine


def run(engine):
    while engine.step():
        pass


def test_callbacks_run_in_order_of_time():
    engine, log = Engine(), []
    for time in (3.0, 1.0, 2.0):
        engine.at(time, lambda t: log.append((engine.now, t)), time)

    run(engine)

    assert log == [(1.0, 1.0), (2.0, 2.0), (3.0, 3.0)]


def test_ties_are_broken_by_priority_then_by_order_of_scheduling():
    engine, log = Engine(), []
    engine.at(1.0, log.append, "timer", priority=LAST)
    engine.at(1.0, log.append, "a", priority=NORMAL)
    engine.at(1.0, log.append, "b")
    engine.at(1.0, log.append, "reaction", priority=URGENT)

    run(engine)

    assert log == ["reaction", "a", "b", "timer"]


def test_clock_advances_before_the_callback_runs():
    engine, log = Engine(), []
    engine.at(5.0, lambda: engine.at(engine.now + 1, lambda: log.append(engine.now)))

    run(engine)

    assert log == [6.0]


@pytest.mark.parametrize("time", [0.5, float("nan")])
def test_nothing_can_be_scheduled_in_the_past(time):
    engine = Engine()
    engine.at(1.0, lambda: None)
    engine.step()

    with pytest.raises(InternalError, match="time must be >= now"):
        engine.at(time, lambda: None)


def test_empty_engine_does_nothing():
    engine = Engine()

    assert not engine.step()
    assert engine.now == 0.0
