# SPDX-License-Identifier: BSD-3-Clause
"""The one order of a training set that all workers of a run share.

The order has one permutation per epoch, which depends only on the seed, the loader and the epoch.
So a batch is a number, and every worker can load the batch with any number. The server leases the
numbers. A loader with a sampler of the script's own, or over an iterable data set, is kept as it
is: each worker draws its own batches from it.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from copy import copy
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from paceline.leases import BatchOrder

__all__ = ["ahead_of", "count_samples", "order_of", "with_batches", "with_shared_order"]


class _SharedBatchSampler(BatchSampler):
    """Yields the samples of the batches that this worker holds."""

    def __init__(self, loader: Any, order: BatchOrder, seed: int) -> None:
        super().__init__(loader.sampler, loader.batch_size, loader.drop_last)
        self._size = len(loader.dataset)
        self._order = order
        self._shuffles = type(loader.sampler) is RandomSampler
        self._seed = seed
        self._permutations: dict[int, list[int]] = {}  # by epoch; the latest ones
        self.take: Callable[[], int | None] = lambda: None
        """Returns the number of the next batch; None: there is none."""

    def __iter__(self) -> Iterator[list[int]]:
        while (number := self.take()) is not None:
            yield self.samples(number)

    def samples(self, number: int) -> list[int]:
        """Return the samples of the batch with this number."""
        epoch, batch = divmod(number, self._order.batches)
        begin = batch * self.batch_size
        return self._permutation(epoch)[begin : begin + self._order.samples_in(number)]

    def _permutation(self, epoch: int) -> list[int]:
        if not self._shuffles:
            epoch = 0
        if epoch not in self._permutations:
            generator = torch.Generator()
            # Far apart, because similar seeds of a generator may give similar numbers.
            generator.manual_seed((self._seed + epoch * 0xD1B54A32D192ED03) % 2**63)
            order = torch.randperm(self._size, generator=generator).tolist()
            while len(self._permutations) >= 2:
                del self._permutations[min(self._permutations)]
            self._permutations[epoch] = order if self._shuffles else list(range(self._size))
        return self._permutations[epoch]


def order_of(loader: Any) -> BatchOrder | None:
    """Return the order of a loader's batches; None if the length of a pass is unknown."""
    if isinstance(loader, list | tuple):
        return BatchOrder(len(loader), len(loader)) if loader else None
    if _has_torch_order(loader):
        size, batch = len(loader.dataset), loader.batch_size
        batches = len(loader)
        last = batch if loader.drop_last else size - (batches - 1) * batch
        return BatchOrder((batches - 1) * batch + last, batches, batch, last)
    if isinstance(loader, DataLoader) and loader.batch_size is None and not loader.batch_sampler:
        return None  # a sample of the data set may be a whole batch
    data: Any  # may have no length
    for data in (getattr(loader, "sampler", None), getattr(loader, "dataset", None)):
        with suppress(TypeError):
            size = len(data)
            size -= size % loader.batch_size if getattr(loader, "drop_last", False) else 0
            return BatchOrder(size) if size else None
    return None


def _has_torch_order(loader: Any) -> bool:
    """Return whether a loader draws each sample once per pass, in an order that torch chooses."""
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return False
    sampler: Any = loader.sampler
    is_known = type(sampler) in (RandomSampler, SequentialSampler)
    if not is_known or loader.batch_size is None or type(loader.batch_sampler) is not BatchSampler:
        return False
    draws_all = not getattr(sampler, "replacement", False)
    dataset: Any = loader.dataset
    return draws_all and len(sampler) == len(dataset) and len(loader) > 0


def ahead_of(loader: Any) -> int:
    """Return how many batches a worker should hold: one, and those that the loader prefetches."""
    processes = getattr(loader, "num_workers", 0)
    return 1 + processes * (getattr(loader, "prefetch_factor", None) or 2) if processes else 1


def with_shared_order(loader: Any, order: BatchOrder, seed: int, worker: int = 0) -> Any:
    """Return a loader that loads the batches of the shared order; set `take` of its sampler."""
    shared = copy(loader)  # keeps its class, and everything else that the script has set
    batches = _SharedBatchSampler(loader, order, seed)
    # Each pass draws a seed for its loading processes. It must not come from torch's generator: a
    # run that goes back to an earlier version begins fewer passes, and must still repeat exactly.
    generator = torch.Generator()
    generator.manual_seed((seed + (worker + 1) * 0xA24BAED4963EE407) % 2**63)
    # A DataLoader refuses to have some of these assigned, so:
    own = {"batch_sampler": batches, "generator": generator, "in_order": True, "_iterator": None}
    shared.__dict__.update(own)
    return shared


def with_batches(loader: Any, shared: Any, numbers: Sequence[int]) -> Any:
    """Return a loader for just these batches; `shared`: from `with_shared_order`."""
    chosen = copy(loader)
    batches = [shared.batch_sampler.samples(number) for number in numbers]
    chosen.__dict__.update(batch_sampler=batches, _iterator=None)
    return chosen


def count_samples(value: Any) -> int:
    """Return how many samples a batch has: the first length found in it."""
    if isinstance(value, Tensor):
        return int(value.shape[0]) if value.dim() else 1
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        for item in value:
            if isinstance(item, Tensor | Mapping | list | tuple):
                return count_samples(item)
        return max(1, len(value))
    return 1
