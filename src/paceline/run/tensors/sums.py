# SPDX-License-Identifier: BSD-3-Clause
"""Adding up what the workers gave to an update.

A `SlotGradient` is an accepted gradient that is still in its worker's slot. They are added up
when the server has nothing else to do, at once where a worker is to go on and needs its slot, and
the rest when the update is made: in the order of their workers, block by block, so that each slot
is read once and the sum is scaled and measured while it is in the cache.

The first piece has weight 1 and the others are weighted against it: with equal samples nothing is
multiplied, and two halves of a batch add up to the very bits of the whole.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple

import torch
from torch import Tensor

from paceline.run.tensors.layout import Views

__all__ = ["PendingUpdate", "SlotGradient", "WeightedSum", "blocks", "square"]

LARGEST_SQUARE = 1e300  # the largest that we tell of, so that the sum of many stays finite
BLOCK = 1 << 18  # numbers that are added up at a time; as many as stay in a cache of 1 MB


class SlotGradient(NamedTuple):
    """An accepted gradient in its slot."""

    worker: int
    optimizer: int
    samples: int
    scale: float  # what the rule makes of its staleness
    unused: frozenset[int]  # parameters that it has no gradient for
    slot: Views


class WeightedSum:
    """A weighted average in the making."""

    def __init__(
        self, select: Callable[[Views], list[Tensor]], accumulator: Callable[[], Views]
    ) -> None:
        """`select`: what of a region is averaged. `accumulator`: where to, if it is needed."""
        self._select = select
        self._accumulator = accumulator
        self._waiting: dict[int, tuple[Views, float]] = {}  # by worker: where it lies, weight
        self._into: Views | None = None  # not None iff something was added
        self._first = 0.0  # the weight of what was added first
        self._samples = 0

    def give(self, worker: int, slot: Views, samples: int, scale: float = 1.0) -> None:
        """Take this in; it stays where it lies until `add` or `average`."""
        self._waiting[worker] = (slot, samples * scale)
        self._samples += samples

    def add(self, worker: int) -> None:
        """Where this lies is needed: add it now."""
        if worker in self._waiting:
            self._add([self._waiting.pop(worker)])

    def add_early(self, limit: float) -> None:
        """Add what workers below this number have given; one alone has nothing to be added to."""
        early = [worker for worker in sorted(self._waiting) if worker < limit]
        if len(early) > 1 or (early and self._into is not None):
            self._add([self._waiting.pop(worker) for worker in early])

    def average(self) -> tuple[Views, float]:
        """Where the average lies now, and its squared norm."""
        pieces = [self._waiting[worker] for worker in sorted(self._waiting)]
        if self._into is None and len(pieces) == 1 and pieces[0][1] == self._samples:
            slot = pieces[0][0]
            return slot, sum(map(square, self._select(slot)))
        sq_norm = 0.0
        for block in self._sum(pieces):
            block.mul_(self._first / self._samples)
            sq_norm += square(block)
        assert self._into is not None
        return self._into, sq_norm

    def _add(self, pieces: list[tuple[Views, float]]) -> None:
        for _ in self._sum(pieces):
            pass

    def _sum(self, pieces: list[tuple[Views, float]]) -> Iterator[Tensor]:
        """Add these up in this order, block by block; each block of the sum while it is at hand."""
        was_empty = self._into is None
        if self._into is None:
            self._into, self._first = self._accumulator(), pieces[0][1]
        ratios = [weight / self._first for _, weight in pieces]
        for i, total in enumerate(self._select(self._into)):
            given = [blocks(self._select(slot)[i]) for slot, _ in pieces]
            for out, *parts in zip(blocks(total), *given, strict=True):
                _add_up(out, parts, ratios, was_empty)
                yield out


def blocks(flat: Tensor) -> Sequence[Tensor]:
    """The parts of a flat tensor that are worked on one after the other."""
    return torch.split(flat, BLOCK) if flat.numel() > BLOCK else (flat,)


def _add_up(out: Tensor, parts: list[Tensor], ratios: list[float], was_empty: bool) -> None:
    """WeightedSum the parts, in their order, onto `out`, or into it if nothing was there before."""
    begin = 0
    if was_empty and len(parts) > 1:
        torch.add(parts[0], parts[1], alpha=ratios[1], out=out)
        begin = 2
    elif was_empty:
        out.copy_(parts[0])
        begin = 1
    for part, ratio in zip(parts[begin:], ratios[begin:], strict=True):
        out.add_(part, alpha=ratio)


def square(flat: Tensor) -> float:
    """The squared norm of a flat tensor: finite iff every number in it is, NaN iff one is NaN."""
    if flat.dtype in (torch.float32, torch.float64):
        found = float(torch.dot(flat, flat))
    else:
        found = float(torch.linalg.vector_norm(flat, dtype=torch.float32)) ** 2
    if found == inf and bool(flat.isfinite().all()):
        norm = float(torch.linalg.vector_norm(flat, dtype=torch.float64))
        return min(norm * norm, LARGEST_SQUARE)
    return found


def _buffers_of(views: Views) -> list[Tensor]:
    return views.buffer_flats


@dataclass
class PendingUpdate:
    """An update in the making."""

    accumulator: Callable[[], Views]
    sums: dict[int, WeightedSum] = field(default_factory=dict)  # by optimizer
    unused: dict[int, frozenset[int]] = field(default_factory=dict)  # what nobody gave, likewise
    buffers: WeightedSum | None = None
    counters: list[Tensor] = field(default_factory=list)
    counted_by: int | None = None  # the worker that the counters are from
    _memory: Views | None = None

    def give(self, piece: SlotGradient) -> None:
        """Take a piece in."""
        index, slot = piece.optimizer, piece.slot
        if index not in self.sums:
            self.sums[index] = WeightedSum(lambda views: views.flats[index], self._accumulate_in)
            self.unused[index] = piece.unused
        self.sums[index].give(piece.worker, slot, piece.samples, piece.scale)
        self.unused[index] &= piece.unused
        if slot.buffers:
            self.buffers = self.buffers or WeightedSum(_buffers_of, self._accumulate_in)
            self.buffers.give(piece.worker, slot, piece.samples)
        if slot.counters and (self.counted_by is None or piece.worker < self.counted_by):
            self.counters = [flat.clone() for flat in slot.counter_flats]
            self.counted_by = piece.worker

    def add(self, worker: int) -> None:
        """The worker needs its slot: add what lies in it now."""
        for total in self._all_sums():
            total.add(worker)

    def add_early(self, limit: float) -> None:
        """There is time: add what workers below this number have given."""
        for total in self._all_sums():
            total.add_early(limit)

    def _all_sums(self) -> list[WeightedSum]:
        return [*self.sums.values(), *([] if self.buffers is None else [self.buffers])]

    def _accumulate_in(self) -> Views:
        if self._memory is None:
            self._memory = self.accumulator()
        return self._memory

    @property
    def memory(self) -> Views | None:
        """The accumulator, if one was needed; it can be used again when the update is made."""
        return self._memory
