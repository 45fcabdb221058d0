# SPDX-License-Identifier: BSD-3-Clause
"""Who computes on which batch: one order of the training data for all workers.

Theory of operation
    Each prepared loader is a *stream*. The batches of a stream form one endless order: batch i of
    epoch e has the number e · batches + i, and every worker can compute which samples it consists
    of. The book leases each number to one worker at a time:

        queued --deal--> leased --accept--> accepted --apply--> done
          ^                 |                                    ^
          +--- give back ---+--------------- skip ---------------+

    A batch whose gradient was dropped is given back and leased again, before new numbers. So is
    everything that a worker held when it left. Nothing is lost, and nothing is accepted twice.

    A stream's epoch ends with the update that brings the samples that are done to the next multiple
    of an epoch's samples, so the boundary of an epoch is a version. What isn't done by then stays
    in the order, and counts in the next epoch.

Rules for this module
    As in the core: no clock, no random numbers, no input or output. An illegal call raises
    `ProtocolError` and changes nothing.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Any, NamedTuple

from paceline.errors import ProtocolError

__all__ = ["BatchOrder", "LeaseBook", "Use"]

GIVERS_KEPT = 10_000  # batches of which the book remembers whose gradient counted
SAMPLES_MAX = 2**40  # in one gradient; a trace can't record numbers of more than 64 bits


@dataclass(frozen=True, slots=True)
class BatchOrder:
    """The size of one stream's epoch."""

    samples: int  # in an epoch
    batches: int = 0  # in an epoch; 0: the stream isn't leased, each worker draws its own batches
    batch_samples: int = 1  # in a batch
    last_samples: int = 1  # in the last batch of an epoch

    def samples_in(self, number: int) -> int:
        """Return how many samples the batch with this number has."""
        is_last = number % self.batches == self.batches - 1
        return self.last_samples if is_last else self.batch_samples


class Use(NamedTuple):
    """Batches of one stream: those that a gradient was computed on, or that a worker gets."""

    stream: int
    numbers: tuple[int, ...] = ()  # if the stream is leased
    samples: int = 0  # if it isn't: those that no accepted gradient was computed on before


@dataclass(slots=True)
class _Stream:
    """The state of one stream's order."""

    order: BatchOrder | None  # None: the stream has no epochs
    next: int = 0  # the first number that was never leased
    queued: list[int] = field(default_factory=list)  # a heap: numbers to lease again
    leased: dict[int, int] = field(default_factory=dict)  # worker by number
    accepted: dict[int, list[int]] = field(default_factory=dict)  # numbers by update
    pending: defaultdict[int, int] = field(default_factory=lambda: defaultdict(int))
    """Samples of batches without a number, by update."""

    givers: dict[int, int] = field(default_factory=dict)
    """The worker whose gradient counted, by number; of the last batches that were accepted."""

    done: int = 0  # samples

    @property
    def is_leased(self) -> bool:
        return self.order is not None and self.order.batches > 0

    def lease(self, worker: int) -> int:
        number = heappop(self.queued) if self.queued else self.next
        self.next = max(self.next, number + 1)
        self.leased[number] = worker
        return number

    def knows(self, worker: int, number: int) -> bool:
        """Return whether this worker holds the batch, or held it when its gradient was accepted."""
        return self.leased.get(number, self.givers.get(number)) == worker

    def finish(self, numbers: Iterable[int]) -> None:
        assert self.order is not None
        self.done += sum(map(self.order.samples_in, numbers))


class LeaseBook:
    """All streams of a run, and who holds which of their batches."""

    def __init__(self, orders: Sequence[BatchOrder | None]) -> None:
        """`orders`: one for each stream; None for one whose length is unknown."""
        self._streams = [_Stream(order) for order in orders]

    @property
    def done(self) -> tuple[int, ...]:
        """How many samples of each stream are done."""
        return tuple([stream.done for stream in self._streams])

    @property
    def epoch_samples(self) -> tuple[int | None, ...]:
        """How many samples an epoch of each stream has; None: unknown."""
        orders = [stream.order for stream in self._streams]
        return tuple([None if order is None else order.samples for order in orders])

    def deal(self, wanted: Mapping[int, Sequence[int]]) -> dict[int, list[Use]]:
        """Lease as many batches of each stream to each worker as it wants.

        They are dealt in turns, in the order of the workers. So if all workers want batches at the
        same time, as under `sync`, the batches of a step follow one another in the order.
        """
        dealt: dict[int, list[Use]] = {worker: [] for worker in sorted(wanted)}
        for i, stream in enumerate(self._streams):
            left = {worker: wanted[worker][i] for worker in dealt if i < len(wanted[worker])}
            hands: dict[int, list[int]] = {worker: [] for worker in left}
            while stream.is_leased and any(left.values()):
                for worker, count in left.items():
                    if count:
                        hands[worker].append(stream.lease(worker))
                        left[worker] = count - 1
            for worker, numbers in hands.items():
                if numbers:
                    dealt[worker].append(Use(i, tuple(numbers)))
        return dealt

    def lease(self, worker: int, stream: int) -> Use:
        """Lease one batch of this stream to a worker."""
        found = self._stream(stream)
        if not found.is_leased:
            raise ProtocolError(f"stream {stream} has no leases")
        return Use(stream, (found.lease(worker),))

    def check(self, worker: int, uses: Sequence[Use]) -> tuple[Use, ...]:
        """Raise ProtocolError if this worker can't have computed on these batches.

        Returns those of them that are known to be its own. After a restore, the book doesn't know
        any more who had a batch that was accepted before.
        """
        for use in uses:
            stream = self._stream(use.stream)
            if not 0 <= use.samples <= SAMPLES_MAX:
                raise ProtocolError(f"worker {worker} can't have used {use.samples} samples")
            for number in use.numbers:
                was_leased = stream.is_leased and 0 <= number < stream.next
                holder = stream.leased.get(number, stream.givers.get(number, worker))
                if not was_leased or holder != worker or number in stream.queued:
                    raise ProtocolError(f"worker {worker} doesn't hold batch {number}")
        return tuple([self._known(worker, use) for use in uses])

    def _known(self, worker: int, use: Use) -> Use:
        stream = self._streams[use.stream]
        if all(stream.knows(worker, number) for number in use.numbers):
            return use
        return use._replace(numbers=tuple(n for n in use.numbers if stream.knows(worker, n)))

    def accept(self, worker: int, uses: Iterable[Use], update: int) -> None:
        """Note that a gradient on these batches was accepted for an update.

        A batch that has been accepted before, for another optimizer, isn't counted again.
        """
        uses = list(uses)
        self.check(worker, uses)
        for use in uses:
            stream = self._stream(use.stream)
            new = [number for number in use.numbers if stream.leased.pop(number, None) is not None]
            if new:
                stream.accepted.setdefault(update, []).extend(new)
                stream.givers.update(dict.fromkeys(new, worker))
                while len(stream.givers) > GIVERS_KEPT:
                    del stream.givers[next(iter(stream.givers))]
            if use.samples and not stream.is_leased:
                stream.pending[update] += use.samples

    def apply(self, update: int) -> None:
        """Note that an update was made, so its batches are done."""
        for stream in self._streams:
            if numbers := stream.accepted.pop(update, None):
                stream.finish(numbers)
            stream.done += stream.pending.pop(update, 0)

    def skip(self, worker: int, use: Use) -> Use:
        """Note that the script skipped batches: they count as done; return those it did hold."""
        held = self._end_leases(worker, use)
        self._stream(use.stream).finish(held)
        return Use(use.stream, held)

    def give_back(self, worker: int, use: Use) -> None:
        """Queue batches whose gradients were dropped, to be leased again."""
        for number in self._end_leases(worker, use):
            heappush(self._stream(use.stream).queued, number)

    def release(self, worker: int) -> None:
        """Queue everything that a worker holds, because it has left."""
        for i, stream in enumerate(self._streams):
            held = [number for number, holder in stream.leased.items() if holder == worker]
            self.give_back(worker, Use(i, tuple(held)))

    def _end_leases(self, worker: int, use: Use) -> tuple[int, ...]:
        """End the leases of those batches that the worker holds.

        It may name others: a worker that was away doesn't know yet what it has lost.
        """
        leased = self._stream(use.stream).leased
        held = tuple([n for n in dict.fromkeys(use.numbers) if leased.get(n) == worker])
        for number in held:
            del leased[number]
        return held

    def _stream(self, number: int) -> _Stream:
        if not 0 <= number < len(self._streams):
            raise ProtocolError(f"there is no stream {number}")
        return self._streams[number]

    # ----------------------------------------------------------------------------- checkpoints

    def plain(self) -> list[Any]:
        """Return what a checkpoint keeps: what is done, and the numbers that aren't."""
        return [
            [stream.done, stream.next, sorted([*stream.queued, *stream.leased, *_all(stream)])]
            for stream in self._streams
        ]

    def restore(self, plain: Sequence[Any]) -> None:
        """Continue from a checkpoint: everything that wasn't done is leased again."""
        for stream, (done, next_number, undone) in zip(self._streams, plain, strict=False):
            stream.done, stream.next, stream.queued = done, next_number, sorted(undone)
            stream.leased.clear()
            stream.givers.clear()
            stream.accepted.clear()
            stream.pending.clear()


def _all(stream: _Stream) -> list[int]:
    return [number for numbers in stream.accepted.values() for number in numbers]
