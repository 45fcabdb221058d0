# SPDX-License-Identifier: BSD-3-Clause
"""The order in which a worker draws from a data set, and where it is in it.

A `DataLoader` that shuffles is made to draw from the whole data set in an order of the worker's
own; one that does not begins at a place of its own. A sampler that the script brings is kept. The
order follows from the seed, the worker, and how often the script has begun a loop over the loader,
so any place in it can be found again without what lies before it being loaded.
"""

from collections.abc import Iterator
from copy import copy
from itertools import islice
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
)

from paceline.run.worker.position import Bookmark

__all__ = ["begin_at", "has_own_order", "own_stream"]

_BEGINNING = Bookmark(0, 0)


class _OwnOrder(Sampler[int]):
    """All samples over and over, in an order of the worker's own."""

    def __init__(self, size: int, shuffle: bool, seed: int, worker: int, workers: int) -> None:
        self._size = size
        self._shuffle = shuffle
        self._begin = worker % workers * size // workers
        # As far apart as can be: neighbouring seeds of one generator may resemble each other.
        self._seed = (seed * 1_000_003 + worker) * 0x9E3779B97F4A7C15

    def __len__(self) -> int:
        return self._size  # of one pass: scripts ask for it

    def __iter__(self) -> Iterator[int]:
        return self.in_loop(0)

    def in_loop(self, number: int) -> Iterator[int]:
        """The order of the script's loop of that number."""
        generator = torch.Generator()
        generator.manual_seed((self._seed + number * 0xD1B54A32D192ED03) % 2**63)
        while True:
            if self._shuffle:
                yield from torch.randperm(self._size, generator=generator).tolist()
            else:
                yield from ((self._begin + i) % self._size for i in range(self._size))


class _OwnBatches(BatchSampler):
    """The same in batches, from any place on; first those that are to come again."""

    sampler: _OwnOrder

    def __init__(self, order: _OwnOrder, batch_size: int, drop_last: bool) -> None:
        super().__init__(order, batch_size, drop_last)
        self.begin_at(_BEGINNING)

    def begin_at(self, bookmark: Bookmark) -> None:
        """Let the next loop begin there."""
        self._bookmark = bookmark

    def __iter__(self) -> Iterator[list[int]]:
        bookmark = self._bookmark
        yield from map(self._find, bookmark.again)
        yield from islice(self._in_loop(bookmark.loop), bookmark.batches, None)

    def _in_loop(self, number: int) -> Iterator[list[int]]:
        samples = self.sampler.in_loop(number)
        while True:
            yield list(islice(samples, self.batch_size))

    def _find(self, place: tuple[int, int]) -> list[int]:
        number, batch = place
        return next(islice(self._in_loop(number), batch, None))


def own_stream(loader: Any, seed: int, worker: int, workers: int) -> Any:
    """The loader with an order of the worker's own, unless the script brings its own sampler."""
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return loader
    sampler = loader.sampler
    if type(sampler) not in (RandomSampler, SequentialSampler) or loader.batch_size is None:
        return loader
    dataset: Any = loader.dataset
    if not len(dataset) or getattr(sampler, "replacement", False):
        return loader
    shuffle = type(sampler) is RandomSampler
    order = _OwnOrder(len(dataset), shuffle, seed, worker, workers)
    batches = _OwnBatches(order, loader.batch_size, loader.drop_last)
    own = copy(loader)  # of its own class, with whatever else the script has given it
    own.__dict__.update(sampler=order, batch_sampler=batches)  # it refuses the plain way
    return own


def has_own_order(loader: Any) -> bool:
    """Whether the loader draws in an order that `own_stream` has given it."""
    return isinstance(getattr(loader, "batch_sampler", None), _OwnBatches)


def begin_at(loader: Any, bookmark: Bookmark) -> None:
    """Let the next loop over a loader with an order of its own begin there."""
    loader.batch_sampler.begin_at(bookmark)
