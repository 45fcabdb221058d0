# SPDX-License-Identifier: BSD-3-Clause
"""The ledger keeps the books and decides nothing."""

from paceline.core.events import Contribution
from paceline.core.ledger import Ledger, Member, Tally, Work
from paceline.spec import RunSpec

SPEC = RunSpec(workers=3)


def test_a_fresh_ledger_is_empty_and_paused():
    ledger = Ledger(spec=SPEC, memory=None)
    assert (ledger.version, ledger.now) == (0, 0.0)
    assert ledger.paused
    assert [ledger.begun, ledger.stopping, ledger.finished] == [False, False, False]
    assert [ledger.members, ledger.idle, ledger.tallies, ledger.joined] == [{}, {}, {}, set()]


def test_two_ledgers_share_nothing():
    one, other = Ledger(spec=SPEC, memory=None), Ledger(spec=SPEC, memory=None)
    one.members[0] = Member()
    one.next_tally().done.add(0)
    assert other == Ledger(spec=SPEC, memory=None)


def test_a_tally_begins_empty_and_is_then_the_same():
    ledger = Ledger(spec=SPEC, memory=None)
    tally = ledger.tally(4)
    assert tally == Tally()
    tally.contributions.append(Contribution(0, 0, 1))
    assert ledger.tally(4) is tally


def test_the_next_tally_is_that_of_the_next_update():
    ledger = Ledger(spec=SPEC, memory=None, version=6)
    assert ledger.next_tally() is ledger.tally(7)


def test_outstanding_are_those_here_who_have_not_had_their_turn():
    ledger = Ledger(spec=SPEC, memory=None, members={0: Member(), 1: Member(), 2: Member()})
    tally = ledger.next_tally()
    assert ledger.outstanding(tally) == 3
    tally.done.add(1)
    assert ledger.outstanding(tally) == 2


def test_a_refused_gradient_takes_a_place_until_the_tally_is_reopened():
    tally = Tally(contributions=[], refused={0, 1}, done={0, 1})
    assert tally.arrived == 2
    tally.reopen()
    assert tally == Tally()


def test_a_new_member_waits_and_has_done_nothing():
    member = Member()
    assert member.work is None
    assert (member.turn, member.clock, member.cancelled) == (0, 0, False)


def test_work_is_a_value():
    assert Work(version=2, update=3) == Work(2, 3)
