# SPDX-License-Identifier: BSD-3-Clause
"""Tracks which batches each gradient of a worker was computed on.

It learns that from the backward pass: a gradient belongs to the batches that were the latest ones
when it reached a parameter.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from paceline.core.events import Fate
from paceline.leases import Use

__all__ = ["Batch", "Batches"]


@dataclass(eq=False)
class Batch:
    """A batch that a loader has handed out."""

    value: Any
    samples: int
    number: int | None = None  # in the shared order; None: it isn't from there
    generation: int = 0  # of the leases
    position: tuple[int, int] | None = None  # (pass, batch) in the worker's own order
    in_training: bool = True  # whether a model was in training mode, and gradients enabled
    is_used: bool = False  # a gradient was computed on it
    is_accepted: bool = False  # a gradient that was computed on it was accepted
    is_dropped: bool = False  # a gradient that was computed on it was dropped by the policy


class Batches:
    """Tracks which batches the gradients that weren't pushed yet were computed on."""

    def __init__(self, optimizers: int, models: Sequence[nn.Module] = ()) -> None:
        self._models = models
        self._latest: dict[int, Batch] = {}  # by stream; the batches that the script uses now
        self._is_settled = False  # a gradient was pushed since the last batch was handed out
        self._usual_samples = 1  # in a batch to train on
        self._pending: list[dict[Batch, int]] = [{} for _ in range(optimizers)]  # to its stream
        self._open_passes = 0
        self.has_loader = False
        """Whether the script has prepared a loader."""
        self.has_begun = False
        """Whether a training pass was ever begun."""
        self.on_training_batch: Callable[[], None] = lambda: None
        """Called before a batch is handed out to train on."""

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
        batch.in_training = self.is_training() and torch.is_grad_enabled()
        self._latest[stream] = batch
        if batch.in_training:
            self._usual_samples = max(1, batch.samples)
            self.on_training_batch()

    def forget_latest(self, stream: int) -> None:
        """Note that gradients from now on aren't computed on the latest batch of this stream.

        It was only evaluated on, or the pass has ended. A script that still trains has kept batches
        itself, as `itertools.cycle` does.
        """
        self._latest.pop(stream, None)

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

    def step_after_end(self, optimizer: int) -> None:
        """Note that the script makes a step although the run has ended.

        If it computed on a batch that no training pass handed out, it takes an evaluation for a
        training pass: it joined when the run had ended.
        """
        self.hand_in(optimizer)
        for batch in self._pending[optimizer]:
            batch.is_dropped |= batch.number is None and batch.position is None

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
        """Return how many samples this optimizer's gradient was computed on, as far as known."""
        pending = self._pending[optimizer]
        if not pending:
            return self._usual_samples
        return max([1, *self._by_stream(optimizer, list(pending)).values()])

    def new_samples(self, optimizer: int) -> int:
        """Return how many of them no accepted gradient was computed on before."""
        pending = self._pending[optimizer]
        if not pending:
            return self._usual_samples
        new = [batch for batch in pending if not batch.is_accepted]
        return max([0, *self._by_stream(optimizer, new).values()])

    def _by_stream(self, optimizer: int, batches: Sequence[Batch]) -> dict[int, int]:
        by_stream: dict[int, int] = {}
        for batch in batches:
            stream = self._pending[optimizer][batch]
            by_stream[stream] = by_stream.get(stream, 0) + batch.samples
        return by_stream

    def uses(self, optimizer: int) -> tuple[Use, ...]:
        """Return the batches that this optimizer's gradient was computed on, for the server."""
        numbers: dict[int, list[int]] = {}
        samples: dict[int, int] = {}
        for batch, stream in self._pending[optimizer].items():
            numbers.setdefault(stream, [])
            if batch.number is not None:
                numbers[stream].append(batch.number)
            elif batch.position is not None and not batch.is_accepted:
                samples[stream] = samples.get(stream, 0) + batch.samples
        return tuple([Use(s, tuple(found), samples.get(s, 0)) for s, found in numbers.items()])

    def forget_numbers(self) -> None:
        """Note that all leases are void: what is computed now belongs to no batch of the order."""
        for batch in (*self._latest.values(), *(b for own in self._pending for b in own)):
            batch.number = None

    def is_pending(self, batch: Batch) -> bool:
        """Return whether a gradient that wasn't pushed yet was computed on this batch."""
        return any(batch in pending for pending in self._pending)
