# SPDX-License-Identifier: BSD-3-Clause
"""Adding up what the workers gave to an update.

A `Piece` is an accepted gradient that still lies in its worker's slot. Pieces wait there until the
update is made, and are then added up in the order of their workers, block by block, so that each
slot is read once and the sum is scaled and measured while it is in the cache. Where a worker is to
go on before that, its piece is added to an accumulator at once.

The first piece has weight 1 and the others are weighted against it: with equal samples nothing is
multiplied, and two halves of a batch add up to the very bits of the whole.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from paceline.run.layout import Views

__all__ = ["Making", "Piece", "Sum", "square"]

BLOCK = 1 << 18  # numbers that are added up at a time; as many as stay in a cache of 1 MB


@dataclass(frozen=True)
class Piece:
    """An accepted gradient in its slot."""

    worker: int
    optimizer: int
    samples: int
    scale: float  # what the rule makes of its staleness
    unused: frozenset[int]  # parameters that it has no gradient for
    slot: Views


class Sum:
    """A weighted average in the making."""

    def __init__(
        self, select: Callable[[Views], list[Tensor]], accumulator: Callable[[], Views]
    ) -> None:
        """`select`: what of a region is averaged. `accumulator`: where to, if it is needed."""
        self._select = select
        self._accumulator = accumulator
        self._waiting: list[tuple[int, Views, float]] = []  # worker, where it lies, weight
        self._into: Views | None = None  # not None iff something was added
        self._first = 0.0  # the weight of what was added first
        self._samples = 0

    def give(self, worker: int, slot: Views, samples: int, scale: float = 1.0) -> None:
        """Take this in; it stays where it lies until `add` or `average`."""
        self._waiting.append((worker, slot, samples * scale))
        self._samples += samples

    def add(self, worker: int) -> None:
        """Where this lies is needed: add it now."""
        for piece in [piece for piece in self._waiting if piece[0] == worker]:
            self._waiting.remove(piece)
            _, slot, weight = piece
            if self._into is None:
                self._into, self._first = self._accumulator(), weight
                for flat, one in zip(self._select(self._into), self._select(slot), strict=True):
                    flat.copy_(one)
            else:
                for flat, one in zip(self._select(self._into), self._select(slot), strict=True):
                    flat.add_(one, alpha=weight / self._first)

    def average(self) -> tuple[Views, float]:
        """Where the average lies now, and its squared norm."""
        self._waiting.sort(key=lambda piece: piece[0])
        added = self._into is not None
        if not added and len(self._waiting) == 1 and self._waiting[0][2] == self._samples:
            slot = self._waiting[0][1]
            return slot, sum(map(square, self._select(slot)))
        into = self._into if self._into is not None else self._accumulator()
        first = self._first if added else self._waiting[0][2]
        ratios = [weight / first for _, _, weight in self._waiting]
        sq_norm = 0.0
        for i, flat in enumerate(self._select(into)):
            given = [_blocks(self._select(slot)[i]) for _, slot, _ in self._waiting]
            for out, *parts in zip(_blocks(flat), *given, strict=True):
                _add_up(out, parts, ratios, added)
                out.mul_(first / self._samples)
                sq_norm += square(out)
        return into, sq_norm


def _blocks(flat: Tensor) -> Sequence[Tensor]:
    return torch.split(flat, BLOCK) if flat.numel() > BLOCK else (flat,)


def _add_up(out: Tensor, parts: list[Tensor], ratios: list[float], added: bool) -> None:
    """Sum the parts, in their order, into `out`, or onto what was added to it before."""
    begin = 0
    if not added and len(parts) > 1:
        torch.add(parts[0], parts[1], alpha=ratios[1], out=out)
        begin = 2
    elif not added:
        out.copy_(parts[0])
        begin = 1
    for part, ratio in zip(parts[begin:], ratios[begin:], strict=True):
        out.add_(part, alpha=ratio)


def square(flat: Tensor) -> float:
    """The squared norm of a flat tensor; not finite if any number in it is not."""
    if flat.dtype in (torch.float32, torch.float64):
        return float(torch.dot(flat, flat))
    return float(torch.linalg.vector_norm(flat, dtype=torch.float32)) ** 2


def _buffers_of(views: Views) -> list[Tensor]:
    return views.buffer_flats


@dataclass
class Making:
    """An update in the making."""

    accumulator: Callable[[], Views]
    sums: dict[int, Sum] = field(default_factory=dict)  # by optimizer
    unused: dict[int, frozenset[int]] = field(default_factory=dict)  # what nobody gave, likewise
    buffers: Sum | None = None
    counters: list[Tensor] = field(default_factory=list)
    counted_by: int | None = None  # the worker that the counters are from
    _memory: Views | None = None

    def give(self, piece: Piece) -> None:
        """Take a piece in."""
        index, slot = piece.optimizer, piece.slot
        if index not in self.sums:
            self.sums[index] = Sum(lambda views: views.flats[index], self._accumulate_in)
            self.unused[index] = piece.unused
        self.sums[index].give(piece.worker, slot, piece.samples, piece.scale)
        self.unused[index] &= piece.unused
        if slot.buffers:
            self.buffers = self.buffers or Sum(_buffers_of, self._accumulate_in)
            self.buffers.give(piece.worker, slot, piece.samples)
        if slot.counters and (self.counted_by is None or piece.worker < self.counted_by):
            self.counters = [flat.clone() for flat in slot.counter_flats]
            self.counted_by = piece.worker

    def add(self, worker: int) -> None:
        """The worker needs its slot: add what lies in it now."""
        for total in self.sums.values():
            total.add(worker)
        if self.buffers is not None:
            self.buffers.add(worker)

    def _accumulate_in(self) -> Views:
        if self._memory is None:
            self._memory = self.accumulator()
        return self._memory

    @property
    def memory(self) -> Views | None:
        """The accumulator, if one was needed; it can be used again when the update is made."""
        return self._memory
