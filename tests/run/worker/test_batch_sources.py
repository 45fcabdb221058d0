# SPDX-License-Identifier: BSD-3-Clause
"""Where batches come from: leases, or the loader of the worker, which can go on at a bookmark."""

from itertools import chain

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset
from torch.utils.data import SubsetRandomSampler as Subset

from leased_workers import FakeRun
from message_examples import unhurried
from paceline.core.events import Fate
from paceline.run.worker.batch_sources import LeasedSource, OwnSource
from paceline.run.worker.leases import HeldLeases
from paceline.run.worker.position import Bookmark, Generators
from paceline.run.worker.sampler import order_of, with_shared_order

SIZE = 11
FATES = [Fate.ACCEPTED, Fate.ACCEPTED, Fate.LATE, Fate.STALE, Fate.NON_FINITE]


class Numbers(Dataset):
    """Records each sample that is loaded, and draws a random number for it."""

    def __init__(self, calls=None):
        self.calls = calls if calls is not None else []

    def __len__(self):
        return SIZE

    def __getitem__(self, index):
        self.calls.append(index)
        return torch.tensor([index, torch.rand(()).item()])


class NumberStream(IterableDataset):
    def __init__(self, calls=None):
        self.numbers = Numbers(calls)

    def __iter__(self):
        return (self.numbers[i] for i in range(SIZE))


LEASED = {
    "shuffled": lambda calls=None: DataLoader(Numbers(calls), 3, shuffle=True),
    "in order": lambda calls=None: DataLoader(Numbers(calls), 4),
    "drop_last": lambda calls=None: DataLoader(Numbers(calls), 2, True, drop_last=True),
}
OWN = {
    "distributed": lambda calls=None: DataLoader(
        Numbers(calls), 2, sampler=DistributedSampler(range(SIZE), 2, 0, seed=3)
    ),
    "batches": lambda calls=None: DataLoader(Numbers(calls), batch_sampler=[[0, 1], [5], [2, 3]]),
    "iterable": lambda calls=None: DataLoader(NumberStream(calls), 2),
    "seeded": lambda calls=None: DataLoader(
        Numbers(calls), 2, sampler=Subset(range(SIZE), torch.Generator().manual_seed(3))
    ),
}
LOADERS = {**LEASED, **OWN}


class Script:
    """A script with one loader, in the only worker of a run."""

    def __init__(self, loader, requeue=True):
        self.worker = FakeRun([loader], requeue=requeue).workers[0]
        self.stream = self.worker.stream
        self.generators = Generators()

    def next(self):
        for _ in range(3):  # perhaps the next pass
            try:
                return self.worker.next().tolist()
            except StopIteration:
                continue
        raise AssertionError("the loader is empty")

    def train(self, fates):
        """Return the batches, one for each fate."""
        found = []
        for fate in fates:
            found.append(self.next())
            self.worker.step(fate)
            self.generators.read()
        return found

    def follow(self, other):
        """Continue where the other script is, with its random numbers."""
        self.stream.move_to(other.stream.bookmark(), other.generators.remembered().restore)
        return self


def samples(found):
    return [int(number) for batch in found for number, _ in batch]


# --------------------------------------------------------------------------- the worker's own order


def train_in_parts(kind, parts, requeue=True):
    """Return the batches of a run that is restarted after each part."""
    torch.manual_seed(0)
    script = Script(OWN[kind](), requeue)
    found = script.train(parts[0])
    for fates in parts[1:]:
        torch.rand(3)  # a script may draw numbers before it trains
        script = Script(OWN[kind](), requeue).follow(script)
        found += script.train(fates)
    return found


def parts_of(fates, size=2):
    return st.lists(st.lists(fates, min_size=1, max_size=size), min_size=2, max_size=2)


@settings(unhurried, max_examples=40)
@given(st.sampled_from([*OWN]), parts_of(st.sampled_from(FATES)), st.booleans())
def test_resumed_pass_sees_the_same_samples_as_an_uninterrupted_one(kind, parts, requeue):
    """Batches to hand out again come first, whatever the fates were."""
    if kind == "batches":
        parts = [parts[0][:1], parts[1][:1]]  # it has three
    whole = train_in_parts(kind, [[*chain(*parts)]], requeue)
    assert samples(train_in_parts(kind, parts, requeue)) == samples(whole)


@pytest.mark.parametrize("kind", OWN)
def test_batches_of_a_pending_gradient_come_again(kind):
    """A gradient is accumulated over two batches, and the server is lost before the step."""
    script = Script(OWN[kind]())
    script.train([Fate.ACCEPTED])
    waiting = []
    for _ in range(2):
        waiting.append(script.next())
        script.worker.batches.touch(0)
    script.generators.read()
    assert script.stream.bookmark() == Bookmark(0, 3, ((0, 1), (0, 2)))
    follower = Script(OWN[kind]()).follow(script)
    assert samples(follower.train([Fate.ACCEPTED] * 2)) == samples(waiting)


@pytest.mark.parametrize("kind", OWN)
def test_prefetched_batch_comes_again(kind):
    script = Script(OWN[kind]())
    script.train([Fate.ACCEPTED])
    late = script.next()
    script.worker.batches.touch(0)
    ahead = script.next()
    script.worker.batches.settle(0, Fate.LATE)
    script.generators.read()
    assert script.stream.bookmark() == Bookmark(0, 3, ((0, 1), (0, 2)))
    follower = Script(OWN[kind]()).follow(script)
    assert samples(follower.train([Fate.ACCEPTED] * 2)) == samples([late, ahead])


@pytest.mark.parametrize("kind", OWN)
def test_pass_that_has_begun_cannot_go_back(kind):
    calls = []
    script = Script(OWN[kind]())
    assert script.stream.can_go_back
    script.train([Fate.ACCEPTED])
    assert not script.stream.can_go_back
    script.stream.move_to(Bookmark(0, 0), lambda: calls.append("callback"))
    assert script.stream.bookmark() == Bookmark(0, 1)
    script.train([Fate.ACCEPTED])
    assert calls == []


@pytest.mark.parametrize("bookmark", [Bookmark(0, 0), Bookmark(0, 2), Bookmark(0, 2, ((0, 1),))])
@pytest.mark.parametrize("kind", OWN)
def test_callback_runs_just_before_the_first_batch_that_is_new(kind, bookmark):
    calls = []
    script = Script(OWN[kind](calls))
    script.stream.move_to(bookmark, lambda: calls.append("callback"))
    assert calls == []
    assert script.stream.bookmark() == bookmark
    first = samples([script.next()])
    assert calls.count("callback") == 1
    after = calls[calls.index("callback") + 1 :]
    assert after == ([] if bookmark.again else first)


def test_loader_is_repeated_if_others_are_slower():
    """The epoch of the run decides when a pass ends."""
    loader = DataLoader(range(4), 2, sampler=Subset([0, 1, 2, 3]))
    source = OwnSource(loader, 4, lambda: 0)
    source.begin_pass()
    found = [source.next_batch().value.tolist() for _ in range(4)]
    assert sorted(chain(*found[:2])) == sorted(chain(*found[2:])) == [0, 1, 2, 3]


def test_set_epoch_of_a_sampler_is_called_for_each_pass_over_the_loader():
    loader = OWN["distributed"]()
    called = []
    loader.sampler.set_epoch = called.append
    source = OwnSource(loader, 4, lambda: 0)
    for _ in range(2):
        source.begin_pass()
        source.next_batch()
        source.end_pass()
    assert called == [0, 1]


def test_pass_for_a_script_that_only_looks_is_not_repeated():
    source = OwnSource(DataLoader(range(4), 2, sampler=Subset([0, 1, 2, 3])), 4, lambda: 0)
    source.begin_pass()
    assert source.next_to_look_at([]) is not None
    assert len(list(source.rest(None, []))) == 1
    assert source.next_to_look_at([]) is None
    source.end_pass()
    assert list(source.rest(None, [])) == []


# ------------------------------------------------------------------------------------------- leases


class Counter:
    """Leases numbers in order."""

    def __init__(self):
        self.following = 0
        self.returned = []
        self.is_over = False

    def lease(self, stream):
        self.following += 1
        return None if self.is_over else (self.following - 1, (0,))

    def return_batches(self, use, *, skipped):
        self.returned.append((use.numbers, skipped))


def leased(kind, calls=None):
    lessor = Counter()
    leases = HeldLeases(1, lessor)
    loader = LEASED[kind](calls)
    order = order_of(loader)
    return LeasedSource(with_shared_order(loader, order, 5), order, 0, leases), leases, lessor


@pytest.mark.parametrize("kind", LEASED)
def test_leased_batches_have_the_samples_of_their_numbers(kind):
    source, _, _ = leased(kind)
    source.begin_pass()
    sampler = source._loader.batch_sampler
    for number in range(9):
        batch = source.next_batch()
        assert (batch.number, batch.samples) == (number, len(batch.value))
        assert [int(index) for index, _ in batch.value] == sampler.samples(number)


def test_leased_source_ends_with_the_run():
    source, _, lessor = leased("shuffled")
    source.begin_pass()
    lessor.is_over = True
    assert source.next_batch() is None


def test_batches_are_returned_by_their_numbers():
    source, _, lessor = leased("shuffled")
    source.begin_pass()
    batches = [source.next_batch() for _ in range(3)]
    source.repeat(batches[:1])
    source.skip(batches[1:])
    source.repeat([])
    assert lessor.returned == [((0,), False), ((1, 2), True)]


def test_batches_of_void_leases_are_not_returned():
    source, leases, lessor = leased("shuffled")
    source.begin_pass()
    batch = source.next_batch()
    leases.forget()
    source.repeat([batch])
    source.skip([batch])
    source.put_back([batch])
    assert lessor.returned == []
    assert source.next_batch().number == 1


def test_pass_begins_anew_if_the_leases_become_void_while_it_waits():
    """The server was lost, and the next one has answered."""
    source, leases, lessor = leased("shuffled")
    source.begin_pass()
    source.next_batch()
    plain = lessor.lease

    def lose(stream):
        leases.forget()
        lessor.lease = plain
        return plain(stream)

    lessor.lease = lose
    batch = source.next_batch()
    assert (batch.number, batch.generation) == (1, leases.generation)


@pytest.mark.parametrize("kind", LEASED)
@pytest.mark.parametrize("batches", [0, 1])
def test_generators_are_restored_before_the_first_leased_batch(kind, batches):
    calls = []
    source, _, _ = leased(kind, calls)
    assert source.can_go_back()
    source.move_to(Bookmark(0, batches), lambda: calls.append("callback"))
    assert source.bookmark([]) == Bookmark(0, batches)
    batch = source.next_batch()
    assert calls == ["callback", *(int(index) for index, _ in batch.value)]
    assert source.bookmark([batch]) == Bookmark(0, 1)
    source.end_pass()
    assert source.bookmark([]) == Bookmark(0, 0)


def test_leased_batches_draw_the_same_random_numbers_after_a_restore():
    torch.manual_seed(0)
    script = Script(LEASED["shuffled"]())
    script.train([Fate.ACCEPTED])
    bookmark, remembered = script.stream.bookmark(), script.generators.remembered()
    plain = script.worker.run.book.plain()
    expected = script.train([Fate.ACCEPTED] * 2)
    follower = Script(LEASED["shuffled"]())
    follower.worker.run.book.restore(plain)
    follower.worker.leases.forget()
    follower.worker.receive([1])
    follower.stream.move_to(bookmark, remembered.restore)
    torch.rand(4)
    assert follower.train([Fate.ACCEPTED] * 2) == expected


def test_samples_of_a_batch_are_those_of_the_order():
    """A collate function may put another dimension first, such as the time."""
    loader = DataLoader(Numbers(), 4, collate_fn=lambda rows: torch.stack(rows).t())
    order = order_of(loader)
    shared = with_shared_order(loader, order, 5)
    source = LeasedSource(shared, order, 0, HeldLeases(1, Counter()))
    source.begin_pass()
    batch = source.next_batch()
    assert (tuple(batch.value.shape), batch.samples) == ((2, 4), 4)
