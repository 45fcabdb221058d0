# SPDX-License-Identifier: BSD-3-Clause
"""The batches that the server has leased to this worker, and that it hasn't used yet.

New leases come with each turn, as many as the worker has used up since its last report. So a worker
rarely has to ask for one. If it does, it waits for the answer.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from paceline.leases import Use
from paceline.run.net.messages import Assignment, RunEnded

__all__ = ["HeldLeases", "Lessor"]


class Lessor(Protocol):
    """What the leases need from the connection to the server."""

    def lease(self, stream: int) -> tuple[int, tuple[int, ...]] | None:
        """Ask for one more batch; return it and the samples done. None: the run has ended."""

    def return_batches(self, use: Use, *, skipped: bool) -> None:
        """Tell the server that this worker no longer holds these batches."""


class HeldLeases:
    """The leases of all streams."""

    def __init__(
        self, streams: int, lessor: Lessor, on_forget: Callable[[], None] = lambda: None
    ) -> None:
        self.done: tuple[int, ...] = (0,) * streams
        """How many samples of each stream the run has used, as far as this worker knows."""
        self.generation = 0
        """Increases when all leases are void; batches of an earlier generation don't count."""
        self._queues: list[deque[int]] = [deque() for _ in range(streams)]
        self._pulled = [0] * streams
        self._lessor = lessor
        self._on_forget = on_forget

    def receive(self, answer: Assignment | RunEnded) -> None:
        """Take over what came with a turn, or with the end."""
        self.done = answer.stream_samples or self.done
        if isinstance(answer, Assignment):
            if answer.forget_leases:
                self.forget()
            for lease in answer.leases:
                self._queues[lease.stream] += lease.numbers

    def forget(self) -> None:
        """Forget all leases: the server has given them to others, or is another one."""
        self.generation += 1
        self._on_forget()
        for queue in self._queues:
            queue.clear()
        self._pulled = [0] * len(self._queues)

    def take(self, stream: int) -> int | None:
        """Return the next batch to load; None: the run has ended."""
        queue = self._queues[stream]
        if not queue:
            reply = self._lessor.lease(stream)
            if reply is None:
                return None
            number, self.done = reply
            queue.append(number)
        self._pulled[stream] += 1
        return queue.popleft()

    def put_back(self, stream: int, numbers: Sequence[int]) -> None:
        """Keep batches that weren't used after all, for the next time."""
        self._queues[stream].extendleft(reversed(numbers))
        self._pulled[stream] -= len(numbers)

    def give_back(self, stream: int, numbers: Sequence[int]) -> None:
        """Let other workers have batches whose gradients were dropped."""
        self._lessor.return_batches(Use(stream, tuple(numbers)), skipped=False)

    def skip(self, stream: int, numbers: Sequence[int]) -> None:
        """Count batches as done that the script made no step with."""
        self._lessor.return_batches(Use(stream, tuple(numbers)), skipped=True)

    def hand_in_pulled(self) -> tuple[int, ...]:
        """Return how many leases of each stream were used up since the last call."""
        pulled = tuple([max(0, count) for count in self._pulled])
        # What was put back after it was handed in is deducted the next time.
        self._pulled = [min(0, count) for count in self._pulled]
        return pulled
