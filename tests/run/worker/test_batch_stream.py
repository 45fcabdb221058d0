# SPDX-License-Identifier: BSD-3-Clause
"""Batches and streams without processes: which batch went into which gradient, and comes again."""

from collections import OrderedDict, namedtuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from message_examples import unhurried
from paceline.core.events import Fate
from paceline.run.worker.batch_stream import Batch, Batches, BatchStream, count_samples

DROPPED = [Fate.LATE, Fate.STALE, Fate.CANCELLED, Fate.DUPLICATE]


class Script:
    """A worker's script with one stream and one optimizer."""

    def __init__(self, loader, requeue=True):
        self.batches = Batches(1)
        self.is_over = False
        self.stream = BatchStream(loader, loader, 0, self.batches, lambda: self.is_over, requeue)
        self.handed_out = iter(self.stream)

    def next(self):
        return next(self.handed_out)

    def step(self, fate, backward=True):
        """Compute on the latest batch, push, and receive this fate."""
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
def test_batch_size_is_the_first_length_found_in_the_batch(batch, samples):
    assert count_samples(batch) == samples


# ------------------------------------------------------------------------------------------ batches


def test_gradient_counts_the_samples_of_all_its_batches():
    batches = Batches(2)
    assert batches.samples(0) == 1  # no loader was used
    for samples in (4, 3):
        batches.take(0, Batch("x", samples))
        batches.touch(0)
        batches.touch(0)  # once per parameter
    assert (batches.samples(0), batches.samples(1)) == (7, 1)


def test_gradient_of_an_empty_batch_counts_as_one_sample():
    """Weights of an update must add up to more than zero."""
    batches = Batches(1)
    batches.take(0, Batch("x", count_samples(torch.ones(0, 3))))
    batches.touch(0)
    assert batches.samples(0) == 1


def test_of_two_streams_the_one_with_more_samples_counts():
    """They may hold parts of the same samples, such as images and captions."""
    batches = Batches(1)
    for stream, samples in ((0, 4), (1, 6)):
        batches.take(stream, Batch("x", samples))
    batches.touch(0)
    assert batches.samples(0) == 6


def test_discarded_gradient_does_not_count():
    batches, batch = Batches(1), Batch("x", 4)
    batches.take(0, batch)
    batches.touch(0)
    assert batches.is_pending(batch)
    batches.discard(0)
    assert not batches.is_pending(batch)
    assert batches.samples(0) == 1


def test_gradient_set_by_the_script_belongs_to_the_newest_batch():
    batches = Batches(1)
    batches.take(0, Batch("x", 4))
    batches.hand_in(0)
    assert batches.samples(0) == 4


# ------------------------------------------------------------------------------------------- stream


def test_stream_repeats_its_loader_endlessly():
    script = Script([1, 2, 3])
    found = []
    for _ in range(7):
        found.append(script.next())
        script.step(Fate.ACCEPTED)
    assert found == [1, 2, 3, 1, 2, 3, 1]


def test_stream_ends_when_the_run_is_over():
    script = Script([1, 2, 3])
    script.next()
    script.is_over = True
    assert list(script.handed_out) == []
    assert list(script.stream) == []


@pytest.mark.parametrize("loader", [[], iter([])])
def test_stream_of_an_empty_loader_ends(loader):
    assert list(BatchStream(loader, loader, 0, Batches(1), lambda: False, requeue=True)) == []


def test_stream_of_a_generator_ends_when_the_generator_does():
    once = iter([1, 2])
    assert list(BatchStream(once, once, 0, Batches(1), lambda: False, requeue=True)) == [1, 2]


@pytest.mark.parametrize("fate", DROPPED)
def test_dropped_batch_comes_again_before_any_new_one(fate):
    script = Script([1, 2, 3])
    assert script.next() == 1
    script.step(fate)
    assert script.next() == 1
    script.step(Fate.ACCEPTED)
    assert script.next() == 2


@pytest.mark.parametrize(
    ("requeue", "fate", "backward"),
    [(False, Fate.LATE, True), (True, Fate.NON_FINITE, True), (True, Fate.LATE, False)],
    ids=["no requeue", "non-finite", "not used"],
)
def test_batch_is_not_repeated_if_it_need_not_be(requeue, fate, backward):
    script = Script([1, 2, 3], requeue)
    assert script.next() == 1
    script.step(fate, backward)
    assert script.next() == 2


def test_batch_of_a_pending_gradient_does_not_come_again_yet():
    """A gradient is accumulated over two batches, and dropped."""
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


def test_training_pass_lasts_until_its_loop_ends():
    batches, loader = Batches(1), [1, 2]
    assert not batches.has_loader
    stream = BatchStream(loader, loader, 0, batches, lambda: False, requeue=True)
    assert (batches.has_loader, batches.has_begun, batches.is_in_pass) == (True, False, False)
    with torch.no_grad():
        assert list(stream) == loader
    assert not batches.has_begun
    for _ in stream:
        assert batches.is_in_pass
        break
    assert (batches.has_begun, batches.is_in_pass) == (True, False)


def test_stream_has_the_attributes_of_its_loader():
    loader = DataLoader(range(10), batch_size=4)
    stream = BatchStream(loader, loader, 0, Batches(1), lambda: False, requeue=True)
    assert (len(stream), stream.batch_size) == (3, 4)
    with pytest.raises(AttributeError):
        _ = stream.nonsense


@unhurried
@given(st.lists(st.sampled_from([Fate.ACCEPTED, *DROPPED]), max_size=40), st.integers(1, 5))
def test_every_batch_is_accepted_once_and_in_order(fates, size):
    script = Script([*range(size)])
    accepted = []
    for fate in fates:
        value = script.next()
        script.step(fate)
        accepted += [value] if fate is Fate.ACCEPTED else []
    assert accepted == [i % size for i in range(len(accepted))]
