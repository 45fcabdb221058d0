# SPDX-License-Identifier: BSD-3-Clause
"""What ends a run beside its number of updates."""

import pytest

from paceline.run.server.goal import NON_FINITE_MAX, Goal
from paceline.trace.schema import FINISHED, STOPPED


@pytest.mark.parametrize(("wanted", "reached"), [(None, False), (8, False), (7, True), (6, True)])
def test_enough_samples_reach_the_goal(wanted, reached):
    goal = Goal(wanted)
    goal.updated(3)
    goal.updated(4)
    assert (goal.samples, goal.is_reached, goal.failure) == (7, reached, "")


def test_nothing_but_refusals_is_a_failure_and_an_update_between_them_is_hope():
    goal = Goal(None)
    for _ in range(2):
        for _ in range(3 * NON_FINITE_MAX - 1):
            goal.refused(workers=3)
        assert not goal.is_reached
        goal.updated(1)
    for _ in range(3 * NON_FINITE_MAX):
        goal.refused(workers=3)
    assert goal.is_reached
    assert goal.failure.startswith("the last 300 gradients all had a NaN or an infinity in them")


@pytest.mark.parametrize(
    ("wanted", "steps", "version", "reason"),
    [
        (None, 9, 9, FINISHED),
        (None, 9, 8, STOPPED),
        (7, None, 2, FINISHED),
        (8, None, 2, STOPPED),
        (None, None, 2, STOPPED),
    ],
)
def test_an_end_before_the_goal_is_a_stop(wanted, steps, version, reason):
    goal = Goal(wanted, steps)
    goal.updated(7)
    assert goal.reason(version) == reason
    goal.fail("no hope")
    assert goal.reason(version) == "no hope"


def test_the_first_reason_counts():
    goal = Goal(None)
    goal.fail("one")
    goal.fail("two")
    assert (goal.failure, goal.is_reached) == ("one", True)
