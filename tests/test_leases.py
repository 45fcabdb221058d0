# SPDX-License-Identifier: BSD-3-Clause
"""The book of leases: every batch is given to one worker at a time, and is done once."""

import copy

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from paceline import leases
from paceline.errors import ProtocolError
from paceline.leases import BatchOrder, LeaseBook, Use

TEN = BatchOrder(samples=10, batches=4, batch_samples=3, last_samples=1)
OWN = BatchOrder(samples=10)  # each worker draws its own batches


def state_of(book):
    return copy.deepcopy(book._streams)


def numbers_of(dealt):
    return {worker: [use.numbers for use in uses] for worker, uses in dealt.items()}


def lease(book, worker, count, stream=0):
    """Lease batches to one worker; return their numbers."""
    [use] = book.deal({worker: [0] * stream + [count]})[worker]
    assert use.stream == stream
    return use.numbers


# -------------------------------------------------------------------------------------------- sizes


def test_last_batch_of_every_epoch_may_be_smaller():
    assert [TEN.samples_in(number) for number in range(8)] == [3, 3, 3, 1, 3, 3, 3, 1]


# ------------------------------------------------------------------------------------------ dealing


def test_batches_are_dealt_in_turns_in_the_order_of_the_workers():
    book = LeaseBook([TEN])
    dealt = book.deal({2: [2], 0: [3], 1: [1]})
    assert list(dealt) == [0, 1, 2]
    assert numbers_of(dealt) == {0: [(0, 3, 5)], 1: [(1,)], 2: [(2, 4)]}
    assert numbers_of(book.deal({1: [1]})) == {1: [(6,)]}


def test_each_stream_has_its_own_numbers():
    book = LeaseBook([TEN, BatchOrder(5, 5)])
    dealt = book.deal({0: [1, 2], 1: [0, 1], 2: [1]})
    assert dealt == {
        0: [Use(0, (0,)), Use(1, (0, 2))],
        1: [Use(1, (1,))],
        2: [Use(0, (1,))],  # it knows of one stream only
    }


def test_worker_that_wants_nothing_gets_nothing():
    book = LeaseBook([TEN])
    assert book.deal({0: [0], 1: []}) == {0: [], 1: []}
    assert lease(book, 0, 1) == (0,)


@pytest.mark.parametrize("order", [OWN, None])
def test_stream_without_a_shared_order_is_not_dealt(order):
    assert LeaseBook([order]).deal({0: [3]}) == {0: []}


def test_worker_may_ask_for_one_more_batch():
    book = LeaseBook([OWN, TEN])
    book.deal({0: [0, 2]})
    assert book.lease(1, 1) == Use(1, (2,))
    before = state_of(book)
    with pytest.raises(ProtocolError, match="stream 0 has no leases"):
        book.lease(1, 0)
    with pytest.raises(ProtocolError, match="there is no stream 2"):
        book.lease(1, 2)
    assert state_of(book) == before


# ------------------------------------------------------------------------------------------- epochs


def test_batches_are_done_with_the_update_that_uses_them():
    book = LeaseBook([TEN, None])
    book.deal({0: [4]})
    book.accept(0, [Use(0, (0, 1))], update=1)
    book.accept(0, [Use(0, (2, 3))], update=1)
    assert book.done == (0, 0)
    book.apply(1)
    assert book.done == (10, 0)
    book.apply(2)
    assert book.done == (10, 0)


def test_what_is_left_of_an_epoch_counts_in_the_next_one():
    book = LeaseBook([TEN])
    book.deal({0: [5], 1: [1]})  # worker 1 keeps batch 1
    book.accept(0, [Use(0, (0, 2, 3, 4))], update=1)
    book.apply(1)
    assert book.done == (3 + 3 + 1 + 3,)
    lease(book, 0, 1)
    book.accept(0, [Use(0, (6,))], update=2)
    book.accept(1, [Use(0, (1,))], update=2)
    book.apply(2)
    assert book.done == (16,)
    assert book.plain() == [[16, 7, [5]]]


def test_gradients_for_later_updates_count_when_these_are_made():
    book = LeaseBook([TEN])
    book.deal({0: [4]})
    book.accept(0, [Use(0, (0, 1, 2))], update=2)
    book.accept(0, [Use(0, (3,))], update=1)
    book.apply(1)
    assert book.plain()[0][0] == 1
    book.apply(2)
    assert book.plain()[0][0] == 10


def test_batches_that_a_worker_draws_itself_count_by_their_samples():
    book = LeaseBook([OWN, None])
    book.accept(0, [Use(0, samples=6), Use(1, samples=6)], update=1)
    book.accept(1, [Use(0, samples=6)], update=1)
    assert book.done == (0, 0)
    book.apply(1)
    assert book.done == (12, 6)
    assert [done for done, _, _ in book.plain()] == [12, 6]


def test_samples_that_are_named_beside_leased_batches_are_not_counted():
    book = LeaseBook([TEN])
    book.deal({0: [1]})
    book.accept(0, [Use(0, (0,), samples=100)], update=1)
    book.apply(1)
    assert book.plain() == [[3, 1, []]]


# --------------------------------------------------------------------------------- accepting, again


def test_batch_that_several_gradients_use_counts_once():
    """A GAN's batch goes into the gradients of two optimizers."""
    book = LeaseBook([TEN])
    book.deal({0: [1]})
    for update in (1, 2):
        book.accept(0, [Use(0, (0, 0))], update)
        book.apply(update)
    assert book.plain() == [[3, 1, []]]


def test_dropped_batch_is_leased_again_before_new_ones():
    book = LeaseBook([TEN])
    assert lease(book, 0, 4) == (0, 1, 2, 3)
    book.give_back(0, Use(0, (3, 1, 1)))
    assert lease(book, 1, 3) == (1, 3, 4)


def test_batches_of_a_worker_that_left_are_leased_again():
    book = LeaseBook([TEN, TEN])
    book.deal({0: [2, 1], 1: [1, 1]})
    book.release(0)
    assert numbers_of(book.deal({1: [3, 2]})) == {1: [(0, 2, 3), (0, 2)]}
    book.release(0)  # it holds nothing now
    assert book.plain() == [[0, 4, [0, 1, 2, 3]], [0, 3, [0, 1, 2]]]


def test_skipped_batch_counts_as_done():
    book = LeaseBook([TEN])
    book.deal({0: [4]})
    assert book.skip(0, Use(0, (0, 1, 2, 3))) == Use(0, (0, 1, 2, 3))
    assert book.done == (10,)
    assert lease(book, 0, 1) == (4,)


def test_worker_may_return_batches_that_it_has_lost():
    """It was stopped, and doesn't know yet that others have its batches."""
    book = LeaseBook([TEN])
    book.deal({0: [2]})
    book.release(0)
    book.deal({1: [1]})
    before = state_of(book)
    assert book.skip(0, Use(0, (0, 1, 7))) == Use(0, ())
    book.give_back(0, Use(0, (0, 1, -1)))
    assert state_of(book) == before


# ------------------------------------------------------------------------------------ illegal calls


@pytest.mark.parametrize(
    "use",
    [
        Use(0, (1,)),  # another worker's
        Use(0, (2,)),  # queued
        Use(0, (3,)),  # never leased
        Use(0, (-1,)),
        Use(1, (0,)),  # this stream isn't leased
        Use(2, (0,)),  # there is no such stream
        Use(-1, (0,)),
        Use(1, samples=-1),
        Use(1, samples=2**63),  # a trace can't record it
    ],
)
def test_gradient_on_batches_that_the_worker_does_not_hold_is_refused(use):
    book = LeaseBook([TEN, OWN])
    book.deal({0: [2], 1: [1]})
    book.give_back(0, Use(0, (2,)))
    before = state_of(book)
    with pytest.raises(ProtocolError):
        book.check(0, [use])
    with pytest.raises(ProtocolError):
        book.accept(0, [Use(0, (0,)), Use(1, samples=4), use], update=1)
    assert state_of(book) == before


def test_refusal_names_the_worker_and_the_batch():
    book = LeaseBook([TEN])
    with pytest.raises(ProtocolError, match="worker 3 doesn't hold batch 5"):
        book.check(3, [Use(0, (5,))])
    with pytest.raises(ProtocolError, match="there is no stream 1"):
        book.check(3, [Use(1)])


def test_batch_counts_for_its_worker_only_and_a_restored_book_does_not_know_whose_it_was():
    book = LeaseBook([TEN])
    book.deal({0: [2]})
    book.accept(0, [Use(0, (0,))], update=1)
    assert book.check(0, [Use(0, (0, 1))]) == (Use(0, (0, 1)),)  # with another optimizer
    with pytest.raises(ProtocolError, match="worker 1 doesn't hold batch 0"):
        book.check(1, [Use(0, (0,))])
    book.apply(1)
    restored = LeaseBook([TEN])
    restored.restore(book.plain())
    restored.deal({0: [1]})
    for worker in (0, 1):
        assert restored.check(worker, [Use(0, (0,))]) == (Use(0, ()),)
    assert restored.check(0, [Use(0, (0, 1))]) == (Use(0, (1,)),)


def test_book_forgets_whose_batches_were_accepted_long_ago(monkeypatch):
    monkeypatch.setattr(leases, "GIVERS_KEPT", 2)
    book = LeaseBook([TEN])
    book.deal({0: [3]})
    book.accept(0, [Use(0, (0, 1, 2))], update=1)
    assert book.check(0, [Use(0, (0, 1, 2))]) == (Use(0, (1, 2)),)


@pytest.mark.parametrize("stream", [-1, 1])
def test_batches_of_an_unknown_stream_can_not_be_returned(stream):
    book = LeaseBook([TEN])
    book.deal({0: [1]})
    before = state_of(book)
    with pytest.raises(ProtocolError, match="there is no stream"):
        book.skip(0, Use(stream, (0,)))
    with pytest.raises(ProtocolError, match="there is no stream"):
        book.give_back(0, Use(stream, (0,)))
    assert state_of(book) == before


# -------------------------------------------------------------------------------------- checkpoints


def test_everything_that_is_not_done_is_leased_again_after_a_restore():
    book = LeaseBook([TEN, OWN, None])
    book.deal({0: [4], 1: [2]})
    book.accept(0, [Use(0, (0,)), Use(1, samples=12)], update=1)
    book.apply(1)
    book.accept(0, [Use(0, (2,)), Use(1, samples=5)], update=2)  # was never made
    book.give_back(1, Use(0, (1,)))
    plain = book.plain()
    assert plain == [[3, 6, [1, 2, 3, 4, 5]], [12, 0, []], [0, 0, []]]
    restored = LeaseBook([TEN, OWN, None])
    restored.deal({2: [9]})  # is forgotten
    restored.accept(2, [Use(0, (0,)), Use(1, samples=3)], update=2)
    restored.restore(plain)
    assert restored.plain() == plain
    assert restored.done == (3, 12, 0)
    restored.apply(2)
    assert restored.plain() == plain
    assert lease(restored, 0, 6) == (1, 2, 3, 4, 5, 6)


def test_restored_book_may_have_other_streams():
    book = LeaseBook([TEN])
    book.restore([[10, 5, [4]], [7, 0, []]])
    assert book.plain() == [[10, 5, [4]]]
    book = LeaseBook([TEN, OWN])
    book.restore([[10, 5, [4]]])
    assert book.plain() == [[10, 5, [4]], [0, 0, []]]


# ------------------------------------------------------------------------------------ any sequence

WORKERS = st.integers(0, 2)


class Leases(RuleBasedStateMachine):
    """Workers that join, are late, skip batches and die, and a server that is restored.

    The machine tracks what the workers hold; the book must agree, whatever happens.
    """

    @initialize(batches=st.integers(1, 5), size=st.integers(1, 3), data=st.data())
    def begin(self, batches, size, data):
        last = data.draw(st.integers(1, size))
        self.order = BatchOrder((batches - 1) * size + last, batches, size, last)
        self.book = LeaseBook([self.order])
        self.held = {}  # worker by number
        self.done = set()  # accepted for an update that was made
        self.skipped = set()
        self.accepted = {}  # update by number, until it is made
        self.givers = {}  # worker by accepted number, since the last restore
        self.update = 1
        self.saved = (self.book.plain(), set(), set())

    def own(self, worker):
        return sorted(number for number, holder in self.held.items() if holder == worker)

    def some(self, data, worker):
        own = self.own(worker)
        return tuple(data.draw(st.lists(st.sampled_from(own)))) if own else ()

    @rule(wanted=st.dictionaries(WORKERS, st.integers(0, 3), min_size=1))
    def deal(self, wanted):
        undone = set(self.book.plain()[0][2]) - set(self.held) - set(self.accepted)
        dealt = self.book.deal({worker: [count] for worker, count in wanted.items()})
        new = []
        for worker, count in wanted.items():
            numbers = [number for use in dealt[worker] for number in use.numbers]
            assert len(numbers) == count
            self.held |= dict.fromkeys(numbers, worker)
            new += numbers
        assert len(set(new)) == len(new)
        again = sorted(undone)[: len(new)]
        assert sorted(new)[: len(again)] == again, "those that were given back come first"

    @rule(data=st.data(), worker=WORKERS, ahead=st.integers(0, 2))
    def accept(self, data, worker, ahead):
        numbers = self.some(data, worker)
        before = [*self.done, *self.skipped, *self.accepted]
        before = [number for number in before if self.givers.get(number, worker) == worker]
        again = tuple(data.draw(st.lists(st.sampled_from(before), max_size=2))) if before else ()
        self.book.accept(worker, [Use(0, numbers + again)], self.update + ahead)
        for number in dict.fromkeys(numbers):
            del self.held[number]
            self.accepted[number] = self.update + ahead
            self.givers[number] = worker

    @rule(data=st.data(), worker=WORKERS)
    def refuse(self, data, worker):
        others = [number for number, holder in self.held.items() if holder != worker]
        queued = set(self.book.plain()[0][2]) - set(self.held) - set(self.accepted)
        others += [number for number, giver in self.givers.items() if giver != worker]
        bad = data.draw(st.sampled_from([*others, *queued, self.book.plain()[0][1], -1]))
        before = state_of(self.book)
        with pytest.raises(ProtocolError):
            self.book.accept(worker, [Use(0, (*self.own(worker), bad))], self.update)
        assert state_of(self.book) == before

    @rule()
    def apply(self):
        self.book.apply(self.update)
        made = {number for number, update in self.accepted.items() if update == self.update}
        assert not made & (self.done | self.skipped), "done twice"
        self.done |= made
        self.accepted = {n: update for n, update in self.accepted.items() if n not in made}
        self.update += 1

    @rule(data=st.data(), worker=WORKERS)
    def skip(self, data, worker):
        numbers = self.some(data, worker)
        assert set(self.book.skip(worker, Use(0, numbers)).numbers) == set(numbers)
        self.skipped |= set(numbers)
        for number in set(numbers):
            del self.held[number]

    @rule(data=st.data(), worker=WORKERS)
    def give_back(self, data, worker):
        numbers = self.some(data, worker)
        lost = (data.draw(st.integers(0, 20)),)  # perhaps it isn't the worker's
        if self.held.get(lost[0]) == worker:
            lost = ()
        self.book.give_back(worker, Use(0, numbers + lost))
        for number in set(numbers):
            del self.held[number]

    @rule(worker=WORKERS)
    def kill(self, worker):
        self.book.release(worker)
        self.held = {n: holder for n, holder in self.held.items() if holder != worker}

    @rule()
    def save(self):
        self.saved = (self.book.plain(), set(self.done), set(self.skipped))

    @precondition(lambda self: self.update > 1)
    @rule()
    def restore(self):
        self.book = LeaseBook([self.order])
        self.book.restore(self.saved[0])
        self.done, self.skipped = set(self.saved[1]), set(self.saved[2])
        self.held, self.accepted, self.givers = {}, {}, {}

    @invariant()
    def no_batch_is_lost_and_none_is_done_twice(self):
        done, following, undone = self.book.plain()[0]
        assert len(set(undone)) == len(undone)
        assert not self.done & self.skipped
        assert not (self.done | self.skipped) & set(undone)
        assert self.done | self.skipped | set(undone) == set(range(following))
        assert done == sum(map(self.order.samples_in, self.done | self.skipped))
        assert self.book.done == (done,)
        assert self.book._streams[0].leased == self.held


TestLeases = Leases.TestCase
TestLeases.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_epochs_have_their_samples_if_they_are_known():
    assert LeaseBook([None, TEN, OWN]).epoch_samples == (None, 10, 10)
