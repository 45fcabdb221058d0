# SPDX-License-Identifier: BSD-3-Clause
"""The invariants of a ledger: each is broken by hand, and `Decider.check` names it."""

import pytest

from fakes import Cluster, make_decider
from paceline.core.decider import Decider
from paceline.core.events import (
    ApplyUpdate,
    Contribution,
    WorkerLeft,
)
from paceline.core.invariants import invariants
from paceline.core.ledger import Tally, Work
from paceline.errors import InternalError, ProtocolError

# -------------------------------------------------------------------------- broken invariants


def _no_one_idle(ledger):
    ledger.idle.clear()


def _a_version_from_the_future(ledger):
    ledger.members[1].work = Work(version=5, update=6)


def _a_cancelled_idler(ledger):
    ledger.members[0].cancelled = True


def _a_tally_of_the_past(ledger):
    ledger.tallies[0] = Tally()


def _a_stranger_who_is_done(ledger):
    ledger.next_tally.done.add(99)


def _one_who_is_done_and_excused(ledger):
    ledger.next_tally.excused.add(0)


def _a_giver_who_is_not_done(ledger):
    ledger.next_tally.done.discard(0)


def _a_giver_who_gave_twice(ledger):
    ledger.next_tally.contributions *= 2


def _an_update_that_is_due(ledger):
    ledger.next_tally.contributions.append(Contribution(1, 0, 1))
    ledger.next_tally.done.add(1)


def _an_update_that_was_not_made_is_applied(ledger):
    ledger.applying[1] = ApplyUpdate(1, (Contribution(0, 0, 1),), (1.0,), (1.0,), 1)


def _beyond_the_last(ledger):
    ledger.last = -1


def _finished_with_something_left(ledger):
    ledger.finished = True


def _no_next_update(ledger):
    ledger.finished = True
    ledger.tallies.clear()


def _useless_work(ledger):
    ledger.tallies = {2: Tally()}
    ledger.version = 1


BROKEN = {
    "a member is idle iff it has no work": _no_one_idle,
    "members work on versions that exist": _a_version_from_the_future,
    "only work can be cancelled": _a_cancelled_idler,
    "tallies are of updates to come": _a_tally_of_the_past,
    "workers that are done or excused are members": _a_stranger_who_is_done,
    "no worker is both done and excused": _one_who_is_done_and_excused,
    "members that contributed are done": _a_giver_who_is_not_done,
    "no worker counts twice in an update": _a_giver_who_gave_twice,
    "only the newest updates are being applied": _an_update_that_was_not_made_is_applied,
    "every update that is due is made": _an_update_that_is_due,
    "there is a next update": _no_next_update,
    "no update is made after the last": _beyond_the_last,
    "a finished run has no pending contributions": _finished_with_something_left,
    "useless work is cancelled": _useless_work,
}


@pytest.mark.parametrize("what", BROKEN)
def test_broken_invariant_is_reported_with_the_rule_and_the_events(what):
    cluster = Cluster.of("backup:1")
    cluster.arrive(0)
    cluster.decider.check()
    BROKEN[what](cluster.decider.ledger)
    with pytest.raises(InternalError) as error:
        cluster.decider.check()
    message = str(error.value)
    assert what in message
    assert message.startswith("backup:1: broken: ")
    assert "please report" in message
    assert all(repr(event) in message for event in cluster.events)


def test_every_invariant_is_broken_by_a_test():
    decider = Cluster.of("backup:1").decider
    checked = invariants(decider.policy, decider.ledger, decider.would_accept)
    assert {what for what, _ in checked} == set(BROKEN)


def test_report_lists_the_newest_events_without_refused_ones():
    cluster = Cluster.of("async", workers=1)
    for _ in range(Decider.HISTORY_LENGTH):
        cluster.arrive(0)
    refused = WorkerLeft(cluster.now, 9)
    with pytest.raises(ProtocolError):
        cluster.handle(refused)
    cluster.decider.ledger.last = -1
    with pytest.raises(InternalError) as error:
        cluster.decider.check()
    told = str(error.value).splitlines()[1:]
    assert told == [f"  {event!r}" for event in cluster.events[-Decider.HISTORY_LENGTH :]]


def test_new_decider_has_no_broken_invariant():
    make_decider("sync").check()
