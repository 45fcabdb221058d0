# SPDX-License-Identifier: BSD-3-Clause
"""A worker's data: an endless stream of its own, in which dropped batches come again.

Streams have no epochs: one ends when the run has made its last update. Where nothing is trained, a
stream is the script's own loader, for one pass. A stream knows where it is, and can go there again.

`Batches` knows which batches went into which gradient. It learns that from the backward pass: what
was handed out last when a gradient touched a parameter is what it was computed on.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from paceline.core.events import Fate
from paceline.errors import SpecError
from paceline.run.worker.position import Bookmark
from paceline.run.worker.sampler import begin_at, has_own_order

__all__ = ["Batch", "BatchStream", "Batches", "count_samples", "samples_in_epoch"]

TOO_LATE_MAX = 100_000  # times that a loop may begin after the end; scripts have loops over epochs


@dataclass(eq=False)
class Batch:
    """What a loader handed out."""

    value: Any
    samples: int
    place: tuple[int, int] | None = None  # the script's loop, the batch in it; None: to evaluate on
    in_training: bool = True  # whether a model was, when it was handed out
    is_used: bool = False  # a gradient was computed on it
    is_accepted: bool = False  # a gradient that was computed on it was
    is_dropped: bool = False  # likewise, by the rule of the run


class Batches:
    """Which batches the gradients in the making were computed on."""

    def __init__(self, optimizers: int, models: Sequence[nn.Module] = ()) -> None:
        self._models = models
        self._latest: dict[int, Batch] = {}  # by stream; those that the script uses now
        self._is_settled = False  # a gradient was, since the last batch
        self._pending: list[dict[Batch, int]] = [{} for _ in range(optimizers)]  # their streams

    def is_training(self) -> bool:
        """Whether any model is in the mode for training; without a model, nobody can say."""
        return not self._models or any(model.training for model in self._models)

    def take(self, stream: int, batch: Batch) -> None:
        """A stream has handed this out; others count only if they do so for the same gradient."""
        if self._is_settled:
            self._latest.clear()
            self._is_settled = False
        batch.in_training = self.is_training()
        self._latest[stream] = batch

    def touch(self, optimizer: int) -> None:
        """A gradient of a parameter of this optimizer was computed."""
        pending = self._pending[optimizer]
        for stream, batch in self._latest.items():
            if batch in pending:  # as it is for all parameters but the first
                continue
            if batch.in_training == self.is_training():  # or it was evaluated on, meanwhile
                pending[batch] = stream
                batch.is_used = True

    def touch_all(self) -> None:
        """A gradient would have been computed, nobody knows of what, but was of no use any more."""
        for optimizer in range(len(self._pending)):
            self.touch(optimizer)

    def hand_in(self, optimizer: int) -> None:
        """The gradient for this optimizer is about to be pushed, and may be the script's own."""
        if not self._pending[optimizer]:
            self.touch(optimizer)

    def discard(self, optimizer: int) -> None:
        """What was computed for this optimizer was thrown away."""
        self._pending[optimizer].clear()

    def settle(self, optimizer: int, fate: Fate) -> None:
        """The gradient for this optimizer was pushed, and this became of it."""
        for batch in self._pending[optimizer]:
            batch.is_accepted |= fate is Fate.ACCEPTED
            # One that was not finite would not be so again, and keep its worker for ever.
            batch.is_dropped |= fate not in (Fate.ACCEPTED, Fate.NON_FINITE)
        self._pending[optimizer].clear()
        self._is_settled = True

    def samples(self, optimizer: int) -> int:
        """How many samples the gradient for this optimizer is of; 1 where there are none to see."""
        by_stream: dict[int, int] = {}
        for batch, stream in self._pending[optimizer].items():
            by_stream[stream] = by_stream.get(stream, 0) + batch.samples
        return max([1, *by_stream.values()])

    def is_pending(self, batch: Batch) -> bool:
        """Whether a gradient that was not pushed yet was computed on it."""
        return any(batch in pending for pending in self._pending)


class BatchStream:
    """What a script iterates over in place of its loader."""

    def __init__(
        self,
        plain: Any,
        own: Any,
        number: int,
        batches: Batches,
        is_over: Callable[[], bool],
        requeue: bool,
    ) -> None:
        """`plain`: the script's own loader. `own`: the same with an order of the worker's own."""
        self._plain = plain
        self._own = own
        self._number = number
        self._batches = batches
        self._is_over = is_over
        self._requeue = requeue
        self._again: deque[Batch] = deque()
        self._handed_out: list[Batch] = []
        self._begun_too_late = 0  # how often, after the end of the run
        self._loops = 0  # that the script has begun
        self._at = Bookmark(0, 0)  # the next batch; `again`: what is still to come before it
        self._move: tuple[Bookmark, Callable[[], None]] | None = None  # to be made before it

    def __len__(self) -> int:
        return len(self._plain)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)

    def __iter__(self) -> Iterator[Any]:
        """Endless batches to train on; to evaluate on, one pass over the script's own loader."""
        if not torch.is_grad_enabled() or not self._batches.is_training():
            is_used = False
            for value in self._plain:
                batch = self._hand_out(Batch(value, count_samples(value)))
                yield value
                is_used |= batch.is_used
                self._take_back()
            if not is_used:
                return
        yield from self._train()

    def _train(self) -> Iterator[Any]:
        if self._is_over():
            self._begun_too_late += 1
            if self._begun_too_late > TOO_LATE_MAX:
                raise SpecError(
                    "the run is over, and so is its data; leave the loop if run.finished"
                )
        fresh: Iterator[Batch] | None = None
        unused = 0  # batches that no gradient was computed on, since one was
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
        """How many batches make a pass; -1: nothing tells."""
        with suppress(TypeError):
            return len(self._plain)
        return -1

    def bookmark(self) -> Bookmark:
        """Where a stream must begin that is to go on after the gradients that were accepted."""
        if self._move is not None:
            return self._move[0]
        latest = self._handed_out[-1:]
        again = [*self._again]
        again += [batch for batch in self._handed_out if self._comes_again(batch, batch in latest)]
        places = (*(batch.place for batch in again if batch.place), *self._at.again)
        return Bookmark(self._at.loop, self._at.batches, places)

    def _comes_again(self, batch: Batch, is_latest: bool) -> bool:
        if batch.is_accepted:
            return False
        is_ahead = is_latest and not batch.is_used  # the script has fetched it before it is needed
        return is_ahead or self._batches.is_pending(batch) or (batch.is_dropped and self._requeue)

    @property
    def can_go_back(self) -> bool:
        """Whether `move_to` has an effect: once a loop has begun, only our own order can."""
        return self._loops == 0 or has_own_order(self._own)

    def move_to(self, bookmark: Bookmark, then: Callable[[], None]) -> None:
        """Go on there; call `then` just before the first batch is loaded.

        What cannot be gone back in goes on.
        """
        if self.can_go_back:
            self._move = (bookmark, then)
            self._again.clear()
            self._handed_out.clear()

    def _fresh(self) -> Iterator[Batch]:
        """The batches of a new loop, or from where we are to go; those to come again are first."""
        bookmark, then = self._move or (Bookmark(self._loops, 0, self._at.again), None)
        self._move = None
        self._loops = bookmark.loop + 1
        if has_own_order(self._own):
            self._at = bookmark
            return self._in_own_order(bookmark, then)
        self._at = Bookmark(bookmark.loop, bookmark.batches)
        values = self._endless()
        found: dict[tuple[int, int], Batch] = {}
        for number, value in enumerate(islice(values, bookmark.batches)):
            place = (bookmark.loop, number)
            if place in bookmark.again:
                found[place] = Batch(value, count_samples(value), place)
        self._again += [found[place] for place in bookmark.again if place in found]
        if then is not None:
            then()
        return map(self._batch, values)

    def _in_own_order(self, bookmark: Bookmark, then: Callable[[], None] | None) -> Iterator[Batch]:
        begin_at(self._own, bookmark)
        if then is not None:
            then()
        before = torch.get_rng_state()
        values = iter(self._own)  # which draws a seed
        if then is not None and bookmark != Bookmark(bookmark.loop, 0):
            torch.set_rng_state(before)  # this loop has begun before, and had drawn it then
        yield from map(self._batch, values)

    def _batch(self, value: Any) -> Batch:
        """The next batch."""
        loop, number, again = self._at.loop, self._at.batches, self._at.again
        if again:
            place, *later = again
            self._at = Bookmark(loop, number, tuple(later))
        else:
            place = (loop, number)
            self._at = Bookmark(loop, number + 1)
        return Batch(value, count_samples(value), place)

    def _endless(self) -> Iterator[Any]:
        """The loader over and over again; it ends if a whole pass gives nothing."""
        epoch = 0
        while True:
            set_epoch = getattr(getattr(self._own, "sampler", None), "set_epoch", None)
            if set_epoch is not None:
                set_epoch(epoch)
            empty = True
            for value in self._own:
                empty = False
                yield value
            if empty:
                return
            epoch += 1

    def _take_back(self) -> None:
        """Look at what was handed out: what came to nothing is given again."""
        still = []
        for batch in self._handed_out:
            if batch.is_accepted:
                continue
            if self._batches.is_pending(batch):
                still.append(batch)
            elif batch.is_dropped and self._requeue:
                self._again.append(batch)
        self._handed_out = still


def samples_in_epoch(loader: Any) -> int | None:
    """How many samples one pass over the loader has; None where nothing tells."""
    if isinstance(loader, list | tuple):
        return sum(map(count_samples, loader))
    data: Any  # that has a length, or raises
    for data in (getattr(loader, "sampler", None), getattr(loader, "dataset", None)):
        with suppress(TypeError):
            return len(data)
    return None


def count_samples(value: Any) -> int:
    """How many samples a batch has: the first length that can be found in it."""
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
