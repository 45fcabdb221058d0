# SPDX-License-Identifier: BSD-3-Clause
"""What a script iterates over instead of its loader.

A *pass* is one `for` loop of the script over the stream. A training pass ends when the run has used
the samples of one more epoch, which the server decides, so all workers end it at the same version.
A worker that has missed a whole epoch gets an empty pass, so the script's count of epochs stays
right. A script that leaves a pass by itself (`break`, `next(iter(loader))`) gets a whole epoch,
from there on, in its next one.

A pass in evaluation mode, or one whose first batches no gradient is computed on, is a plain pass
over the script's own loader. If the script trains after all, because it has skipped batches or
leaves its model in evaluation mode, the pass goes on as a training pass.
"""

import sys
from collections.abc import Callable, Generator, Iterable, Iterator
from math import ceil, inf
from typing import Any, NamedTuple

import torch

from paceline.run.system import SYSTEM
from paceline.run.worker.batch_sources import BatchSource
from paceline.run.worker.batches import Batch, Batches
from paceline.run.worker.extra_steps import end_script
from paceline.run.worker.pass_iterator import LoaderEnded, PassEnded, PassIterator
from paceline.run.worker.position import Bookmark
from paceline.run.worker.sampler import count_samples

__all__ = ["BatchStream", "StreamSettings"]

AFTER_END_S = 20.0  # a script that begins passes for longer than this after the end is ended
LOOKED_AT_MAX = 4  # a pass with so many batches before its first gradient is an evaluation


class StreamSettings(NamedTuple):
    """What a stream must know about its run."""

    number: int  # of the stream
    shares: int  # how many workers an epoch is divided among
    requeue: bool  # whether a batch whose gradient was dropped is used again
    monotonic: Callable[[], float] = SYSTEM.monotonic  # the clock of the run


class BatchStream:
    """A loader whose training batches are shared between the workers of a run."""

    def __init__(
        self,
        plain: Any,
        source: BatchSource,
        batches: Batches,
        settings: StreamSettings,
        is_over: Callable[[], bool],
    ) -> None:
        """`plain` is the script's loader."""
        self._plain = plain
        self._number, self._shares, self._requeue, self._monotonic = settings
        self._source = source
        self._batches = batches
        batches.has_loader = True
        self._is_over = is_over
        self._handed_out: list[Batch] = []  # those that aren't settled, oldest first
        self._begin: float = 0  # samples of the run at which the next training pass begins
        self._was_left = False  # the script has left its last pass by itself
        self._is_trained_on = False  # a gradient was computed on one of its batches
        self._is_evaluated_on = False  # a pass has ended without any gradient
        self._ignores_mode = False  # the script trains although its models are in evaluation mode
        self._looked_at: list[Batch] = []  # in this pass, before its first gradient
        self._has_gradient = False  # in this pass
        self._looked_at_max = LOOKED_AT_MAX
        self._empty_since: float | None = None  # when the first pass after the end began
        self._active = 0  # training passes that have begun and not ended

    def __len__(self) -> int:
        """Return how many batches of an epoch are this worker's share.

        A loader that the script only evaluates on isn't divided.
        """
        length = len(self._plain)
        evaluates = self._is_evaluated_on or not self._is_in_training_mode()
        if self._source.epoch_samples == inf or (evaluates and not self._is_trained_on):
            return length
        return ceil(length / self._shares)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._plain, name)

    def __iter__(self) -> Iterator[Any]:
        """Begin a pass."""
        # A script that answers StopIteration with a new pass calls `next()`, and needs a batch: an
        # empty pass is only for a script that loops over its epochs.
        self._was_left |= isinstance(sys.exception(), StopIteration)
        return PassIterator(
            self._batches_of_pass, self._end_of_pass, self.__len__, self._plain_length
        )

    def _plain_length(self) -> int:
        """Return how many batches a script without Paceline gets from `next()`; 0: can't tell."""
        try:
            return 0 if self._source.epoch_samples == inf else len(self._plain)
        except TypeError:  # its sampler has no length
            return 0

    def _end_of_pass(self) -> StopIteration:
        """Return the exception that ends a pass."""
        if not self._is_trained_on:
            return StopIteration()
        return LoaderEnded() if self._is_over() else PassEnded()

    def _batches_of_pass(self) -> Iterator[Any]:
        if not self._is_in_training_mode():
            if not (yield from self._evaluate(self._plain)):
                return
            self._ignores_mode = True
        with self._batches.training_pass():
            yield from self._train()

    def _is_in_training_mode(self) -> bool:
        is_training = self._ignores_mode or self._batches.is_training()
        return is_training and torch.is_grad_enabled()

    def _evaluate(self, values: Iterable[Any]) -> Generator[Any, None, int]:
        """Yield these batches; return the number of the one that the script made a step with.

        A gradient alone doesn't matter: a script may compute those of its inputs. Return 0 if there
        was no step.
        """
        for number, value in enumerate(values, 1):
            batch = Batch(value, count_samples(value))
            self._batches.take(self._number, batch)
            yield value
            if batch.is_accepted or batch.is_dropped:
                return number
        self._batches.forget_latest(self._number)
        self._is_evaluated_on = True
        return 0

    # ---------------------------------------------------------------------------------- training

    def _train(self) -> Iterator[Any]:
        if self._is_over():
            self._end_script_if_late()
            if not self._is_trained_on:
                self._is_trained_on = bool((yield from self._evaluate(self._plain)))
            return
        if self._was_left:
            self._begin, self._was_left = max(self._begin, self._source.done), False
        end = self._begin + self._source.epoch_samples
        if self._has_passed(end):
            self._begin = end
            return
        if not self._active:
            self._settle()
            self._put_back()
        self._active += 1
        self._looked_at, self._has_gradient = [], False
        has_ended = False
        try:
            self._source.begin_pass()
            is_evaluation = yield from self._yield_until_passed(end)
            has_ended = True
            self._batches.forget_latest(self._number)
            if self._is_trained_on and not is_evaluation and end < inf:
                self._begin = max(self._begin, end)
        finally:
            self._active -= 1
            self._was_left |= not has_ended
            self._settle()
            self._source.end_pass()

    def _yield_until_passed(self, end: float) -> Generator[Any, None, bool]:
        """Yield the batches of a training pass; return whether it was an evaluation after all."""
        while True:
            while (batch := self._next_batch(end)) is not None:
                yield batch.value
                if self._looks_at() >= self._looked_at_max:
                    break
            if not self._looks_at() or self._has_passed(end):
                return False
            step = yield from self._evaluate(self._source.rest(self._plain, self._looked_at))
            if not step:
                return True
            self._is_trained_on = self._has_gradient = True
            self._looked_at_max = max(self._looked_at_max, len(self._looked_at) + step + 1)

    def _has_passed(self, end: float) -> bool:
        """Return whether the run has used this many samples of the stream, or is over."""
        return self._is_over() or self._source.done >= end

    def _next_batch(self, end: float) -> Batch | None:
        """Settle earlier batches, and hand out the next one; None: the pass or the run is over."""
        if self._has_passed(end):
            return None
        self._settle()
        source = self._source
        seen = [] if self._has_gradient else self._looked_at
        batch = source.next_to_look_at(seen) if seen else source.next_batch()
        if batch is None:
            return None
        if self._has_passed(end):  # while it waited for a lease
            source.put_back([batch])
            return None
        self._batches.take(self._number, batch)
        self._handed_out.append(batch)
        if not self._has_gradient:
            self._looked_at.append(batch)
        return batch

    def _looks_at(self) -> int:
        """Return how many batches of this pass the script has fetched; 0 after a gradient."""
        self._has_gradient |= any(batch.is_used for batch in self._looked_at)
        self._is_trained_on |= self._has_gradient
        return 0 if self._has_gradient else len(self._looked_at)

    def _settle(self) -> None:
        """Finish the batches that the script has moved past."""
        done, open_batches, unused = [], [], []
        repeated: list[Batch] = []
        skipped: list[Batch] = []
        for batch in self._handed_out:
            if not batch.is_used:
                unused.append(batch)
                open_batches.append(batch)
            elif self._batches.is_pending(batch):
                open_batches.append(batch)
            else:
                done.append(batch)
                if not batch.is_accepted:
                    (repeated if batch.is_dropped and self._requeue else skipped).append(batch)
        if done:
            self._is_trained_on = True
            # The script has moved past what it fetched before, without a gradient on it.
            last = self._handed_out.index(done[-1])
            passed = [batch for batch in unused if self._handed_out.index(batch) < last]
            skipped += passed
            open_batches = [batch for batch in open_batches if batch not in passed]
        self._handed_out = open_batches
        self._source.repeat(repeated)
        self._source.skip(skipped)

    def _put_back(self) -> None:
        """Hand out batches again that the script has only looked at.

        Not before the next pass: the script may have left its last one to compute on them, as in
        `next(iter(loader))`.
        """
        looked_at = [batch for batch in self._handed_out if not batch.is_used]
        self._handed_out = [batch for batch in self._handed_out if batch.is_used]
        self._source.put_back(looked_at)

    def _end_script_if_late(self) -> None:
        """End a script that keeps evaluating the last version, or loops for ever."""
        now = self._monotonic()
        if self._empty_since is None:
            self._empty_since = now
        elif now - self._empty_since > AFTER_END_S:
            end_script("the run has ended, so its loaders are empty")

    # ---------------------------------------------------------------------------------- position

    def bookmark(self) -> Bookmark:
        """Return the position after all accepted gradients."""
        latest = self._handed_out[-1:]
        again = [batch for batch in self._handed_out if self._comes_again(batch, batch in latest)]
        return self._source.bookmark(again)

    def _comes_again(self, batch: Batch, is_latest: bool) -> bool:
        if batch.is_accepted:
            return False
        is_ahead = is_latest and not batch.is_used  # the script fetched it in advance
        return is_ahead or self._batches.is_pending(batch) or (batch.is_dropped and self._requeue)

    @property
    def can_go_back(self) -> bool:
        """Whether `move_to` has an effect."""
        return self._source.can_go_back()

    def move_to(self, bookmark: Bookmark, before_first: Callable[[], None]) -> None:
        """Continue there; call `before_first` just before the first batch is loaded."""
        if self.can_go_back:
            self._handed_out.clear()
        self._source.move_to(bookmark, before_first)
