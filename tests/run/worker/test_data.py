# SPDX-License-Identifier: BSD-3-Clause
"""Which batches a gradient was computed on, and what becomes of them: without any process."""

from collections import OrderedDict, namedtuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler

from message_examples import unhurried
from paceline.core.events import Fate
from paceline.run.worker.data import Batch, Batches, BatchStream, count_samples
from paceline.run.worker.sampler import with_own_order

DROPPED = [Fate.LATE, Fate.STALE, Fate.CANCELLED, Fate.DUPLICATE]


class Script:
    """What a worker's script does with one stream and one optimizer."""

    def __init__(self, loader, requeue=True):
        self.batches = Batches(1)
        self.is_over = False
        self.stream = BatchStream(loader, loader, 0, self.batches, lambda: self.is_over, requeue)
        self.handed_out = iter(self.stream)

    def next(self):
        return next(self.handed_out)

    def step(self, fate, backward=True):
        """Compute on what was handed out last, push, and hear the fate."""
        if backward:
            self.batches.touch(0)
        self.batches.settle(0, fate)


Pair = namedtuple("Pair", "x y")


@pytest.mark.parametrize(
    ("batch", "samples"),
    [
        (torch.ones(0, 3), 0),
        ([torch.tensor(1.0), torch.ones(5)], 1),
        ([1, 2, 3], 3),
        ((1, [4, 5]), 2),
        (["a", torch.ones(4)], 4),
        (Pair(torch.ones(6), torch.ones(2)), 6),
        (OrderedDict(meta="x", ids=[1, 2]), 2),
        ({}, 1),
        ({"a": {"b": (torch.ones(7, 1),)}}, 7),
        (b"bytes", 1),
        (7, 1),
        (object(), 1),
    ],
    ids=lambda value: "" if type(value) is object else str(value),
)
def test_the_samples_of_a_batch_are_the_first_length_in_it(batch, samples):
    assert count_samples(batch) == samples


# ----------------------------------------------------------------------------------------- batches


def test_a_gradient_is_of_the_samples_of_all_batches_that_touched_it():
    batches = Batches(2)
    assert batches.samples(0) == 1  # where no loader tells
    for samples in (4, 3):
        batches.take(0, Batch("x", samples))
        batches.touch(0)
        batches.touch(0)  # each parameter tells
    assert (batches.samples(0), batches.samples(1)) == (7, 1)


def test_a_gradient_of_an_empty_batch_counts_as_one_of_a_sample():
    """The weights of an update must have a sum."""
    batches = Batches(1)
    batches.take(0, Batch("x", count_samples(torch.ones(0, 3))))
    batches.touch(0)
    assert batches.samples(0) == 1


def test_of_two_streams_the_larger_counts():
    """Pictures and their captions, say: the samples are the same ones."""
    batches = Batches(1)
    for stream, samples in ((0, 4), (1, 6)):
        batches.take(stream, Batch("x", samples))
    batches.touch(0)
    assert batches.samples(0) == 6


def test_what_is_thrown_away_does_not_count():
    batches, batch = Batches(1), Batch("x", 4)
    batches.take(0, batch)
    batches.touch(0)
    assert batches.is_pending(batch)
    batches.discard(0)
    assert not batches.is_pending(batch)
    assert batches.samples(0) == 1


def test_a_gradient_that_the_script_sets_itself_is_of_the_newest_batch():
    batches = Batches(1)
    batches.take(0, Batch("x", 4))
    batches.hand_in(0)
    assert batches.samples(0) == 4


# ------------------------------------------------------------------------------------------ stream


def test_a_loader_is_repeated_without_end():
    script = Script([1, 2, 3])
    found = []
    for _ in range(7):
        found.append(script.next())
        script.step(Fate.ACCEPTED)
    assert found == [1, 2, 3, 1, 2, 3, 1]


def test_a_stream_ends_when_the_run_is_over():
    script = Script([1, 2, 3])
    script.next()
    script.is_over = True
    assert list(script.handed_out) == []
    assert list(script.stream) == []


@pytest.mark.parametrize("loader", [[], iter([])])
def test_a_loader_that_gives_nothing_ends(loader):
    assert list(BatchStream(loader, loader, 0, Batches(1), lambda: False, requeue=True)) == []


def test_a_generator_ends_when_it_is_used_up():
    once = iter([1, 2])
    assert list(BatchStream(once, once, 0, Batches(1), lambda: False, requeue=True)) == [1, 2]


@pytest.mark.parametrize("fate", DROPPED)
def test_what_was_dropped_comes_again_before_anything_new(fate):
    script = Script([1, 2, 3])
    assert script.next() == 1
    script.step(fate)
    assert script.next() == 1
    script.step(Fate.ACCEPTED)
    assert script.next() == 2


@pytest.mark.parametrize(
    ("requeue", "fate", "backward"),
    [(False, Fate.LATE, True), (True, Fate.NON_FINITE, True), (True, Fate.LATE, False)],
    ids=["forgotten", "not finite", "not computed on"],
)
def test_what_need_not_come_again_does_not(requeue, fate, backward):
    script = Script([1, 2, 3], requeue)
    assert script.next() == 1
    script.step(fate, backward)
    assert script.next() == 2


def test_what_waits_for_its_step_does_not_come_again_meanwhile():
    """Gradients are accumulated over two batches, and both are dropped."""
    script = Script([1, 2, 3, 4])
    first = script.next()
    script.batches.touch(0)
    second = script.next()
    script.step(Fate.LATE)
    assert (first, second, script.next()) == (1, 2, 1)
    script.batches.touch(0)
    assert script.next() == 2
    script.step(Fate.ACCEPTED)
    assert script.next() == 3


def test_a_stream_passes_for_its_loader():
    loader = DataLoader(range(10), batch_size=4)
    stream = BatchStream(loader, loader, 0, Batches(1), lambda: False, requeue=True)
    assert (len(stream), stream.batch_size) == (3, 4)
    with pytest.raises(AttributeError):
        _ = stream.nonsense


@unhurried
@given(st.lists(st.sampled_from([Fate.ACCEPTED, *DROPPED]), max_size=40), st.integers(1, 5))
def test_every_batch_is_accepted_once_and_in_its_turn(fates, size):
    script = Script([*range(size)])
    accepted = []
    for fate in fates:
        value = script.next()
        script.step(fate)
        accepted += [value] if fate is Fate.ACCEPTED else []
    assert accepted == [i % size for i in range(len(accepted))]


# ----------------------------------------------------------------------------- an order of its own


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("workers", [1, 3, 20])
def test_every_worker_sees_every_sample_once_in_a_pass(shuffle, workers):
    firsts = set()
    for worker in range(workers):
        loader = with_own_order(DataLoader(range(12), 4, shuffle=shuffle), 0, worker, workers)
        batches = iter(loader)
        for _ in range(2):
            seen = torch.cat([next(batches) for _ in range(3)])
            assert sorted(seen.tolist()) == list(range(12))
        firsts.add(tuple(seen.tolist()))
    assert len(firsts) == (workers if shuffle else min(workers, 12))


def test_an_order_follows_from_the_seed_and_the_worker():
    def order(seed, worker):
        loader = with_own_order(DataLoader(range(50), 50, shuffle=True), seed, worker, 4)
        return tuple(next(iter(loader)).tolist())

    assert order(1, 2) == order(1, 2)
    assert len({order(seed, worker) for seed in range(5) for worker in range(5)}) == 25


@pytest.mark.parametrize(
    "loader",
    [
        [1, 2],
        DataLoader(range(4), batch_size=None),
        DataLoader(range(4), sampler=RandomSampler(range(4), replacement=True)),
        DataLoader(range(4), sampler=DistributedSampler(range(4), 2, 0)),
        DataLoader(range(4), batch_sampler=[[0, 1], [2, 3]]),
    ],
    ids=["a list", "no batches", "with replacement", "its own sampler", "its own batches"],
)
def test_what_a_script_brings_of_its_own_is_left_as_it_is(loader):
    assert with_own_order(loader, 0, 0, 2) is loader
