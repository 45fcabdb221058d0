# SPDX-License-Identifier: BSD-3-Clause
"""Timers of a run fire once each, in the order in which they are due; its clock never jumps."""

from math import inf

from hypothesis import given
from hypothesis import strategies as st

from message_examples import unhurried
from paceline.run.server.timers import RunClock, Timers
from paceline.run.system import System


def test_without_timers_nothing_is_due():
    timers = Timers()
    assert timers.next_at == inf
    assert timers.pop_due(1e9) == []


def test_timer_is_returned_once_when_it_is_due():
    timers = Timers()
    timers.start(2, 5.0)
    timers.start(1, 7.0)
    timers.start(3, 5.0)
    assert timers.next_at == 5.0
    assert timers.pop_due(4.9) == []
    assert timers.pop_due(5.0) == [2, 3]
    assert (timers.pop_due(6.9), timers.next_at) == ([], 7.0)
    assert (timers.pop_due(100.0), timers.next_at) == ([1], inf)


@unhurried
@given(st.lists(st.tuples(st.integers(0, 99), st.floats(0, 10))), st.lists(st.floats(0, 10)))
def test_timers_are_returned_in_the_order_of_their_times(started, looks):
    timers = Timers()
    for timer, at in started:
        timers.start(timer, at)
    found = [timer for now in [*sorted(looks), inf] for timer in timers.pop_due(now)]
    assert found == [timer for timer, _ in sorted(started, key=lambda one: (one[1], one[0]))]


def test_clock_counts_from_where_the_run_was():
    """The clock stops while a run has no server."""
    now = 1000.0
    system = System(monotonic=lambda: now)
    clock = RunClock(start=40.0, system=system)
    assert clock.now() == 40.0
    now = 1002.5
    assert clock.now() == 42.5
    assert RunClock(system=system).now() == 0.0


def test_clock_converts_its_times_to_monotonic_ones():
    clock = RunClock(start=40.0, system=System(monotonic=lambda: 1000.0))
    assert clock.monotonic_at(clock.now()) == 1000.0
    assert clock.monotonic_at(41.0) == 1001.0
    assert clock.monotonic_at(inf) == inf
