# SPDX-License-Identifier: BSD-3-Clause
"""A worker's data: an endless stream that repeats batches whose gradients were dropped.

A stream has no epochs: it ends when the run has made its last update. While the script evaluates,
the stream is one pass over the script's own loader. A stream knows its position and can return to
an earlier one.

`Batches` tracks which batches each gradient was computed on. It learns that from the backward pass:
a gradient belongs to the batches that were the latest ones when it reached a parameter.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from paceline.core.events import Fate
from paceline.errors import SpecError
from paceline.run.worker.position import Bookmark
from paceline.run.worker.sampler import has_own_order, start_at

__all__ = ["Batch", "BatchStream", "Batches", "count_samples", "samples_in_epoch"]

LOOPS_AFTER_END_MAX = 100_000  # generous, because scripts loop over their remaining epochs


@dataclass(eq=False)
class Batch:
    """A batch that a loader has handed out."""

    value: Any
    samples: int
    position: tuple[int, int] | None = None  # (loop, batch); None: the script evaluates on it
    in_training: bool = True  # whether a model was in training mode when it was handed out
    is_used: bool = False  # a gradient was computed on it
    is_accepted: bool = False  # a gradient that was computed on it was accepted
    is_dropped: bool = False  # a gradient that was computed on it was dropped by the policy


class Batches:
    """Tracks which batches the gradients that weren't pushed yet were computed on."""

    def __init__(self, optimizers: int, models: Sequence[nn.Module] = ()) -> None:
        self._models = models
        self._latest: dict[int, Batch] = {}  # by stream; the batches that the script uses now
        self._is_settled = False  # a gradient was pushed since the last batch was handed out
        self._pending: list[dict[Batch, int]] = [{} for _ in range(optimizers)]  # to its stream
        self._open_passes = 0
        self.has_loader = False
        """Whether the script has prepared a loader."""
        self.has_begun = False
        """Whether a training pass was ever begun."""

    @property
    def is_in_pass(self) -> bool:
        """Whether a training pass has begun and not ended."""
        return self._open_passes > 0

    @contextmanager
    def training_pass(self) -> Iterator[None]:
        """Note that the script is in a training pass."""
        self._open_passes += 1
        self.has_begun = True
        try:
            yield
        finally:
            self._open_passes -= 1

    def is_training(self) -> bool:
        """Return whether a model is in training mode; True if there are no models to ask."""
        return not self._models or any(model.training for model in self._models)

    def take(self, stream: int, batch: Batch) -> None:
        """Note that a stream hands out this batch, which belongs to the next gradient."""
        if self._is_settled:
            self._latest.clear()
            self._is_settled = False
        batch.in_training = self.is_training()
        self._latest[stream] = batch

    def touch(self, optimizer: int) -> None:
        """Note that a gradient reached a parameter of this optimizer."""
        pending = self._pending[optimizer]
        for stream, batch in self._latest.items():
            if batch in pending:  # true for all parameters but the first
                continue
            # A batch that was handed out in the other mode was for an evaluation in between.
            if batch.in_training == self.is_training():
                pending[batch] = stream
                batch.is_used = True

    def touch_all(self) -> None:
        """Note that a backward pass was skipped; it might have reached every optimizer."""
        for optimizer in range(len(self._pending)):
            self.touch(optimizer)

    def hand_in(self, optimizer: int) -> None:
        """Note that a gradient is about to be pushed, even one that the script made itself."""
        if not self._pending[optimizer]:
            self.touch(optimizer)

    def discard(self, optimizer: int) -> None:
        """Forget the gradient of this optimizer, which the script has thrown away."""
        self._pending[optimizer].clear()

    def settle(self, optimizer: int, fate: Fate) -> None:
        """Record the fate of this optimizer's gradient in the batches it was computed on."""
        for batch in self._pending[optimizer]:
            batch.is_accepted |= fate is Fate.ACCEPTED
            # A non-finite gradient would be non-finite again, and the worker would be stuck.
            batch.is_dropped |= fate not in (Fate.ACCEPTED, Fate.NON_FINITE)
        self._pending[optimizer].clear()
        self._is_settled = True

    def samples(self, optimizer: int) -> int:
        """Return how many samples this optimizer's gradient was computed on; 1 if unknown."""
        by_stream: dict[int, int] = {}
        for batch, stream in self._pending[optimizer].items():
            by_stream[stream] = by_stream.get(stream, 0) + batch.samples
        return max([1, *by_stream.values()])

    def is_pending(self, batch: Batch) -> bool:
        """Return whether a gradient that wasn't pushed yet was computed on this batch."""
        return any(batch in pending for pending in self._pending)


class BatchStream:
    """What a script iterates over instead of its loader."""

    def __init__(
        self,
        plain: Any,
        own: Any,
        number: int,
        batches: Batches,
        is_over: Callable[[], bool],
        requeue: bool,
    ) -> None:
        """`plain` is the script's loader, `own` the same loader with the worker's own order."""
        self._plain = plain
        self._own = own
        self._number = number
        self._batches = batches
        self._is_over = is_over
        self._requeue = requeue
        self._again: deque[Batch] = deque()
        self._handed_out: list[Batch] = []
        self._loops_after_end = 0
        self._loops = 0  # that the script has begun
        self._next = Bookmark(0, 0)  # the next batch; `again`: batches to hand out before it
        self._move: tuple[Bookmark, Callable[[], None]] | None = None  # pending `move_to`
        batches.has_loader = True

    def __len__(self) -> int:
        return len(self._plain)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)

    def __iter__(self) -> Iterator[Any]:
        """Yield endless batches in training; in evaluation, one pass over the script's loader."""
        if not torch.is_grad_enabled() or not self._batches.is_training():
            is_used = False
            for value in self._plain:
                batch = self._hand_out(Batch(value, count_samples(value)))
                yield value
                is_used |= batch.is_used
                self._take_back()
            if not is_used:
                return
        with self._batches.training_pass():
            yield from self._train()

    def _train(self) -> Iterator[Any]:
        if self._is_over():
            self._loops_after_end += 1
            if self._loops_after_end > LOOPS_AFTER_END_MAX:
                raise SpecError(
                    "the run has ended, so its loaders are empty; leave your loop when "
                    "run.finished is true"
                )
        fresh: Iterator[Batch] | None = None
        unused = 0  # batches since the last one that a gradient was computed on
        while not self._is_over():
            if fresh is None or self._move is not None:
                fresh = self._fresh()
            self._take_back()
            if self._again:
                batch = self._again.popleft()
                batch.is_dropped = False
            else:
                found = next(fresh, None)
                if found is None or unused == self._pass_length():
                    return
                batch = found
            if self._is_over():
                return
            self._hand_out(batch)
            yield batch.value
            unused = 0 if batch.is_used else unused + 1

    def _hand_out(self, batch: Batch) -> Batch:
        self._batches.take(self._number, batch)
        self._handed_out.append(batch)
        return batch

    def _pass_length(self) -> int:
        """Return how many batches make a pass; -1 if that is unknown."""
        with suppress(TypeError):
            return len(self._plain)
        return -1

    def bookmark(self) -> Bookmark:
        """Return the position after all accepted gradients."""
        if self._move is not None:
            return self._move[0]
        latest = self._handed_out[-1:]
        again = [*self._again]
        again += [batch for batch in self._handed_out if self._comes_again(batch, batch in latest)]
        positions = (*(batch.position for batch in again if batch.position), *self._next.again)
        return Bookmark(self._next.loop, self._next.batches, positions)

    def _comes_again(self, batch: Batch, is_latest: bool) -> bool:
        if batch.is_accepted:
            return False
        is_ahead = is_latest and not batch.is_used  # the script fetched it in advance
        return is_ahead or self._batches.is_pending(batch) or (batch.is_dropped and self._requeue)

    @property
    def can_go_back(self) -> bool:
        """Whether `move_to` has an effect; after a loop began, only in the worker's own order."""
        return self._loops == 0 or has_own_order(self._own)

    def move_to(self, bookmark: Bookmark, before_first: Callable[[], None]) -> None:
        """Continue there; call `before_first` just before the first batch is loaded.

        A stream that can't go back continues where it is.
        """
        if self.can_go_back:
            self._move = (bookmark, before_first)
            self._again.clear()
            self._handed_out.clear()

    def _fresh(self) -> Iterator[Batch]:
        """Return the batches of a new loop, or from the bookmark that `move_to` has set."""
        bookmark, before_first = self._move or (Bookmark(self._loops, 0, self._next.again), None)
        self._move = None
        self._loops = bookmark.loop + 1
        if has_own_order(self._own):
            self._next = bookmark
            return self._in_own_order(bookmark, before_first)
        self._next = Bookmark(bookmark.loop, bookmark.batches)
        values = self._endless()
        found: dict[tuple[int, int], Batch] = {}
        for number, value in enumerate(islice(values, bookmark.batches)):
            position = (bookmark.loop, number)
            if position in bookmark.again:
                found[position] = Batch(value, count_samples(value), position)
        self._again += [found[position] for position in bookmark.again if position in found]
        if before_first is not None:
            before_first()
        return map(self._batch, values)

    def _in_own_order(
        self, bookmark: Bookmark, before_first: Callable[[], None] | None
    ) -> Iterator[Batch]:
        start_at(self._own, bookmark)
        if before_first is not None:
            before_first()
        before = torch.get_rng_state()
        values = iter(self._own)  # draws a seed
        if before_first is not None and bookmark != Bookmark(bookmark.loop, 0):
            torch.set_rng_state(before)  # the first pass of this loop already drew the seed
        yield from map(self._batch, values)

    def _batch(self, value: Any) -> Batch:
        """Return the value as the batch that comes next."""
        loop, number, again = self._next.loop, self._next.batches, self._next.again
        if again:
            position, *later = again
            self._next = Bookmark(loop, number, tuple(later))
        else:
            position = (loop, number)
            self._next = Bookmark(loop, number + 1)
        return Batch(value, count_samples(value), position)

    def _endless(self) -> Iterator[Any]:
        """Yield from the loader over and over; end if a whole pass is empty."""
        epoch = 0
        while True:
            set_epoch = getattr(getattr(self._own, "sampler", None), "set_epoch", None)
            if set_epoch is not None:
                set_epoch(epoch)
            is_empty = True
            for value in self._own:
                is_empty = False
                yield value
            if is_empty:
                return
            epoch += 1

    def _take_back(self) -> None:
        """Queue the batches whose gradients were dropped, to be handed out again."""
        pending = []
        for batch in self._handed_out:
            if batch.is_accepted:
                continue
            if self._batches.is_pending(batch):
                pending.append(batch)
            elif batch.is_dropped and self._requeue:
                self._again.append(batch)
        self._handed_out = pending


def samples_in_epoch(loader: Any) -> int | None:
    """Return how many samples one pass over the loader has; None if that is unknown."""
    if isinstance(loader, list | tuple):
        return sum(map(count_samples, loader))
    data: Any  # may have no length
    for data in (getattr(loader, "sampler", None), getattr(loader, "dataset", None)):
        with suppress(TypeError):
            return len(data)
    return None


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
