# SPDX-License-Identifier: BSD-3-Clause
"""Decide when to save a run, and collect what goes into a checkpoint.

A checkpoint holds one version: its tensors are copied as soon as it is made. Then each worker
reports the position in its data at which its current turn began, because a run that continues from
the checkpoint computes that turn again. Idle workers are asked together with their next assignment,
busy ones immediately. If a worker doesn't answer, its previous position is kept: some of its data
is then used twice, but none is lost. An answer that is too late isn't used for a later checkpoint.
"""

from collections.abc import Callable, Collection
from contextlib import suppress
from math import inf

from paceline.errors import SpecError
from paceline.run.server.checkpoint import Archive, Saved, Snapshot
from paceline.run.settings import Every

__all__ = ["Checkpointer"]

POSITIONS_TIMEOUT_S = 30.0  # for workers to report their positions
LAST_TIMEOUT_S = 2.0  # then the last version is written; and again once it has the positions


class Checkpointer:
    """Saves a run."""

    def __init__(
        self,
        archive: Archive,
        every: Every,
        export: Callable[[], None],
        say: Callable[[str], None],
    ) -> None:
        """`export`: writes the result of the run."""
        self._archive = archive
        self._export = export
        self._every = every
        self._say = say
        self._positions: dict[int, bytes] = {}  # the last known position of each worker
        self._awaited: set[int] = set()  # workers whose positions the snapshot waits for
        self._to_ask: set[int] = set()  # those of them that haven't been asked yet
        self._snapshot: Snapshot | None = None  # copied, but not being written yet
        self._number = 0  # of the last snapshot
        self._is_last = False  # the snapshot is of the last version
        self._is_hastened = False  # something that isn't part of an update must be saved
        self._copied_at = self._due_at = 0.0
        self._due_version: float = inf

    @property
    def is_on(self) -> bool:
        """Whether this run makes checkpoints at all."""
        return self._every != Every()

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
        return version >= self._due_version or now >= self._due_at or self.is_overdue

    def hasten(self) -> None:
        """Save as soon as possible: something has changed that workers won't send again."""
        self._is_hastened = self.is_on

    @property
    def is_overdue(self) -> bool:
        """Whether to save now, even if no version was just made."""
        return self._is_hastened and not self._archive.is_writing

    def save(self, saved: Saved, idle: Collection[int], busy: Collection[int], now: float) -> bool:
        """Copy this version, unless an earlier one is being written; return whether it was copied.

        It is written when these workers have reported their positions. Idle ones are asked with
        their next assignment (see `wants_position`), busy ones by the caller.
        """
        self._schedule(saved.version, now)
        if not self.is_on or self._archive.is_writing:  # on a slow disk, save less often
            return False
        return self._copy(saved, idle, busy, now)

    def save_last(self, saved: Saved, workers: Collection[int], now: float) -> None:
        """Save the last version and the result of the run; wait for these workers' positions."""
        if self.is_on:
            self._archive.wait()
            self._is_last = self._copy(saved, workers, (), now)
        self.export()

    def export(self) -> None:
        """Write the result of the run."""
        self._export()

    def _copy(self, saved: Saved, idle: Collection[int], busy: Collection[int], now: float) -> bool:
        self._write()
        self._is_hastened = False
        try:
            self._snapshot = Snapshot.of(saved)
        except SpecError as error:
            self._say(f"no checkpoint of version {saved.version}: {error}")
            return False
        self._awaited, self._to_ask, self._copied_at = {*idle, *busy}, set(idle), now
        self._number += 1
        return True

    @property
    def is_gathering(self) -> bool:
        """Whether a copy waits for positions."""
        return self._snapshot is not None

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

    def take_position(self, worker: int, checkpoint: int, position: bytes) -> None:
        """Keep a worker's position; ignore one for an earlier checkpoint, and a second one."""
        if worker in self._awaited and checkpoint == self._number:
            self._positions[worker] = position
            self.forget(worker)
            self.tick(self._copied_at)

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
        elif self._is_last and waited_s > LAST_TIMEOUT_S:  # the process may be killed any time now
            assert self._snapshot is not None
            self._is_last = False
            with suppress(OSError):  # too many open files
                self._archive.save(self._snapshot.duplicate(), self._positions)

    def finish(self) -> None:
        """Write what isn't written yet, and wait until it is."""
        self._write()
        self._archive.wait()

    def _write(self) -> None:
        if self._snapshot is not None:
            self._archive.save(self._snapshot, self._positions)
            self._snapshot = None
            self._awaited.clear()
            self._to_ask.clear()
