# SPDX-License-Identifier: BSD-3-Clause
"""A worker's position: its random numbers, and its bookmarks in all streams."""

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
    """Draw from all generators, including those that cache a second number."""
    return (
        torch.randn(3).tolist(),
        torch.rand(()).item(),
        random.random(),
        random.gauss(0, 1),  # draws two, and caches one
        random.randrange(10**9),
        np.random.standard_normal(),  # the same
        np.random.randint(10**9),
    )


def decoded(randomness):
    """Return the randomness as a checkpoint restores it."""
    return decode_position(encode_position(Position((), randomness))).randomness


# --------------------------------------------------------------------------------------- randomness


@pytest.mark.parametrize("drawn", [0, 1, 2, 7])
def test_generators_continue_exactly_where_they_were(drawn):
    seed_all(4)
    for _ in range(drawn):
        draw()
    generators = Generators()
    generators.read()
    remembered = decoded(generators.remembered())
    expected = [draw() for _ in range(3)]
    seed_all(99)
    for _ in range(2):
        remembered.restore()
        assert [draw() for _ in range(3)] == expected


def test_remembered_state_is_that_of_the_last_read():
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
def test_generator_that_a_script_starts_to_use_late_is_noticed(use, first_used):
    """It is noticed after 64 reads at most; from then on, every read includes it."""
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
def test_occasionally_used_generator_is_known_at_every_read(every):
    seed_all(4)
    generators = Generators()
    for step in range(300):
        generators.read()
        remembered = generators.remembered()
        if step >= 128:
            assert remembered.python == random.getstate()
        if step % every == 0:
            random.random()


def test_unused_generator_is_rarely_read():
    generators, found = Generators(), []
    for _ in range(1000):
        generators.read()
        found.append(generators.remembered().python)  # a new object for each real read
    assert len({id(state) for state in found}) < 30


def test_numpy_is_left_alone_if_it_was_not_in_use():
    seed_all(4)
    generators = Generators()
    generators.read()
    known = generators.remembered()
    expected = np.random.rand()
    np.random.seed(4)
    Randomness(known.torch, known.python, None).restore()
    assert np.random.rand() == expected


def test_replaced_numpy_generator_is_left_alone():
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


# ----------------------------------------------------------------------------------------- as bytes


def randomness(seed=0):
    seed_all(seed)
    generators = Generators()
    generators.read()
    return generators.remembered()


numbers = st.integers(0, 2**53)


@unhurried
@given(st.builds(Bookmark, numbers, numbers, st.lists(st.tuples(numbers, numbers)).map(tuple)))
def test_any_bookmark_survives_encoding(bookmark):
    position = Position((bookmark, Bookmark(0, 0)), Randomness(b"", (3, (1, 2), None), None))
    assert decode_position(encode_position(position)) == position


@unhurried
@given(st.binary(max_size=200))
def test_junk_is_not_a_position(junk):
    with pytest.raises(ProtocolError, match="expected the position of a worker"):
        decode_position(junk)


@pytest.mark.parametrize("cut", [1, 100, -1])
def test_truncated_position_is_refused(cut):
    with pytest.raises(ProtocolError, match="expected the position of a worker"):
        decode_position(encode_position(Position((Bookmark(1, 2),), randomness()))[:cut])


# ----------------------------------------------------------------------------------------- position


class FakeStream:
    """A stream that only knows its position."""

    def __init__(self, batches=0, can_go_back=True):
        self.at = Bookmark(0, batches)
        self.callback = None
        self.can_go_back = can_go_back

    def bookmark(self):
        return self.at

    def move_to(self, bookmark, callback):
        if self.can_go_back:
            self.at, self.callback = bookmark, callback


def bookmarks(body):
    return decode_position(body).bookmarks


def test_encoded_position_is_the_one_recorded_last():
    tracker, one, other = PositionTracker(), FakeStream(), FakeStream()
    tracker.add(one)
    tracker.add(other)
    tracker.record()
    one.at, other.at = Bookmark(0, 3), Bookmark(2, 1, ((0, 7),))
    assert bookmarks(tracker.encode()) == (Bookmark(0, 0), Bookmark(0, 0))
    seed_all(4)
    tracker.record()
    expected = draw()
    one.at = Bookmark(0, 4)
    encoded = tracker.encode()
    assert bookmarks(encoded) == (Bookmark(0, 3), Bookmark(2, 1, ((0, 7),)))
    decode_position(encoded).randomness.restore()
    assert draw() == expected
    assert tracker.encode() == encoded


def test_dropped_stream_keeps_its_last_bookmark():
    tracker, one, other = PositionTracker(), FakeStream(3), FakeStream(5)
    tracker.add(one)
    tracker.add(other)
    tracker.record()
    del one
    other.at = Bookmark(1, 1)
    tracker.record()
    assert bookmarks(tracker.encode()) == (Bookmark(0, 3), Bookmark(1, 1))
    tracker.move_to(tracker.encode())
    assert other.at == Bookmark(1, 1)


def position(*marks, seed=7):
    return encode_position(Position(marks, randomness(seed)))


def test_streams_that_are_added_later_begin_at_the_given_position():
    tracker = PositionTracker()
    tracker.move_to(position(Bookmark(0, 3), Bookmark(1, 4)))
    streams = [FakeStream(), FakeStream(), FakeStream()]
    for stream in streams:
        tracker.add(stream)
    assert [stream.at for stream in streams] == [Bookmark(0, 3), Bookmark(1, 4), Bookmark(0, 0)]
    assert streams[2].callback is None  # the script had fewer loaders when the position was saved
    tracker.record()
    assert bookmarks(tracker.encode()) == (Bookmark(0, 3), Bookmark(1, 4), Bookmark(0, 0))


def test_given_position_is_encoded_until_another_is_recorded():
    """A checkpoint may follow another one before the next step."""
    tracker = PositionTracker()
    tracker.move_to(position(Bookmark(0, 3)))
    tracker.record()
    stream = FakeStream()
    tracker.add(stream)
    assert bookmarks(tracker.encode()) == (Bookmark(0, 3),)


def test_random_numbers_are_restored_immediately_and_at_the_first_batch_only():
    """A script may draw numbers before its loop, as it did in the first process."""
    target = position(Bookmark(0, 3), Bookmark(0, 3))
    seed_all(7)
    expected = draw()
    seed_all(1)
    tracker, streams = PositionTracker(), [FakeStream(), FakeStream()]
    tracker.move_to(target)
    assert draw() == expected
    for stream in streams:
        tracker.add(stream)
    streams[1].callback()
    first, second = draw(), draw()
    assert first == expected
    streams[0].callback()  # its first batch comes later
    assert draw() not in (first, second)


def test_live_worker_can_go_back_repeatedly():
    tracker, stream = PositionTracker(), FakeStream()
    tracker.add(stream)
    tracker.record()
    for seed in (3, 4):
        target = position(Bookmark(0, seed), seed=seed)
        seed_all(seed)
        expected = draw()
        seed_all(1)
        tracker.move_to(target)
        assert stream.at == Bookmark(0, seed)
        stream.callback()
        assert draw() == expected


@pytest.mark.parametrize("beginning", [False, True])
def test_random_numbers_are_not_restored_if_a_stream_cannot_go_back(beginning):
    tracker, one, other = PositionTracker(), FakeStream(5), FakeStream(5, can_go_back=False)
    tracker.add(one)
    tracker.add(other)
    tracker.record()
    target = b"" if beginning else position(Bookmark(0, 3), Bookmark(0, 3))
    seed_all(1)
    expected = [draw(), draw()]
    seed_all(1)
    tracker.move_to(target)
    first = draw()
    one.callback()  # its first batch is loaded
    assert [first, draw()] == expected
    assert (one.at, other.at) == (Bookmark(0, 0 if beginning else 3), Bookmark(0, 5))


def test_dropped_stream_that_could_not_go_back_does_not_matter():
    tracker, one, other = PositionTracker(), FakeStream(5), FakeStream(5, can_go_back=False)
    tracker.add(one)
    tracker.add(other)
    del other
    target = position(Bookmark(0, 3), Bookmark(0, 3))
    seed_all(7)
    expected = draw()
    seed_all(1)
    tracker.move_to(target)
    assert draw() == expected


def test_empty_position_is_the_beginning():
    """The run starts over because its server was lost before the first checkpoint."""
    tracker, stream = PositionTracker(), FakeStream()
    tracker.add(stream)
    tracker.move_to(b"")  # nothing was recorded yet
    assert stream.callback is None
    seed_all(3)
    tracker.record()
    expected = draw()
    for batches in (1, 2):
        stream.at = Bookmark(0, batches)
        tracker.record()
    tracker.move_to(b"")
    assert stream.at == Bookmark(0, 0)
    assert draw() == expected


def test_invalid_position_is_refused_and_changes_nothing():
    tracker, stream = PositionTracker(), FakeStream(3)
    tracker.add(stream)
    tracker.record()
    before, state = tracker.encode(), Random()
    state.setstate(random.getstate())
    with pytest.raises(ProtocolError):
        tracker.move_to(b"nonsense")
    assert (stream.at, tracker.encode()) == (Bookmark(0, 3), before)
    assert random.random() == state.random()
