# SPDX-License-Identifier: BSD-3-Clause
"""Check that a run used every batch of its shared order once.

A batch is held by one worker at a time, and counts with the first accepted gradient on it. Other
optimizers' gradients on the same batch may follow, from the same worker. So the trace proves that
nothing was counted twice. At the end, and wherever the run was restored, it lists the batches that
aren't done: all others must have been accepted, or skipped by a script. After a gap, only batches
that were first leased later are known.
"""

from typing import Any

from paceline.core.events import Fate
from paceline.errors import TraceError
from paceline.trace.schema import Ended, Gap, Gradient, Record, Restored, Skipped

__all__ = ["BatchAudit"]


class BatchAudit:
    """What became of each batch, by stream and number."""

    def __init__(self) -> None:
        self._done: set[tuple[int, int]] = set()  # at the last restoration
        self._used: dict[tuple[int, int], int] = {}  # since then; to the worker
        self._skipped: set[tuple[int, int]] = set()
        self._known_from: dict[int, int] = {}  # by stream: nothing is known of earlier batches

    def check(self, record: Record, place: str) -> None:
        """Raise `TraceError` if this record uses a batch again, or misses one."""
        match record:
            case Gradient(fate=Fate.ACCEPTED):
                self._check_gradient(record, place)
            case Skipped():
                for number in record.use.numbers:
                    batch = (record.use.stream, number)
                    self._check_new(batch, place)
                    self._skipped.add(batch)
            case Restored():
                self._check_undone(record.data, place, at_end=False)
                self._done = {
                    (stream, number)
                    for stream, (_, next_number, undone) in enumerate(record.data)
                    for number in set(range(next_number)).difference(undone)
                }
                self._used.clear()
                self._skipped.clear()
                self._known_from.clear()
            case Gap():
                self._known_from = {
                    stream: next_number for stream, (_, next_number, _) in enumerate(record.data)
                }
            case Ended():
                self._check_undone(record.data, place, at_end=not record.unused)
            case _:
                pass

    def _check_gradient(self, record: Gradient, place: str) -> None:
        batches = [(use.stream, number) for use in record.uses for number in use.numbers]
        repeated = [batch for batch in batches if self._used.get(batch) == record.worker]
        for batch in batches:
            if batch not in repeated:
                self._check_new(batch, place)
                self._used[batch] = record.worker
        if batches and len(repeated) == len(batches) and record.new_samples:
            raise TraceError(
                f"{place}: counts {record.new_samples} samples that were counted before"
            )

    def _check_new(self, batch: tuple[int, int], place: str) -> None:
        stream, number = batch
        is_old = batch in self._used or batch in self._done or batch in self._skipped
        if is_old and number >= self._known_from.get(stream, 0):
            raise TraceError(f"{place}: batch {number} of stream {stream} was already used")

    def _check_undone(self, data: list[Any], place: str, *, at_end: bool) -> None:
        """Raise `TraceError` if a batch that counts as done wasn't used, or the other way round."""
        for stream, (_, next_number, undone) in enumerate(data):
            known = {
                number
                for number in range(next_number)
                if (stream, number) in self._used
                or (stream, number) in self._done
                or (stream, number) in self._skipped
            }
            first = self._known_from.get(stream, 0)
            missing = sorted(set(range(first, next_number)).difference(undone, known))
            if missing:
                raise TraceError(f"{place}: batch {missing[0]} of stream {stream} was never used")
            open_again = sorted(n for n in known.intersection(undone) if at_end and n >= first)
            if open_again:
                raise TraceError(
                    f"{place}: batch {open_again[0]} of stream {stream} was used but isn't done"
                )
