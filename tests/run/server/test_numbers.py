# SPDX-License-Identifier: BSD-3-Clause
"""Numbers for workers that were started without one; inside this process, on a manual clock."""

from contextlib import suppress
from dataclasses import replace

import pytest

from message_examples import SPEC
from paceline.errors import PeerLost, ProtocolError
from paceline.release import RELEASE
from paceline.run.net.in_process import InProcessNetwork, InProcessStore
from paceline.run.net.messages import Join, NumberReserved, ReserveNumber
from paceline.run.server import numbers
from paceline.run.server.numbers import RETURN_S, Numbers
from paceline.run.server.roster import Roster
from paceline.run.server.timers import RunClock
from paceline.run.settings import Settings
from paceline.run.system import SYSTEM
from paceline.spec import RunSpec

SETTINGS = Settings(spec=RunSpec(workers=3, seed=5), grace_s=9.0)


class Desk:
    """The numbers of a run of three workers, and launchers that ask for them."""

    def __init__(self):
        self.now = 0.0
        self.network = InProcessNetwork(InProcessStore(SPEC))
        self.roster = Roster(SETTINGS, SPEC)
        clock = RunClock(0.0, replace(SYSTEM, monotonic=lambda: self.now))
        self.numbers = Numbers(SETTINGS, self.roster, clock, self.look_at)

    def look_at(self, end):
        """Remove a member whose connection is closed, as the server does."""
        with suppress(PeerLost):
            list(end.receive_nowait())
            return
        self.roster.remove(self.roster.find(end))

    def connect(self):
        """Return a launcher's connection: its own end, and the server's."""
        return self.network.connect(), self.network._peers[-1]

    def ask(self, connection, seat, wanted=None, *, is_fixed=False):
        """Ask for a number and return it; None: there is no answer yet."""
        request = ReserveNumber(seat, RELEASE, wanted, is_fixed)
        self.numbers.handlers[ReserveNumber](connection[1], request)
        return self.answer(connection)

    def answer(self, connection):
        if not connection[0].wait_readable(0.0):
            return None
        answer = connection[0].receive()
        assert isinstance(answer, NumberReserved)
        return answer.number

    def join(self, worker, seat=b""):
        """Let a worker join; return its connection."""
        own, end = self.connect()
        join = Join(worker, RELEASE, SPEC, seat=seat)
        self.numbers.check(join)
        self.roster.admit(end, join, saves=False, position=b"")
        return own, end


@pytest.fixture
def desk():
    return Desk()


def test_each_seat_gets_the_lowest_number_that_is_free(desk):
    first, second = desk.connect(), desk.connect()
    assert [desk.ask(first, b"a"), desk.ask(second, b"b"), desk.ask(first, b"c")] == [0, 1, 2]


def test_numbers_beyond_those_of_the_run_are_for_additional_backups(desk):
    connection = desk.connect()
    assert [desk.ask(connection, b"%d" % seat) for seat in range(5)] == [0, 1, 2, 3, 4]


def test_answer_says_what_scripts_may_ask_before_they_join(desk):
    connection = desk.connect()
    desk.numbers.handlers[ReserveNumber](connection[1], ReserveNumber(b"a", RELEASE))
    assert connection[0].receive() == NumberReserved(b"a", 0, 3, 5, 9.0)


def test_number_of_a_worker_that_has_joined_is_not_given_away(desk):
    desk.join(0)
    assert desk.ask(desk.connect(), b"a") == 1


def test_number_is_free_again_when_the_connection_is_gone(desk):
    gone = desk.connect()
    assert desk.ask(gone, b"a") == 0
    desk.numbers.remove(gone[1])
    assert desk.ask(desk.connect(), b"b") == 0


def test_number_stays_with_a_worker_whose_launcher_is_gone(desk):
    launcher = desk.connect()
    desk.ask(launcher, b"a")
    desk.join(0, b"a")
    desk.numbers.remove(launcher[1])
    assert desk.ask(desk.connect(), b"b") == 1


def test_launcher_that_connects_again_keeps_its_number(desk):
    """Also before its old connection is known to be gone, and while its worker is in the run."""
    old = desk.connect()
    desk.ask(old, b"a")
    desk.ask(old, b"b")
    desk.join(1, b"b")
    new = desk.connect()
    assert (desk.ask(new, b"b", 1), desk.ask(new, b"a", 0)) == (1, 0)
    desk.numbers.remove(old[1])
    assert desk.ask(desk.connect(), b"c") == 2


def test_seat_whose_number_was_taken_gets_another_one(desk):
    desk.join(1)
    assert desk.ask(desk.connect(), b"a", 1) == 0


def test_number_that_was_given_up_is_given_only_to_who_asks_for_it(desk):
    desk.roster.give_up(0)
    connection = desk.connect()
    assert (desk.ask(connection, b"a"), desk.ask(connection, b"b", 0)) == (1, 0)


def test_number_that_was_given_up_counts_again_when_its_worker_has_joined_after_all(desk):
    desk.roster.give_up(0)
    _, end = desk.join(0)
    desk.roster.remove(desk.roster.find(end))
    assert desk.ask(desk.connect(), b"a") == 0


def test_fixed_number_is_reserved_or_refused(desk):
    connection = desk.connect()
    assert desk.ask(connection, b"a", 2, is_fixed=True) == 2
    with pytest.raises(ProtocolError, match="there is already a worker 2"):
        desk.ask(desk.connect(), b"b", 2, is_fixed=True)
    desk.join(1)
    with pytest.raises(ProtocolError, match="there is already a worker 1"):
        desk.ask(connection, b"c", 1, is_fixed=True)


def test_number_of_a_worker_that_has_just_died_can_be_had(desk):
    """The server hasn't noticed yet that its connection was closed."""
    own, _ = desk.join(1)
    own.close()
    assert desk.ask(desk.connect(), b"a", 1, is_fixed=True) == 1


def test_worker_cannot_join_with_a_number_that_is_reserved_for_another_seat(desk):
    desk.ask(desk.connect(), b"a")
    for seat in (b"", b"b"):
        with pytest.raises(ProtocolError, match="there is already a worker 0"):
            desk.join(0, seat)
    desk.join(0, b"a")


def test_restarted_server_lets_those_come_back_first_who_had_a_number(desk):
    desk.numbers.expect_return()
    new, old = desk.connect(), desk.connect()
    assert desk.ask(new, b"new") is None
    assert desk.ask(old, b"old", 0) == 0
    desk.now = RETURN_S - 0.1
    desk.numbers.tick()
    assert desk.answer(new) is None
    desk.now = RETURN_S
    desk.numbers.tick()
    assert desk.answer(new) == 1


def test_launcher_that_leaves_while_it_waits_gets_nothing(desk):
    desk.numbers.expect_return()
    gone, stays = desk.connect(), desk.connect()
    desk.ask(gone, b"a")
    desk.ask(stays, b"b")
    desk.numbers.remove(gone[1])
    desk.now = RETURN_S
    desk.numbers.tick()
    assert desk.answer(stays) == 0


@pytest.mark.parametrize("is_early", [False, True])
def test_launcher_cannot_reserve_any_number_of_numbers(desk, monkeypatch, is_early):
    monkeypatch.setattr(numbers, "SEATS_MAX", 2)
    if is_early:
        desk.numbers.expect_return()
    connection = desk.connect()
    desk.ask(connection, b"a")
    desk.ask(connection, b"b")
    with pytest.raises(ProtocolError, match="one launcher may start at most 2 workers"):
        desk.ask(connection, b"c")
    desk.ask(desk.connect(), b"c")
    assert is_early or desk.ask(connection, b"b", 1) == 1


def test_another_release_is_refused(desk):
    with pytest.raises(ProtocolError, match=r"expected Paceline .* in a worker, got 0\.0\.0"):
        desk.numbers.handlers[ReserveNumber](desk.connect()[1], ReserveNumber(b"a", "0.0.0"))
