# SPDX-License-Identifier: BSD-3-Clause
"""Decide when to save a run, and collect what goes into a checkpoint.

A checkpoint holds one version: its tensors are copied as soon as it is made. Then each worker
reports the position in its data at which its current turn began, because a run that continues from
the checkpoint computes that turn again. Idle workers are asked together with their next assignment,
busy ones immediately. If a worker takes longer than usual to answer, or hangs, the checkpoint is
written with the positions that are known, and once more when others have arrived. If a worker never
answers, its previous position is kept: some of its data is then used twice, but none is lost. An
answer that is too late isn't used for a later checkpoint.

A checkpoint is due after a number of updates, or by the clock, even if no update is made: whatever
a run waits for, its newest version is saved.
"""

from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import replace
from math import inf
from typing import Protocol

from paceline.errors import SpecError
from paceline.run.server.checkpoint import Archive, Saved, Snapshot
from paceline.run.settings import Every

__all__ = ["Checkpointer"]

POSITIONS_TIMEOUT_S = 30.0  # for workers to report their positions
EARLY_S = 2.0  # after this long, write a checkpoint without the positions that are missing,
EARLY_FACTOR = 2.0  # but wait at least this many times as long as the last complete one did


class TraceFile(Protocol):
    """The trace of the run, to which a checkpoint refers."""

    @property
    def mark(self) -> tuple[int, int]:
        """The bytes that have been written, and their CRC-32."""
        ...

    def flush(self) -> None:
        """Write what was recorded."""
        ...

    def sync(self) -> None:
        """Wait until what was written survives a power failure."""
        ...


class Checkpointer:
    """Saves a run."""

    def __init__(
        self,
        archive: Archive,
        every: Every,
        export: Callable[[], None],
        say: Callable[[str], None],
        trace: TraceFile,
    ) -> None:
        """`export`: writes the result of the run; may raise any exception."""
        self.failure = ""
        """Why the result or the last checkpoint could not be written; "" if they were."""

        self._trace = trace
        self._archive = archive
        self._export = export
        self._every = every
        self._say = say
        self._positions: dict[int, bytes] = {}  # the last known position of each worker
        self._awaited: set[int] = set()  # workers whose positions the snapshot waits for
        self._to_ask: set[int] = set()  # those of them that haven't been asked yet
        self._snapshot: Snapshot | None = None  # copied, but not being written yet
        self._number = 0  # of the last snapshot
        self._early: dict[int, bytes] | None = None  # positions that it was written with before
        self._usual_s = 0.0  # how long the last complete snapshot waited for its positions
        self._copied: int | None = None  # the version of the last snapshot
        self._is_hastened = False  # something that isn't part of an update must be saved
        self._copied_at = self._due_at = 0.0
        self._due_version: float = inf

    @property
    def is_on(self) -> bool:
        """Whether this run makes checkpoints at all."""
        return self._every != Every()

    @property
    def spoiled(self) -> str:
        """Why a version was not worth saving; "" if all were."""
        return self._archive.spoiled

    def describe(self, version: int, what: str) -> str:
        """Return why a version is not worth saving: something of it is spoiled."""
        return self._archive.describe(version, what)

    def begin(self, version: int, now: float) -> None:
        """Schedule the first checkpoint of a run that begins or continues here."""
        self._schedule(version, now)

    def restore(self, positions: dict[int, bytes]) -> None:
        """Continue from a checkpoint with these positions."""
        self._positions = dict(positions)

    def _schedule(self, version: int, now: float) -> None:
        self._due_at, self._due_version = now + self._every.seconds, version + self._every.updates

    def is_due(self, version: int, now: float) -> bool:
        """Return whether this version, which was just made, should be saved."""
        is_due = version >= self._due_version or now >= self._due_at
        return is_due or (self._is_hastened and not self._archive.is_writing)

    def hasten(self) -> None:
        """Save as soon as possible: something has changed that workers won't send again."""
        self._is_hastened = self.is_on

    def is_overdue(self, version: int, now: float) -> bool:
        """Return whether this version should be saved, although it wasn't just made."""
        is_unsaved = version != self._copied or self._archive.failure != ""
        is_due = self._is_hastened or (now >= self._due_at and is_unsaved)
        return is_due and not self._archive.is_writing

    def save(self, saved: Saved, idle: Collection[int], busy: Collection[int], now: float) -> bool:
        """Copy this version, unless an earlier one is being written; return whether it was copied.

        It is written when these workers have reported their positions. Idle ones are asked with
        their next assignment (see `wants_position`), busy ones by the caller.
        """
        self._schedule(saved.version, now)
        if not self.is_on or self._archive.is_writing:  # on a slow disk, save less often
            return False
        return not self._copy(saved, idle, busy, now)

    def save_last(self, saved: Saved, workers: Collection[int], now: float) -> None:
        """Save the last version and the result of the run, and wait until they are on disk.

        Workers that learn of the end may exit, and then nobody could make a lost update again. The
        checkpoint is written once more when it has the positions of these workers.
        """
        if self.is_on:
            self._archive.wait()
            self.failure = self._copy(saved, workers, (), now)
            if not self.failure:
                self._write_early()
                self._archive.wait()
        self.export()

    def export(self) -> None:
        """Write the result of the run; `failure` says why if that fails."""
        try:
            self._export()
        except Exception as error:  # a script's model may hold anything
            why = error.strerror if isinstance(error, OSError) else None
            self._fail(f"cannot write the weights: {why or repr(error)}")

    def _fail(self, reason: str) -> None:
        self._say(reason)
        self.failure = self.failure or reason

    def _copy(self, saved: Saved, idle: Collection[int], busy: Collection[int], now: float) -> str:
        """Copy this version; return why that failed, "" if it didn't."""
        if now == self._copied_at:
            self._discard()  # the trace doesn't have its update yet, as both are due to one event
        self._write()
        self._is_hastened = False
        try:
            self._snapshot = Snapshot.of(replace(saved, trace=self._trace.mark))
        except SpecError as error:
            failure = f"no checkpoint of version {saved.version}: {error}"
            self._say(failure)
            return failure
        self._awaited, self._to_ask, self._copied_at = {*idle, *busy}, set(idle), now
        self._early, self._copied = None, saved.version
        self._number += 1
        return ""

    def position_of(self, worker: int) -> bytes:
        """Return the position where a worker should continue; empty: at the beginning."""
        return self._positions.get(worker, b"")

    @property
    def checkpoint(self) -> int:
        """The number of the checkpoint that was copied last."""
        return self._number

    def wants_position(self, worker: int) -> int:
        """Return the checkpoint that still needs this worker's position; 0: none."""
        return self._number if worker in self._to_ask else 0

    def take_position(self, worker: int, checkpoint: int, position: bytes, now: float) -> None:
        """Keep a worker's position; ignore one for an earlier checkpoint, and a second one."""
        if worker in self._awaited and checkpoint == self._number:
            self._positions[worker] = position
            self.forget(worker)
            if not self._awaited:
                self._usual_s = now - self._copied_at
            self.tick(now)

    def forget(self, worker: int) -> None:
        """Stop waiting for a worker's position."""
        self._awaited.discard(worker)
        self._to_ask.discard(worker)

    def tick(self, now: float) -> None:
        """Write the checkpoint if it is complete or has waited long enough; don't block."""
        waited_s = now - self._copied_at
        if self._archive.is_writing:
            return
        if not self._awaited or waited_s > POSITIONS_TIMEOUT_S:
            self._write()
        elif self._early is None and waited_s > max(EARLY_S, EARLY_FACTOR * self._usual_s):
            self._write_early()  # the process may be killed at any time

    def wait(self) -> None:
        """Wait until nothing is being written."""
        self._archive.wait()

    def finish(self) -> None:
        """Write what isn't written yet, and wait until it is; `failure` says why if that fails."""
        self._archive.wait()
        self._write()
        self._archive.wait()
        self.failure = self.failure or self._archive.failure

    def _write(self) -> None:
        """Write the snapshot, unless that was done with the same positions before."""
        if self._snapshot is None:
            return
        if self._early == self._positions and not self._archive.failure:
            self._discard()
        else:
            self._save(self._snapshot)
        self._forget_snapshot()

    def _discard(self) -> None:
        if self._snapshot is not None:
            self._snapshot.close()
            self._forget_snapshot()

    def _forget_snapshot(self) -> None:
        self._snapshot = None
        self._awaited.clear()
        self._to_ask.clear()

    def _write_early(self) -> None:
        """Write the checkpoint with the positions that are known."""
        assert self._snapshot is not None
        with suppress(OSError):  # too many open files
            self._save(self._snapshot.duplicate())
            self._early = dict(self._positions)

    def _save(self, snapshot: Snapshot) -> None:
        self._trace.flush()  # the trace is never behind a checkpoint
        is_written = self._early is not None
        self._archive.save(snapshot, self._positions, self._trace.sync, renews=is_written)
