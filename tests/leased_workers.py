# SPDX-License-Identifier: BSD-3-Clause
"""Workers of a run without processes: real streams and leases, and a book instead of a server."""

from collections.abc import Iterator, Sequence
from math import inf
from typing import Any

from torch import nn

from paceline.core.events import Fate
from paceline.leases import LeaseBook, Use
from paceline.run.net.messages import Assignment
from paceline.run.worker.batch_sources import BatchSource, LeasedSource, OwnSource
from paceline.run.worker.batch_stream import BatchStream, StreamSettings
from paceline.run.worker.batches import Batches
from paceline.run.worker.leases import HeldLeases
from paceline.run.worker.sampler import ahead_of, order_of, with_shared_order

__all__ = ["FakeRun", "FakeWorker"]


class FakeRun:
    """A run whose updates are made as soon as a gradient is accepted."""

    def __init__(
        self,
        loaders: Sequence[Any],
        workers: int = 1,
        requeue: bool = True,
        optimizers: int = 1,
        models: Sequence[nn.Module] = (),
        shares: int | None = None,
    ) -> None:
        self.shares = workers if shares is None else shares
        self.loaders = loaders
        self.requeue = requeue
        self.is_over = False
        self.update = 1
        self.book = LeaseBook([order_of(loader) for loader in loaders])
        self.workers = [FakeWorker(self, w, optimizers, models) for w in range(workers)]
        for worker in self.workers:
            worker.receive([ahead_of(loader) for loader in loaders])

    @property
    def epoch(self) -> int:
        """The epoch of the first stream."""
        order = order_of(self.loaders[0])
        return 0 if order is None else self.done // order.samples

    @property
    def done(self) -> int:
        """How many samples of the first stream are done."""
        return self.book.done[0]


class FakeWorker:
    """One worker, with a stream for each loader."""

    def __init__(
        self, run: FakeRun, number: int, optimizers: int, models: Sequence[nn.Module]
    ) -> None:
        self.run = run
        self.number = number
        self.batches = Batches(optimizers, models)
        self.leases = HeldLeases(len(run.loaders), self, self.batches.forget_numbers)
        self.asked = 0  # how often it had to ask for a batch
        self.returned: list[tuple[tuple[int, ...], bool]] = []  # numbers, and whether skipped
        self.streams = [
            BatchStream(
                loader,
                self._source(loader, i),
                self.batches,
                StreamSettings(i, run.shares, run.requeue),
                lambda: run.is_over,
            )
            for i, loader in enumerate(run.loaders)
        ]
        self._pass: Iterator[Any] | None = None

    @property
    def stream(self) -> BatchStream:
        """The first stream."""
        return self.streams[0]

    def _source(self, loader: Any, number: int) -> BatchSource:
        order = order_of(loader)
        if order is None or not order.batches:
            samples = inf if order is None else order.samples
            return OwnSource(loader, samples, lambda: self.leases.done[number])
        if not isinstance(loader, list | tuple):
            loader = with_shared_order(loader, order, seed=5)
        return LeasedSource(loader, order, number, self.leases)

    # What the connection to the server does:

    def lease(self, stream: int) -> tuple[int, tuple[int, ...]] | None:
        """Ask for one more batch."""
        if self.run.is_over:
            return None
        self.asked += 1
        [use] = self.run.book.deal({self.number: [0] * stream + [1]})[self.number]
        return use.numbers[0], self.run.book.done

    def return_batches(self, use: Use, *, skipped: bool) -> None:
        """Return batches to the book."""
        self.returned.append((use.numbers, skipped))
        if skipped:
            self.run.book.skip(self.number, use)
        else:
            self.run.book.give_back(self.number, use)

    def receive(self, wanted: Sequence[int] | None = None) -> None:
        """Begin a turn, and get as many batches as were used up."""
        pulled = self.leases.hand_in_pulled() if wanted is None else wanted
        dealt = self.run.book.deal({self.number: pulled})[self.number]
        done = self.run.book.done
        turn = Assignment(1, 0, 0, (), 0.0, stream_samples=done, leases=tuple(dealt))
        self.leases.receive(turn)

    def park(self) -> None:
        """Lose all leases, as a worker whose process was stopped."""
        self.run.book.release(self.number)

    def wake(self) -> None:
        """Learn that all leases are lost, and get new ones."""
        self.run.book.release(self.number)
        ahead = [ahead_of(loader) for loader in self.run.loaders]
        dealt = self.run.book.deal({self.number: ahead})[self.number]
        turn = Assignment(
            1,
            0,
            0,
            (),
            0.0,
            stream_samples=self.run.book.done,
            leases=tuple(dealt),
            forget_leases=True,
        )
        self.leases.receive(turn)

    # What the script does:

    def next(self) -> Any:
        """Return the next batch of the current pass over the first stream."""
        if self._pass is None:
            self._pass = iter(self.stream)
        try:
            return next(self._pass)
        except StopIteration:
            self._pass = None
            raise

    def leave(self) -> None:
        """Leave the current pass."""
        self._pass = None

    def step(
        self, fate: Fate = Fate.ACCEPTED, optimizer: int = 0, *, backward: bool = True
    ) -> None:
        """Compute on the latest batches, push, and receive this fate."""
        if backward:
            self.batches.touch(optimizer)
        self.batches.hand_in(optimizer)
        if fate is Fate.ACCEPTED:
            self.run.book.accept(self.number, self.batches.uses(optimizer), self.run.update)
            self.run.book.apply(self.run.update)
            self.run.update += 1
        self.receive()
        self.batches.settle(optimizer, fate)

    def train(self, passes: int = 1) -> list[list[Any]]:
        """Train; return the batches of each pass."""
        found: list[list[Any]] = []
        for _ in range(passes):
            found.append([])
            for value in self.stream:
                found[-1].append(value)
                self.step()
        return found
