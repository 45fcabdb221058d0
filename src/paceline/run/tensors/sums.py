# SPDX-License-Identifier: BSD-3-Clause
"""Weighted averages of the gradients that were accepted for an update.

A `SlotGradient` is an accepted gradient that is still in its worker's slot. It is added to the sum
when the server is idle, when its worker needs the slot again, or at the latest when the update is
made. Gradients are added in the order of worker numbers, block by block, so that each slot is read
once and the sum is scaled and measured while it is in the cache.

The core decides how much each gradient counts. Its relative weight (samples x scale) is known when
it is accepted, its absolute weight only when the update is made. So gradients are added relative to
the first one, and the sum is multiplied at the end by the weight that the core decided for the
first. With equal samples, nothing is multiplied in between, and the gradients of two halves of a
batch add up to exactly the bits of the whole batch.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import inf, isclose, isfinite
from typing import NamedTuple

import torch
from torch import Tensor

from paceline.core.events import ApplyUpdate
from paceline.errors import InternalError
from paceline.run.tensors.layout import Views

__all__ = [
    "PendingUpdate",
    "SlotGradient",
    "Squares",
    "WeightedSum",
    "add_up",
    "blocks",
    "combined",
    "spoiled",
    "square",
]

LARGEST_SQUARE = 1e300  # cap on a squared norm, so that the sum of many stays finite
BLOCK = 1 << 18  # elements that are added at a time; they fit a cache of 1 MB


class SlotGradient(NamedTuple):
    """An accepted gradient in its slot."""

    worker: int
    optimizer: int
    samples: int
    scale: float  # the policy's factor for its staleness
    unused: frozenset[int]  # parameters without a gradient
    slot: Views | None  # None: it is part of a sum that was given for another worker
    host: int | None = None  # the host whose sum it is part of; None: it is alone in its slot


class _InSlot(NamedTuple):
    """A gradient that can still be looked at."""

    worker: int
    optimizer: int
    slot: Views


class _Waiting(NamedTuple):
    """A gradient that has not been added yet."""

    worker: int
    number: int  # among the contributions to the update
    slot: Views
    weight: float  # relative to the others


def _order(gradient: _Waiting) -> tuple[int, int]:
    return gradient.worker, gradient.number


class _Accumulator:
    """Memory for the sums of one update, allocated when it is first needed."""

    def __init__(self, allocate: Callable[[], Views]) -> None:
        self._allocate = allocate
        self.views: Views | None = None

    def get(self) -> Views:
        if self.views is None:
            self.views = self._allocate()
        return self.views


class WeightedSum:
    """The running sum of one kind of tensor over the contributions to an update."""

    def __init__(
        self, select: Callable[[Views], list[Tensor]], accumulator: Callable[[], Views]
    ) -> None:
        """`select`: the tensors to average. `accumulator`: memory for the sum, if it is needed."""
        self._select = select
        self._accumulator = accumulator
        self._waiting: list[_Waiting] = []
        self._relative: dict[int, float] = {}  # the weight of each contribution
        self._into: Views | None = None  # not None iff something was added
        self._first: int | None = None  # likewise: the contribution that was added first

    @property
    def numbers(self) -> list[int]:
        """The contributions that were given, in order."""
        return list(self._relative)

    def give(self, worker: int, number: int, slot: Views | None, weight: float) -> None:
        """Register a gradient, which stays in its slot until it is added.

        Without a slot, it is part of a sum that was given for another worker.
        """
        if slot is not None:
            self._waiting.append(_Waiting(worker, number, slot, weight))
        self._relative[number] = weight

    def add_worker(self, worker: int) -> None:
        """Add what is in this worker's slot, because the slot is needed."""
        mine = [one for one in self._waiting if one.worker == worker]
        if mine:
            self._waiting = [one for one in self._waiting if one.worker != worker]
            self._add(mine)

    def add_early(self, limit: float) -> None:
        """Add the gradients of workers below `limit`, if there is something to add them to."""
        early = sorted((one for one in self._waiting if one.worker < limit), key=_order)
        if len(early) > 1 or (early and self._into is not None):
            self._waiting = [one for one in self._waiting if one.worker >= limit]
            self._add(early)

    def average(self, weights: Sequence[float]) -> tuple[Views, list[list[float]]]:
        """Return where the average is, and the squared norm of each block, by flat tensor.

        `weights` are the decided ones, by contribution; raises InternalError if they don't have the
        ratios that the gradients were added with. A gradient that counts fully is its own average
        and stays in its slot.
        """
        rest = sorted(self._waiting, key=_order)
        self._waiting = []
        if self._into is None and len(rest) == 1 and weights[rest[0].number] == 1.0:
            slot = rest[0].slot
            return slot, [[square(block) for block in blocks(one)] for one in self._select(slot)]
        first = rest[0].number if self._first is None else self._first
        factor, first_weight = weights[first], self._relative[first]
        for number, weight in self._relative.items():
            if not isclose(weights[number] * first_weight, factor * weight, rel_tol=1e-9):
                raise InternalError(
                    f"weights {weights} don't match the samples and scales of the gradients"
                )
        squares = [[square(block.mul_(factor)) for block in done] for done in self._sum(rest)]
        assert self._into is not None
        return self._into, squares

    def _add(self, gradients: list[_Waiting]) -> None:
        for done in self._sum(gradients):
            for _ in done:
                pass

    def _sum(self, gradients: list[_Waiting]) -> Iterator[Iterator[Tensor]]:
        """Add these in this order, block by block.

        Yields, for each flat tensor of the sum, an iterator over its blocks as they are done.
        """
        was_empty = self._into is None
        if self._into is None:
            self._into = self._accumulator()
        if self._first is None:
            self._first = gradients[0].number
        ratios = [one.weight / self._relative[self._first] for one in gradients]
        for i, total in enumerate(self._select(self._into)):
            parts = [self._select(one.slot)[i] for one in gradients]
            yield _sum_blocks(total, parts, ratios, was_empty)


def blocks(flat: Tensor) -> Sequence[Tensor]:
    """Split a flat tensor into the parts that are worked on one after the other."""
    return torch.split(flat, BLOCK) if flat.numel() > BLOCK else (flat,)


def _sum_blocks(
    total: Tensor, parts: list[Tensor], ratios: list[float], was_empty: bool
) -> Iterator[Tensor]:
    """Add the parts to the total, block by block; yield each block of it when it is done."""
    for out, *terms in zip(blocks(total), *map(blocks, parts), strict=True):
        add_up(out, terms, ratios, was_empty)
        yield out


def add_up(out: Tensor, terms: list[Tensor], ratios: list[float], was_empty: bool) -> None:
    """Add the terms, in their order, to `out`; overwrite it if nothing was there before."""
    begin = 0
    if was_empty and len(terms) > 1:
        torch.add(terms[0], terms[1], alpha=ratios[1], out=out)
        begin = 2
    elif was_empty:
        out.copy_(terms[0])
        begin = 1
    for term, ratio in zip(terms[begin:], ratios[begin:], strict=True):
        out.add_(term, alpha=ratio)


def square(flat: Tensor) -> float:
    """Return the squared norm: finite iff every element is, NaN iff one is NaN."""
    if flat.dtype in (torch.float32, torch.float64):
        found = float(torch.dot(flat, flat))
    else:
        found = float(torch.linalg.vector_norm(flat, dtype=torch.float32)) ** 2
    if found == inf and bool(flat.isfinite().all()):
        norm = float(torch.linalg.vector_norm(flat, dtype=torch.float64))
        return min(norm * norm, LARGEST_SQUARE)
    return found


Squares = Mapping[int, Sequence[Sequence[float]]]
"""The squared norm of each block of a gradient, by optimizer and flat tensor."""


def combined(parts: Sequence[Squares]) -> float:
    """Return the squared norm of a gradient from those of its parts on all servers.

    The numbers are added in the order of the whole gradient, so they add up to the same bits on any
    number of servers.
    """
    total = 0.0
    for optimizer in parts[0]:
        for by_server in zip(*(part[optimizer] for part in parts), strict=True):
            for squares in by_server:
                for one in squares:
                    total += one
    return total


def spoiled(now: Tensor, before: Tensor) -> Tensor:
    """Return which elements are NaN or infinite now, but were not before."""
    return before.isfinite() & ~now.isfinite()


def _is_finite(gradient: _InSlot) -> bool:
    return isfinite(sum(map(square, gradient.slot.flats[gradient.optimizer])))


def _buffers_of(views: Views) -> list[Tensor]:
    return views.buffer_flats


class PendingUpdate:
    """The gradients that were accepted for one update so far."""

    def __init__(self, allocate: Callable[[], Views]) -> None:
        self._accumulator = _Accumulator(allocate)
        self._accepted: list[tuple[int, int, float]] = []  # worker, samples and scale of each
        self._sums: dict[int, WeightedSum] = {}  # by optimizer
        self._buffers: WeightedSum | None = None
        self._in_slots: list[_InSlot] = []  # those whose slots aren't in use again
        self._bad: list[int] = []  # workers whose gradients weren't finite; see `add_worker`
        self._counted_by: int | None = None  # the worker that the counters are from
        self.unused: dict[int, frozenset[int]] = {}
        """By optimizer: the parameters that no contribution has a gradient for."""
        self.counters: list[Tensor] = []
        """Copies of the integer buffers of the lowest-numbered contributor."""

    @property
    def optimizers(self) -> list[int]:
        """The optimizers that this update has gradients for."""
        return list(self._sums)

    def contributions(self, optimizer: int) -> int:
        """Return how many gradients this update has for an optimizer."""
        return len(self._sums[optimizer].numbers)

    def workers(self, optimizer: int) -> list[int]:
        """Return the workers whose gradients for an optimizer were accepted; one may recur."""
        numbers = self._sums[optimizer].numbers if optimizer in self._sums else ()
        return [self._accepted[number][0] for number in numbers]

    def give(self, gradient: SlotGradient) -> None:
        """Register an accepted gradient, which stays in its slot until it is added."""
        optimizer, slot = gradient.optimizer, gradient.slot
        if optimizer not in self._sums:
            self._sums[optimizer] = WeightedSum(
                lambda views: views.flats[optimizer], self._accumulator.get
            )
            self.unused[optimizer] = gradient.unused
        number, weight = len(self._accepted), gradient.samples * gradient.scale
        self._sums[optimizer].give(gradient.worker, number, slot, weight)
        self.unused[optimizer] &= gradient.unused
        self._accepted.append((gradient.worker, gradient.samples, gradient.scale))
        if slot is not None and slot.buffers and self._buffers is None:
            self._buffers = WeightedSum(_buffers_of, self._accumulator.get)
        if self._buffers is not None:
            self._buffers.give(gradient.worker, number, slot, gradient.samples)
        if slot is None:
            return
        if slot.counters and (self._counted_by is None or gradient.worker < self._counted_by):
            self.counters = [flat.clone() for flat in slot.counter_flats]
            self._counted_by = gradient.worker
        if gradient.host is None:  # the agent of a host looks at each gradient before it adds it
            self._in_slots.append(_InSlot(gradient.worker, optimizer, slot))

    def add_worker(self, worker: int, *, check: bool = False) -> None:
        """Add what is in this worker's slot, because the slot is needed.

        With `check`, find out whether it is finite; otherwise that can't be found out later.
        """
        for total in self._all_sums():
            total.add_worker(worker)
        mine = [one for one in self._in_slots if one.worker == worker]
        self._in_slots = [one for one in self._in_slots if one.worker != worker]
        if check:
            self._bad += [one.worker for one in mine if not _is_finite(one)]

    def workers_with_bad_gradients(self) -> list[int]:
        """Return the workers whose gradients aren't finite, as far as can be seen."""
        in_slots = [one.worker for one in self._in_slots if not _is_finite(one)]
        return sorted({*self._bad, *in_slots})

    def workers_with_bad_buffers(self, before: list[Tensor]) -> list[int]:
        """Return the workers in whose slots buffers aren't finite that were `before`."""
        found = set()
        for one in self._in_slots:
            pairs = zip(one.slot.buffer_flats, before, strict=True)
            if any(bool(spoiled(now, old).any()) for now, old in pairs):
                found.add(one.worker)
        return sorted(found)

    def add_early(self, limit: float) -> None:
        """Add what workers below this number have given."""
        for total in self._all_sums():
            total.add_early(limit)

    def average(self, update: ApplyUpdate) -> dict[int, tuple[Views, list[list[float]]]]:
        """Return, by optimizer, where the averaged gradient is and the squares of its blocks.

        Policies that mix the turns of workers may mix optimizers in one update. The decided weights
        are then normalized among the contributions to each optimizer.

        Raises InternalError if the update wasn't decided for exactly the gradients registered here.
        """
        self._check(update)
        pairs = zip(update.weights, update.scales, strict=True)
        weights = [weight * scale for weight, scale in pairs]
        if len(self._sums) == 1:
            [(optimizer, total)] = self._sums.items()
            return {optimizer: total.average(weights)}
        averages = {}
        for optimizer, total in self._sums.items():
            share = sum(update.weights[i] for i in total.numbers)
            averages[optimizer] = total.average([weight / share for weight in weights])
        return averages

    def _check(self, update: ApplyUpdate) -> None:
        pairs = zip(update.contributions, update.scales, strict=True)
        decided = [(c.worker, c.samples, scale) for c, scale in pairs]
        if decided != self._accepted:
            raise InternalError(
                f"update {update.update} was decided for other gradients than were accepted: "
                f"expected (worker, samples, scale) {self._accepted}, got {decided}"
            )

    def average_buffers(self, update: ApplyUpdate) -> tuple[list[Tensor], float]:
        """Return the averaged buffers and their squared norm; none if the model has none."""
        if self._buffers is None:
            return [], 0.0
        views, squares = self._buffers.average(update.weights)
        return views.buffer_flats, combined([{0: squares}])

    def _all_sums(self) -> list[WeightedSum]:
        return [*self._sums.values(), *([] if self._buffers is None else [self._buffers])]

    @property
    def memory(self) -> Views | None:
        """The accumulator, if one was needed; free for another update when this one is made."""
        return self._accumulator.views
