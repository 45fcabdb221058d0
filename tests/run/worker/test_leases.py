# SPDX-License-Identifier: BSD-3-Clause
"""The leases that a worker holds."""

import pytest

from paceline.leases import Use
from paceline.run.net.messages import Assignment, RunEnded
from paceline.run.worker.leases import HeldLeases


class FakeLessor:
    """Leases numbers from 100 on, and notes what is returned."""

    def __init__(self):
        self.following = 100
        self.returned = []
        self.is_over = False

    def lease(self, stream):
        self.following += 1
        return None if self.is_over else (self.following - 1, (5, 6))

    def return_batches(self, use, *, skipped):
        self.returned.append((use, skipped))


@pytest.fixture
def lessor():
    return FakeLessor()


@pytest.fixture
def forgotten():
    return []


@pytest.fixture
def leases(lessor, forgotten):
    return HeldLeases(2, lessor, lambda: forgotten.append(True))


def assignment(*uses, **fields):
    return Assignment(1, 0, 0, (0,), 0.0, leases=uses, **fields)


def test_leases_are_used_in_order_by_stream(leases):
    leases.receive(assignment(Use(0, (3, 1)), Use(1, (7,)), stream_samples=(1, 2)))
    assert leases.done == (1, 2)
    assert [leases.take(0), leases.take(1), leases.take(0)] == [3, 7, 1]


def test_worker_that_holds_none_asks_for_one(leases, lessor):
    assert leases.take(1) == 100
    assert leases.done == (5, 6)
    lessor.is_over = True
    assert leases.take(1) is None


def test_used_leases_are_handed_in_once(leases):
    leases.receive(assignment(Use(0, (3, 1))))
    for stream in (0, 0, 1):
        leases.take(stream)
    assert leases.hand_in_pulled() == (2, 1)
    assert leases.hand_in_pulled() == (0, 0)


def test_batches_that_are_put_back_come_first_and_are_not_handed_in(leases):
    leases.receive(assignment(Use(0, (1, 2, 3, 4))))
    taken = [leases.take(0) for _ in range(3)]
    leases.put_back(0, taken[1:])
    assert leases.hand_in_pulled() == (1, 0)
    assert [leases.take(0) for _ in range(3)] == [2, 3, 4]


def test_batches_that_are_put_back_after_they_were_handed_in_are_deducted(leases):
    leases.receive(assignment(Use(0, (1, 2, 3, 4))))
    taken = [leases.take(0) for _ in range(3)]
    assert leases.hand_in_pulled() == (3, 0)
    leases.put_back(0, taken[1:])
    assert leases.hand_in_pulled() == (0, 0)
    for expected in (0, 0, 1):
        leases.take(0)
        assert leases.hand_in_pulled() == (expected, 0)


def test_batches_are_returned_to_the_lessor(leases, lessor):
    leases.give_back(0, [4, 2])
    leases.skip(1, [5])
    assert lessor.returned == [(Use(0, (4, 2)), False), (Use(1, (5,)), True)]


def test_lost_leases_are_forgotten_before_new_ones_are_kept(leases, forgotten):
    leases.receive(assignment(Use(0, (1, 2)), Use(1, (3,))))
    leases.take(0)
    leases.receive(assignment(Use(0, (8,)), forget_leases=True))
    assert (leases.generation, forgotten) == (1, [True])
    assert leases.hand_in_pulled() == (0, 0)
    assert [leases.take(0), leases.take(1)] == [8, 100]


def test_end_of_the_run_has_the_last_epochs(leases):
    leases.receive(RunEnded(3, 0, (3,), None, stream_samples=(4, 4)))
    assert leases.done == (4, 4)


def test_server_without_streams_does_not_change_the_epochs(leases):
    leases.receive(assignment(stream_samples=(1, 2)))
    leases.receive(assignment())
    assert leases.done == (1, 2)
