# SPDX-License-Identifier: BSD-3-Clause
"""The order of the samples that all workers share."""

from collections import OrderedDict, namedtuple
from itertools import chain

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from paceline.leases import BatchOrder
from paceline.run.worker.sampler import (
    ahead_of,
    count_samples,
    order_of,
    with_batches,
    with_shared_order,
)


class Endless(IterableDataset):
    """Has no length."""

    def __iter__(self):
        return iter(())


class Sized(Endless):
    """Has a length."""

    def __len__(self):
        return 9


class OwnRandom(RandomSampler):
    """May do anything."""


DATA = range(10)

LEASED = [
    (DataLoader(DATA, 4), BatchOrder(10, 3, 4, 2)),
    (DataLoader(DATA, 4, shuffle=True), BatchOrder(10, 3, 4, 2)),
    (DataLoader(DATA, 4, drop_last=True), BatchOrder(8, 2, 4, 4)),
    (DataLoader(DATA, 5), BatchOrder(10, 2, 5, 5)),
    (DataLoader(DATA, 50), BatchOrder(10, 1, 50, 10)),
    (DataLoader(DATA), BatchOrder(10, 10, 1, 1)),
    (DataLoader(DATA, 4, sampler=SequentialSampler(DATA)), BatchOrder(10, 3, 4, 2)),
    ([1, 2, 3], BatchOrder(3, 3)),
    ((1,), BatchOrder(1, 1)),
]
OWN = [
    (DataLoader(DATA, 4, sampler=SubsetRandomSampler(range(6)), drop_last=True), 4),
    (DataLoader(DATA, 4, sampler=SubsetRandomSampler([1, 2, 3])), 3),
    (DataLoader(DATA, 4, sampler=WeightedRandomSampler([1.0] * 10, 7)), 7),
    (DataLoader(DATA, 4, sampler=RandomSampler(DATA, replacement=True)), 10),
    (DataLoader(DATA, 4, sampler=RandomSampler(DATA, num_samples=25)), 25),
    (DataLoader(DATA, 4, sampler=OwnRandom(DATA)), 10),
    (DataLoader(DATA, 4, sampler=DistributedSampler(DATA, 2, 0)), 5),
    (DataLoader(DATA, batch_sampler=[[0, 1], [2]]), 10),
    (DataLoader(DATA, batch_sampler=BatchSampler(SubsetRandomSampler([1]), 1, False)), 10),
    (DataLoader(Sized(), 4), 9),
]
UNKNOWN = [
    [],
    (),
    iter(()),
    DataLoader(Endless()),
    DataLoader([]),
    DataLoader(DATA, batch_size=None),  # its samples may be whole batches
    DataLoader(DATA, 20, drop_last=True),  # not one batch
]


@pytest.mark.parametrize(("loader", "order"), LEASED)
def test_batches_of_torchs_own_order_are_leased(loader, order):
    assert order_of(loader) == order


@pytest.mark.parametrize(("loader", "samples"), OWN)
def test_order_that_the_script_provides_is_not_leased(loader, samples):
    order = order_of(loader)
    assert (order.samples, order.batches) == (samples, 0)


@pytest.mark.parametrize("loader", UNKNOWN)
def test_loader_without_a_length_has_no_epochs(loader):
    assert order_of(loader) is None


# ------------------------------------------------------------------------------------ shared order


def shared(loader, seed=0):
    return with_shared_order(loader, order_of(loader), seed)


def epoch_of(loader, epoch, seed=0):
    """Return the samples of all batches of an epoch."""
    sampler = shared(loader, seed).batch_sampler
    batches = order_of(loader).batches
    return [sampler.samples(epoch * batches + i) for i in range(batches)]


@pytest.mark.parametrize("options", [{}, {"shuffle": True}])
def test_every_epoch_has_every_sample_once(options):
    loader = DataLoader(DATA, 4, **options)
    for epoch in range(4):
        batches = epoch_of(loader, epoch)
        assert [len(batch) for batch in batches] == [4, 4, 2]
        assert sorted(chain(*batches)) == list(DATA)


def test_incomplete_batch_is_dropped_if_the_loader_drops_it():
    batches = epoch_of(DataLoader(DATA, 4, shuffle=True, drop_last=True), 3)
    assert [len(batch) for batch in batches] == [4, 4]
    assert len(set(chain(*batches))) == 8


def test_permutation_depends_on_the_seed_and_the_epoch():
    loader = DataLoader(range(50), 50, shuffle=True)
    found = {
        (seed, epoch): tuple(epoch_of(loader, epoch, seed)[0])
        for seed in range(4)
        for epoch in range(4)
    }
    assert len(set(found.values())) == 16
    for (seed, epoch), order in found.items():
        assert tuple(epoch_of(loader, epoch, seed)[0]) == order


def test_without_shuffling_every_epoch_is_in_order():
    loader = DataLoader(DATA, 4)
    assert epoch_of(loader, 0) == epoch_of(loader, 5) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


def test_batches_of_any_epoch_can_be_loaded_at_any_time():
    """A batch that was dropped long ago is leased again."""
    sampler = shared(DataLoader(DATA, 4, shuffle=True)).batch_sampler
    expected = {number: sampler.samples(number) for number in range(30)}
    for number in (29, 0, 14, 3, 28, 0, 7, 29):
        assert sampler.samples(number) == expected[number]


@pytest.mark.parametrize("processes", [0, 2])
def test_loader_loads_the_batches_that_it_takes(processes):
    loader = shared(DataLoader(DATA, 4, num_workers=processes))
    numbers = iter([2, 4, 0])
    assert list(loader) == [], "nothing was leased"
    loader.batch_sampler.take = lambda: next(numbers, None)
    assert [batch.tolist() for batch in loader] == [[8, 9], [4, 5, 6, 7], [0, 1, 2, 3]]


def test_loader_of_the_script_keeps_its_own_order():
    plain = DataLoader(DATA, 4)
    shared(plain)
    assert [batch.tolist() for batch in plain] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


def test_shared_loader_keeps_the_class_and_attributes_of_the_scripts():
    class Scaled(DataLoader):
        def __iter__(self):
            for x in super().__iter__():
                yield x * 10

    plain = Scaled(DATA, 4)
    plain.note = "kept"
    loader = shared(plain)
    assert (type(loader), loader.note) == (Scaled, "kept")
    numbers = iter([2])
    loader.batch_sampler.take = lambda: next(numbers, None)
    assert [batch.tolist() for batch in loader] == [[80, 90]]


def test_chosen_batches_can_be_loaded():
    plain = DataLoader(DATA, 4, shuffle=True)
    loader = shared(plain)
    expected = [loader.batch_sampler.samples(number) for number in (7, 2)]
    assert [batch.tolist() for batch in with_batches(plain, loader, [7, 2])] == expected
    assert len(list(plain)) == 3


@pytest.mark.parametrize(
    ("loader", "ahead"),
    [
        ([1], 1),
        (DataLoader(DATA), 1),
        (DataLoader(DATA, num_workers=1), 3),
        (DataLoader(DATA, num_workers=1, prefetch_factor=4), 5),
    ],
)
def test_worker_holds_what_its_loader_prefetches(loader, ahead):
    assert ahead_of(loader) == ahead


# ------------------------------------------------------------------------------------------- sizes

Pair = namedtuple("Pair", "x y")


@pytest.mark.parametrize(
    ("batch", "samples"),
    [
        (torch.ones(5, 2), 5),
        (torch.ones(0, 3), 0),
        (torch.tensor(1.0), 1),
        ([torch.tensor(1.0), torch.ones(5)], 1),
        ([1, 2, 3], 3),
        ((1, [4, 5]), 2),
        (["one", "two"], 2),
        (["a", torch.ones(4)], 4),
        ((torch.ones(5, 2), torch.ones(5)), 5),
        (Pair(torch.ones(6), torch.ones(2)), 6),
        ({"ids": torch.ones(3, 2), "label": 1}, 3),
        (OrderedDict(meta="x", ids=[1, 2]), 2),
        ({"a": {"b": (torch.ones(7, 1),)}}, 7),
        ([], 1),
        ({}, 1),
        ("words", 1),
        (b"bytes", 1),
        (7, 1),
        (None, 1),
        (object(), 1),
    ],
    ids=lambda value: "" if type(value) is object else str(value),
)
def test_batch_size_is_the_first_length_found_in_the_batch(batch, samples):
    assert count_samples(batch) == samples
