# SPDX-License-Identifier: BSD-3-Clause
"""Where a stream gets its training batches from: leases, or the script's own loader.

`LeasedSource` loads the batches of the shared order whose numbers the server leases to this worker.
`OwnSource` is for a loader whose order belongs to the script: the worker draws from it by itself,
and hands out a batch again if its gradient was dropped.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from math import isfinite
from typing import Any, Protocol
from weakref import WeakMethod

from paceline.leases import BatchOrder
from paceline.run.worker.batches import Batch
from paceline.run.worker.leases import HeldLeases
from paceline.run.worker.position import Bookmark
from paceline.run.worker.sampler import count_samples, with_batches

__all__ = ["BatchSource", "LeasedSource", "OwnSource"]


_NOTHING = object()


class BatchSource(Protocol):
    """The training batches of one stream."""

    epoch_samples: float
    """The samples of an epoch; inf: a pass ends with the loader."""

    @property
    def done(self) -> int:
        """How many samples of this stream the run has used."""

    def begin_pass(self) -> None:
        """Prepare to load the batches of a pass."""

    def next_batch(self) -> Batch | None:
        """Return the next batch; None: the pass is over, or the run."""

    def next_to_look_at(self, seen: Sequence[Batch]) -> Batch | None:
        """Return the next batch for a script that may only evaluate, and has seen these."""

    def rest(self, plain: Any, seen: Sequence[Batch]) -> Iterator[Any]:
        """Return what is left of a plain pass for a script that evaluates, and has seen these."""

    def end_pass(self) -> None:
        """Drop what was loaded ahead."""

    def repeat(self, batches: list[Batch]) -> None:
        """Hand out batches again, here or in another worker: their gradients were dropped."""

    def skip(self, batches: list[Batch]) -> None:
        """Count batches as done: the script made no step with them."""

    def put_back(self, batches: list[Batch]) -> None:
        """Hand out batches again that the script has only looked at."""

    def bookmark(self, open_batches: Iterable[Batch]) -> Bookmark:
        """Return the position; `open_batches` must come again."""

    def can_go_back(self) -> bool:
        """Return whether `move_to` has an effect."""

    def move_to(self, bookmark: Bookmark, before_first: Callable[[], None]) -> None:
        """Continue there; call `before_first` just before the first batch is loaded."""


class LeasedSource:
    """Batches of the shared order."""

    def __init__(self, loader: Any, order: BatchOrder, stream: int, leases: HeldLeases) -> None:
        """`loader`: from `with_shared_order`, or a list of batches."""
        self.epoch_samples: float = order.samples
        self._loader = loader
        self._order = order
        self._batches = order.batches
        self._stream = stream
        self._leases = leases
        self._values: Iterator[Any] | None = None
        self._pulled: deque[int] = deque()  # numbers whose batches are being loaded
        self._generation = leases.generation
        self._move: tuple[Bookmark, Callable[[], None]] | None = None  # pending `move_to`
        self._is_list = isinstance(loader, list | tuple)
        if not self._is_list:
            take = WeakMethod(self._take)  # the processes of a loader end when it is dropped
            loader.batch_sampler.take = lambda: source() if (source := take()) else None

    @property
    def done(self) -> int:
        """How many samples of this stream the run has used."""
        return self._leases.done[self._stream]

    def _take(self) -> int | None:
        number = self._leases.take(self._stream)
        if number is None:
            return None
        if self._generation != self._leases.generation:  # all leases but this one are void
            self._leases.put_back(self._stream, [number])
            return None
        self._pulled.append(number)
        return number

    def begin_pass(self) -> None:
        """Prepare to load the batches of a pass."""
        self.end_pass()  # the script may not have left an earlier one
        self._generation = self._leases.generation
        bookmark, before_first = self._move or (Bookmark(0, 0), None)
        self._move = None
        if before_first is not None and not bookmark.batches:
            before_first()
        # iter() of a DataLoader draws a random seed.
        self._values = self._indexed() if self._is_list else iter(self._loader)
        if before_first is not None and bookmark.batches:
            before_first()  # the pass had begun, and drawn its seed, before this position

    def _indexed(self) -> Iterator[Any]:
        while (number := self._take()) is not None:
            yield self._loader[number % len(self._loader)]

    def next_batch(self) -> Batch | None:
        """Return the next batch; None: the run is over."""
        while True:
            is_void = self._generation != self._leases.generation  # what was loaded ahead
            if is_void or self._values is None or self._move is not None:
                self.begin_pass()
            assert self._values is not None
            value = next(self._values, _NOTHING)
            if self._generation == self._leases.generation:
                break
        if value is _NOTHING:
            return None
        number, generation = self._pulled.popleft(), self._generation
        # The first dimension of a batch need not be that of its samples. In a list, it is all
        # there is.
        samples = count_samples(value) if self._is_list else self._order.samples_in(number)
        return Batch(value, samples, number=number, generation=generation)

    def next_to_look_at(self, seen: Sequence[Batch]) -> Batch | None:
        """Return the next batch of the same epoch; None: others have the rest of it."""
        epoch, in_epoch = self._seen(seen)
        found = self.next_batch() if len(in_epoch) < self._batches else None
        if found is None or found.number is None or found.number // self._batches == epoch:
            return found
        self.put_back([found])
        return None

    def _seen(self, seen: Sequence[Batch]) -> tuple[int, set[int]]:
        """Return the epoch of these batches, and which ones of the epoch they are."""
        numbers = [batch.number for batch in seen if batch.number is not None]
        epoch = numbers[0] // self._batches if numbers else self.done // self._order.samples
        return epoch, {number % self._batches for number in numbers}

    def rest(self, plain: Any, seen: Sequence[Batch]) -> Iterator[Any]:
        """Return the batches of the script's own loader that differ from those seen."""
        epoch, in_epoch = self._seen(seen)
        if self._is_list:
            return (value for number, value in enumerate(plain) if number not in in_epoch)
        begin = epoch * self._batches
        numbers = [begin + number for number in range(self._batches) if number not in in_epoch]
        return iter(with_batches(plain, self._loader, numbers))

    def end_pass(self) -> None:
        """Drop what was loaded ahead, but keep the leases."""
        self._values = None
        if self._generation == self._leases.generation:
            self._leases.put_back(self._stream, list(self._pulled))
        self._pulled.clear()

    def repeat(self, batches: list[Batch]) -> None:
        """Let other workers have batches whose gradients were dropped."""
        if numbers := self._release(batches):
            self._leases.give_back(self._stream, numbers)

    def skip(self, batches: list[Batch]) -> None:
        """Count batches as done: the script made no step with them."""
        if numbers := self._release(batches):
            self._leases.skip(self._stream, numbers)

    def put_back(self, batches: list[Batch]) -> None:
        """Hand out batches again that the script has only looked at."""
        self._leases.put_back(self._stream, self._release(batches))

    def _release(self, batches: list[Batch]) -> list[int]:
        """Return the numbers of those batches that this worker still holds, and forget them.

        The script may have kept a batch, as `itertools.cycle(loader)` does, and compute on it again
        when another worker has it.
        """
        generation = self._leases.generation
        numbers = [batch.number for batch in batches if batch.generation == generation]
        for batch in batches:
            batch.number = None
        return [number for number in numbers if number is not None]

    def bookmark(self, open_batches: Iterable[Batch]) -> Bookmark:
        """Return the position: only whether a pass has begun; the server knows the rest."""
        del open_batches
        if self._move is not None:
            return self._move[0]
        return Bookmark(0, int(self._values is not None))

    def can_go_back(self) -> bool:
        """Return True: the server decides which batches come next."""
        return True

    def move_to(self, bookmark: Bookmark, before_first: Callable[[], None]) -> None:
        """Call `before_first` just before the next batch is loaded."""
        self._move = (bookmark, before_first)


class OwnSource:
    """Batches that this worker draws from the script's own loader."""

    def __init__(self, loader: Any, epoch_samples: float, get_done: Callable[[], int]) -> None:
        """`epoch_samples` is inf if the length of a pass is unknown."""
        self.epoch_samples = epoch_samples
        self._loader = loader
        self._get_done = get_done
        self._values: Iterator[Any] | None = None
        self._again: deque[Batch] = deque()
        self._passes = 0  # of the script
        self._rounds = 0  # over the loader
        self._next = Bookmark(0, 0)
        self._move: tuple[Bookmark, Callable[[], None]] | None = None

    @property
    def done(self) -> int:
        """How many samples of this stream the run has used."""
        return self._get_done()

    def begin_pass(self) -> None:
        """Begin a pass over the loader, or continue at the bookmark that `move_to` has set."""
        bookmark, before_first = self._move or (Bookmark(self._passes, 0), None)
        self._move = None
        self._passes = bookmark.loop + 1
        self._next = Bookmark(bookmark.loop, bookmark.batches)
        values = self._values = self._one_pass()
        found: dict[tuple[int, int], Batch] = {}
        for number, value in enumerate(islice(values, bookmark.batches)):
            position = (bookmark.loop, number)
            if position in bookmark.again:
                found[position] = Batch(value, count_samples(value), position=position)
        self._again += [found[position] for position in bookmark.again if position in found]
        if before_first is not None:
            before_first()

    def _one_pass(self) -> Iterator[Any]:
        set_epoch = getattr(getattr(self._loader, "sampler", None), "set_epoch", None)
        if set_epoch is not None:
            set_epoch(self._rounds)
        self._rounds += 1
        return iter(self._loader)

    def next_batch(self) -> Batch | None:
        """Return the next batch; None: the loader is exhausted."""
        return self._load(repeats=isfinite(self.epoch_samples))  # others may be faster or slower

    def _load(self, repeats: bool) -> Batch | None:
        if self._values is None or self._move is not None:
            self.begin_pass()
        assert self._values is not None
        if self._again:
            batch = self._again.popleft()
            batch.is_dropped = False
            return batch
        value = next(self._values, _NOTHING)
        if value is _NOTHING and repeats:
            self._values = self._one_pass()
            value = next(self._values, _NOTHING)
        if value is _NOTHING:
            return None
        position = (self._next.loop, self._next.batches)
        self._next = Bookmark(self._next.loop, self._next.batches + 1)
        return Batch(value, count_samples(value), position=position)

    def next_to_look_at(self, seen: Sequence[Batch]) -> Batch | None:
        """Return the next batch; None: the loader is exhausted."""
        del seen
        return self._load(repeats=False)

    def rest(self, plain: Any, seen: Sequence[Batch]) -> Iterator[Any]:
        """Return what is left of this pass over the loader."""
        del plain, seen
        return iter(()) if self._values is None else self._values

    def end_pass(self) -> None:
        """Drop what was loaded ahead."""
        self._values = None

    def repeat(self, batches: list[Batch]) -> None:
        """Hand out these batches again."""
        self._again += batches

    def skip(self, batches: list[Batch]) -> None:
        """Do nothing: the worker's own batches aren't counted until they are accepted."""

    def put_back(self, batches: list[Batch]) -> None:
        """Do nothing: a new pass over the loader begins at its beginning anyway."""

    def bookmark(self, open_batches: Iterable[Batch]) -> Bookmark:
        """Return the position."""
        if self._move is not None:
            return self._move[0]
        again = [*self._again, *open_batches]
        positions = tuple(batch.position for batch in again if batch.position is not None)
        return Bookmark(self._next.loop, self._next.batches, positions)

    def can_go_back(self) -> bool:
        """Return whether no pass has begun yet."""
        return self._passes == 0

    def move_to(self, bookmark: Bookmark, before_first: Callable[[], None]) -> None:
        """Continue there, if no pass has begun yet."""
        if self.can_go_back():
            self._move = (bookmark, before_first)
            self._again.clear()
