# SPDX-License-Identifier: BSD-3-Clause
"""Timers of a run: each is told of once, in the order in which they are due."""

from math import inf

from hypothesis import given
from hypothesis import strategies as st

from message_examples import unhurried
from paceline.run.server.timers import Timers


def test_where_there_is_none_nothing_is_ever_due():
    timers = Timers()
    assert timers.next_at == inf
    assert timers.due(1e9) == []


def test_a_timer_is_told_of_once_when_its_time_has_come():
    timers = Timers()
    timers.start(2, 5.0)
    timers.start(1, 7.0)
    timers.start(3, 5.0)
    assert timers.next_at == 5.0
    assert timers.due(4.9) == []
    assert timers.due(5.0) == [2, 3]
    assert (timers.due(6.9), timers.next_at) == ([], 7.0)
    assert (timers.due(100.0), timers.next_at) == ([1], inf)


@unhurried
@given(st.lists(st.tuples(st.integers(0, 99), st.floats(0, 10))), st.lists(st.floats(0, 10)))
def test_timers_are_told_of_in_the_order_of_their_times(started, looks):
    timers = Timers()
    for timer, at in started:
        timers.start(timer, at)
    found = [timer for now in [*sorted(looks), inf] for timer in timers.due(now)]
    assert found == [timer for timer, _ in sorted(started, key=lambda one: (one[1], one[0]))]
