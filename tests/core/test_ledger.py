# SPDX-License-Identifier: BSD-3-Clause
"""The ledger stores the state and decides nothing."""

import pytest

from paceline.core.ledger import Ledger, Member, Tally, Work
from paceline.spec import RunSpec

SPEC = RunSpec(workers=3)


def test_new_ledger_is_empty_and_paused():
    ledger = Ledger(spec=SPEC, memory=None)
    assert (ledger.version, ledger.now) == (0, 0.0)
    assert ledger.paused
    assert [ledger.begun, ledger.stopping, ledger.finished] == [False, False, False]
    assert [ledger.members, ledger.idle, ledger.turns, ledger.joined] == [{}, {}, {}, set()]
    assert (ledger.timer, ledger.timer_runs, ledger.overdue) == (0, False, False)


def test_ledgers_share_no_state():
    one, other = Ledger(spec=SPEC, memory=None), Ledger(spec=SPEC, memory=None)
    one.members[0] = Member()
    one.next_tally.done.add(0)
    assert other == Ledger(spec=SPEC, memory=None)


def test_new_ledger_has_a_tally_for_the_first_update():
    ledger = Ledger(spec=SPEC, memory=None)
    assert ledger.tallies == {1: Tally()}
    assert (Tally().contributions, Tally().done, Tally().excused) == ([], set(), set())


def test_next_tally_is_that_of_the_next_update():
    ledger = Ledger(spec=SPEC, memory=None)
    assert ledger.next_tally is ledger.tallies[1]
    ledger.version, ledger.tallies = 6, {7: Tally(), 8: Tally(done={0})}
    assert ledger.next_tally is ledger.tallies[7]
    ledger.version = 8
    with pytest.raises(KeyError):
        ledger.next_tally  # noqa: B018 - reading it is the test
    assert ledger.tallies.keys() == {7, 8}


def test_outstanding_members_are_neither_done_nor_excused():
    ledger = Ledger(spec=SPEC, memory=None, members={0: Member(), 1: Member(), 2: Member()})
    assert ledger.outstanding() == 3
    ledger.next_tally.done.add(1)
    assert ledger.outstanding() == 2
    ledger.next_tally.excused.add(0)
    assert ledger.outstanding() == 1
    ledger.tallies[2] = Tally(done={2})
    assert ledger.outstanding() == 1, "it is the next update that counts"


def test_new_member_is_idle():
    member = Member()
    assert member.work is None
    assert (member.turn, member.asked_at, member.cancelled) == (0, 0.0, False)


def test_work_is_a_value():
    assert Work(version=2, update=3) == Work(2, 3)
