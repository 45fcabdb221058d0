# SPDX-License-Identifier: BSD-3-Clause
"""Where a worker is: in its random numbers, and in all its streams."""

import random
from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from message_examples import unhurried
from paceline.errors import ProtocolError
from paceline.run.worker.position import (
    Bookmark,
    Generators,
    Position,
    PositionTracker,
    Randomness,
    decode_position,
    encode_position,
)


@pytest.fixture(autouse=True)
def _generators_are_as_they_were():
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()
    yield
    torch.set_rng_state(before[0])
    random.setstate(before[1])
    np.random.set_state(before[2])


def seed_all(seed):
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def draw():
    """Numbers of all generators, also such as are kept for the next time they are asked for."""
    return (
        torch.randn(3).tolist(),
        torch.rand(()).item(),
        random.random(),
        random.gauss(0, 1),  # makes two, and keeps one
        random.randrange(10**9),
        np.random.standard_normal(),  # likewise
        np.random.randint(10**9),
    )


def travelled(randomness):
    """As it comes back from a checkpoint."""
    return decode_position(encode_position(Position((), randomness))).randomness


# --------------------------------------------------------------------------------------- randomness


@pytest.mark.parametrize("drawn", [0, 1, 2, 7])
def test_all_generators_go_on_exactly_where_they_were(drawn):
    seed_all(4)
    for _ in range(drawn):
        draw()
    generators = Generators()
    generators.read()
    remembered = travelled(generators.remembered())
    expected = [draw() for _ in range(3)]
    seed_all(99)
    for _ in range(2):
        remembered.restore()
        assert [draw() for _ in range(3)] == expected


def test_what_is_remembered_is_of_the_last_look():
    seed_all(4)
    generators = Generators()
    expected = []
    for _ in range(3):
        generators.read()
        expected = draw()
    generators.remembered().restore()
    assert draw() == expected


@pytest.mark.parametrize("use", [random.random, np.random.rand], ids=["random", "numpy"])
@pytest.mark.parametrize("first_used", [0, 1, 5, 63, 64, 65, 100])
def test_it_is_found_that_a_script_begins_to_use_a_generator_later(use, first_used):
    """At the latest after 64 looks, and then it is known at each."""
    seed_all(4)
    generators = Generators()
    for step in range(first_used + 128):
        generators.read()
        if step >= first_used:
            use()
    generators.read()
    expected = use()
    seed_all(5)
    generators.remembered().restore()
    assert use() == expected


@pytest.mark.parametrize("every", [2, 10, 60])
def test_a_generator_that_is_used_now_and_then_is_known_at_each_look(every):
    seed_all(4)
    generators = Generators()
    for step in range(300):
        generators.read()
        remembered = generators.remembered()
        if step >= 128:
            assert remembered.python == random.getstate()
        if step % every == 0:
            random.random()


def test_a_generator_that_is_not_used_is_looked_at_seldom():
    generators, found = Generators(), []
    for _ in range(1000):
        generators.read()
        found.append(generators.remembered().python)  # an object of its own for each look
    assert len({id(state) for state in found}) < 30


def test_where_numpy_was_not_in_use_it_is_left_alone():
    seed_all(4)
    generators = Generators()
    generators.read()
    known = generators.remembered()
    expected = np.random.rand()
    np.random.seed(4)
    Randomness(known.torch, known.python, None).restore()
    assert np.random.rand() == expected


def test_another_generator_in_the_place_of_numpys_own_is_left_alone():
    before = np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.PCG64(1))
    try:
        generators = Generators()
        generators.read()
        remembered = generators.remembered()
        assert remembered.numpy is None
        np.random.rand()
        remembered.restore()
    finally:
        np.random.set_bit_generator(before)


# -------------------------------------------------------------------------------------- as bytes


def randomness(seed=0):
    seed_all(seed)
    generators = Generators()
    generators.read()
    return generators.remembered()


numbers = st.integers(0, 2**53)


@unhurried
@given(st.builds(Bookmark, numbers, numbers, st.lists(st.tuples(numbers, numbers)).map(tuple)))
def test_any_bookmark_comes_back(bookmark):
    place = Position((bookmark, Bookmark(0, 0)), Randomness(b"", (3, (1, 2), None), None))
    assert decode_position(encode_position(place)) == place


@unhurried
@given(st.binary(max_size=200))
def test_bytes_that_are_no_place_are_refused(junk):
    with pytest.raises(ProtocolError, match="expected the position of a worker"):
        decode_position(junk)


@pytest.mark.parametrize("cut", [1, 100, -1])
def test_a_place_that_is_cut_is_refused(cut):
    with pytest.raises(ProtocolError, match="expected the position of a worker"):
        decode_position(encode_position(Position((Bookmark(1, 2),), randomness()))[:cut])


# -------------------------------------------------------------------------------------- position


class Shelf:
    """A stream that only knows where it is."""

    def __init__(self, batches=0, can_go_back=True):
        self.at = Bookmark(0, batches)
        self.then = None
        self.can_go_back = can_go_back

    def bookmark(self):
        return self.at

    def move_to(self, bookmark, then):
        if self.can_go_back:
            self.at, self.then = bookmark, then


def bookmarks(body):
    return decode_position(body).bookmarks


def test_what_is_told_is_where_all_streams_were_when_the_work_began():
    where, one, other = PositionTracker(), Shelf(), Shelf()
    where.add(one)
    where.add(other)
    where.record()
    one.at, other.at = Bookmark(0, 3), Bookmark(2, 1, ((0, 7),))
    assert bookmarks(where.encode()) == (Bookmark(0, 0), Bookmark(0, 0))
    seed_all(4)
    where.record()
    expected = draw()
    one.at = Bookmark(0, 4)
    told = where.encode()
    assert bookmarks(told) == (Bookmark(0, 3), Bookmark(2, 1, ((0, 7),)))
    decode_position(told).randomness.restore()
    assert draw() == expected
    assert where.encode() == told


def test_a_stream_that_the_script_has_let_go_of_is_told_as_it_was_last():
    where, one, other = PositionTracker(), Shelf(3), Shelf(5)
    where.add(one)
    where.add(other)
    where.record()
    del one
    other.at = Bookmark(1, 1)
    where.record()
    assert bookmarks(where.encode()) == (Bookmark(0, 3), Bookmark(1, 1))
    where.move_to(where.encode())
    assert other.at == Bookmark(1, 1)


def place(*marks, seed=7):
    return encode_position(Position(marks, randomness(seed)))


def test_a_worker_that_is_given_a_place_begins_all_its_streams_there():
    where = PositionTracker()
    where.move_to(place(Bookmark(0, 3), Bookmark(1, 4)))
    streams = [Shelf(), Shelf(), Shelf()]
    for stream in streams:
        where.add(stream)
    assert [stream.at for stream in streams] == [Bookmark(0, 3), Bookmark(1, 4), Bookmark(0, 0)]
    assert streams[2].then is None  # the script had fewer loaders then
    where.record()
    assert bookmarks(where.encode()) == (Bookmark(0, 3), Bookmark(1, 4), Bookmark(0, 0))


def test_the_place_that_was_given_is_told_until_another_is_noted():
    """A checkpoint may be made before the first step after another one."""
    where = PositionTracker()
    where.move_to(place(Bookmark(0, 3)))
    where.record()
    stream = Shelf()
    where.add(stream)
    assert bookmarks(where.encode()) == (Bookmark(0, 3),)


def test_random_numbers_begin_at_once_and_again_with_the_first_batch_only():
    """A script may draw some before its loop, and had done so then too."""
    given_place = place(Bookmark(0, 3), Bookmark(0, 3))
    seed_all(7)
    expected = draw()
    seed_all(1)
    where, streams = PositionTracker(), [Shelf(), Shelf()]
    where.move_to(given_place)
    assert draw() == expected
    for stream in streams:
        where.add(stream)
    streams[1].then()
    first, second = draw(), draw()
    assert first == expected
    streams[0].then()  # whose first batch comes later, or never
    assert draw() not in (first, second)


def test_a_living_worker_goes_back_as_often_as_it_is_told():
    where, stream = PositionTracker(), Shelf()
    where.add(stream)
    where.record()
    for seed in (3, 4):
        given_place = place(Bookmark(0, seed), seed=seed)
        seed_all(seed)
        expected = draw()
        seed_all(1)
        where.move_to(given_place)
        assert stream.at == Bookmark(0, seed)
        stream.then()
        assert draw() == expected


@pytest.mark.parametrize("beginning", [False, True])
def test_where_a_stream_cannot_go_back_random_numbers_go_on_with_it(beginning):
    where, one, other = PositionTracker(), Shelf(5), Shelf(5, can_go_back=False)
    where.add(one)
    where.add(other)
    where.record()
    given_place = b"" if beginning else place(Bookmark(0, 3), Bookmark(0, 3))
    seed_all(1)
    expected = [draw(), draw()]
    seed_all(1)
    where.move_to(given_place)
    first = draw()
    one.then()  # its first batch is loaded
    assert [first, draw()] == expected
    assert (one.at, other.at) == (Bookmark(0, 0 if beginning else 3), Bookmark(0, 5))


def test_a_stream_that_could_not_go_back_and_is_gone_does_not_matter():
    where, one, other = PositionTracker(), Shelf(5), Shelf(5, can_go_back=False)
    where.add(one)
    where.add(other)
    del other
    given_place = place(Bookmark(0, 3), Bookmark(0, 3))
    seed_all(7)
    expected = draw()
    seed_all(1)
    where.move_to(given_place)
    assert draw() == expected


def test_with_nothing_to_go_to_a_worker_goes_to_its_beginning():
    """The run begins anew, for its server was lost before anything was saved."""
    where, stream = PositionTracker(), Shelf()
    where.add(stream)
    where.move_to(b"")  # nothing has begun
    assert stream.then is None
    seed_all(3)
    where.record()
    expected = draw()
    for batches in (1, 2):
        stream.at = Bookmark(0, batches)
        where.record()
    where.move_to(b"")
    assert stream.at == Bookmark(0, 0)
    assert draw() == expected


def test_a_place_that_is_none_is_refused_and_changes_nothing():
    where, stream = PositionTracker(), Shelf(3)
    where.add(stream)
    where.record()
    before, state = where.encode(), Random()
    state.setstate(random.getstate())
    with pytest.raises(ProtocolError):
        where.move_to(b"nonsense")
    assert (stream.at, where.encode()) == (Bookmark(0, 3), before)
    assert random.random() == state.random()
