# SPDX-License-Identifier: BSD-3-Clause
"""The order in which a worker draws samples from a data set.

In each worker, a `DataLoader` that shuffles uses a different order of the whole data set, and one
that doesn't shuffle begins at a different offset. A sampler that the script provides is kept. The
order depends only on the seed, the worker, and the number of the script's loop over the loader, so
any position in it can be found again without loading the batches before it.
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

__all__ = ["has_own_order", "start_at", "with_own_order"]

_BEGINNING = Bookmark(0, 0)


class _WorkerSampler(Sampler[int]):
    """Endless passes over all samples, in this worker's own order."""

    def __init__(self, size: int, shuffle: bool, seed: int, worker: int, workers: int) -> None:
        self._size = size
        self._shuffle = shuffle
        self._begin = worker % workers * size // workers
        # Far apart, because similar seeds of a generator may give similar numbers.
        self._seed = (seed * 1_000_003 + worker) * 0x9E3779B97F4A7C15

    def __len__(self) -> int:
        return self._size  # of one pass, which is what scripts ask for

    def __iter__(self) -> Iterator[int]:
        return self.in_loop(0)

    def in_loop(self, number: int) -> Iterator[int]:
        """Return the order for the script's loop with this number."""
        generator = torch.Generator()
        generator.manual_seed((self._seed + number * 0xD1B54A32D192ED03) % 2**63)
        while True:
            if self._shuffle:
                yield from torch.randperm(self._size, generator=generator).tolist()
            else:
                yield from ((self._begin + i) % self._size for i in range(self._size))


class _WorkerBatchSampler(BatchSampler):
    """The same order in batches, starting at any bookmark."""

    sampler: _WorkerSampler

    def __init__(self, sampler: _WorkerSampler, batch_size: int, drop_last: bool) -> None:
        super().__init__(sampler, batch_size, drop_last)
        self.start_at(_BEGINNING)

    def start_at(self, bookmark: Bookmark) -> None:
        """Start the next loop at this bookmark."""
        self._bookmark = bookmark

    def __iter__(self) -> Iterator[list[int]]:
        bookmark = self._bookmark
        yield from map(self._find, bookmark.again)
        yield from islice(self._in_loop(bookmark.loop), bookmark.batches, None)

    def _in_loop(self, number: int) -> Iterator[list[int]]:
        samples = self.sampler.in_loop(number)
        while True:
            yield list(islice(samples, self.batch_size))

    def _find(self, position: tuple[int, int]) -> list[int]:
        loop, batch = position
        return next(islice(self._in_loop(loop), batch, None))


def with_own_order(loader: Any, seed: int, worker: int, workers: int) -> Any:
    """Return the loader with the worker's own order, unless the script provides a sampler."""
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return loader
    sampler = loader.sampler
    if type(sampler) not in (RandomSampler, SequentialSampler) or loader.batch_size is None:
        return loader
    dataset: Any = loader.dataset
    if not len(dataset) or getattr(sampler, "replacement", False):
        return loader
    shuffle = type(sampler) is RandomSampler
    own_sampler = _WorkerSampler(len(dataset), shuffle, seed, worker, workers)
    batches = _WorkerBatchSampler(own_sampler, loader.batch_size, loader.drop_last)
    own = copy(loader)  # keeps its class, and everything else that the script has set
    # A DataLoader refuses to have these assigned, so:
    own.__dict__.update(sampler=own_sampler, batch_sampler=batches)
    return own


def has_own_order(loader: Any) -> bool:
    """Return whether `with_own_order` gave the loader its order."""
    return isinstance(getattr(loader, "batch_sampler", None), _WorkerBatchSampler)


def start_at(loader: Any, bookmark: Bookmark) -> None:
    """Start the next loop over a loader that has its own order at this bookmark."""
    loader.batch_sampler.start_at(bookmark)
