# SPDX-License-Identifier: BSD-3-Clause
"""When a run is saved, and gathering what a checkpoint is made of.

A checkpoint is of one version: the tensors are copied when it has been made. The workers then tell
where each was when it got the work that it has: that work is lost when the run goes on from the
checkpoint, and done again. Who waits is asked with its next work, the others at once; of one that
does not answer, the place before is kept, so that some of its data comes twice but none is lost.
An answer that comes too late is not taken for the next checkpoint.
"""

from collections.abc import Callable, Collection
from contextlib import suppress
from math import inf

from paceline.errors import SpecError
from paceline.run.server.checkpoint import Archive, Saved, Snapshot
from paceline.run.settings import Every

__all__ = ["Checkpointer"]

PATIENCE_S = 30.0  # for workers to tell their places
LAST_PATIENCE_S = 2.0  # likewise; then the last version is written, and again with the places


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
        self._places: dict[int, bytes] = {}  # the last that are known, by worker
        self._awaited: set[int] = set()  # workers that are to tell their places
        self._to_ask: set[int] = set()  # those of them that were not asked yet
        self._snapshot: Snapshot | None = None  # that waits for them
        self._number = 0  # how many of them there were
        self._is_last = False  # it is, and no version will come that could make up for it
        self._is_hastened = False  # there is something to save that is of no update
        self._began = self._due_at = 0.0
        self._due_version: float = inf

    @property
    def is_on(self) -> bool:
        """Whether this run is saved at all."""
        return self._every != Every()

    def begin(self, version: int, now: float) -> None:
        """The run begins, or goes on, here."""
        self._schedule(version, now)

    def know(self, places: dict[int, bytes]) -> None:
        """The run goes on from a checkpoint, in which the workers were there."""
        self._places = dict(places)

    def _schedule(self, version: int, now: float) -> None:
        self._due_at, self._due_version = now + self._every.seconds, version + self._every.updates

    def is_due(self, version: int, now: float) -> bool:
        """Whether this version, which was just made, is to be saved."""
        return version >= self._due_version or now >= self._due_at or self.is_overdue

    def hasten(self) -> None:
        """Something has changed that workers will not bring again: save it as soon as can be."""
        self._is_hastened = self.is_on

    @property
    def is_overdue(self) -> bool:
        """Whether the run is to be saved whether or not a version was just made."""
        return self._is_hastened and not self._archive.is_writing

    def save(self, saved: Saved, idle: Collection[int], busy: Collection[int], now: float) -> bool:
        """Copy this version, unless the one before is still being written; whether it was.

        It goes to the disk when these workers have told their places: the idle ones with their next
        work, and whoever is busy is to be asked by the caller.
        """
        self._schedule(saved.version, now)
        if not self.is_on or self._archive.is_writing:  # a slow disk makes fewer checkpoints
            return False
        return self._copy(saved, idle, busy, now)

    def save_last(self, saved: Saved, here: Collection[int], now: float) -> None:
        """Save the last version, and what the run was for; all of these tell their places."""
        if self.is_on:
            self._archive.wait()
            self._is_last = self._copy(saved, here, (), now)
        self.export()

    def export(self) -> None:
        """Write what the run was for."""
        self._export()

    def _copy(self, saved: Saved, idle: Collection[int], busy: Collection[int], now: float) -> bool:
        self._write()
        self._is_hastened = False
        try:
            self._snapshot = Snapshot.of(saved)
        except SpecError as error:
            self._say(f"no checkpoint of version {saved.version}: {error}")
            return False
        self._awaited, self._to_ask, self._began = {*idle, *busy}, set(idle), now
        self._number += 1
        return True

    @property
    def is_gathering(self) -> bool:
        """Whether there is a copy that is not being written yet."""
        return self._snapshot is not None

    def place_of(self, worker: int) -> bytes:
        """Where a worker is to begin; nothing: at its beginning."""
        return self._places.get(worker, b"")

    @property
    def checkpoint(self) -> int:
        """The number of the checkpoint that was copied last."""
        return self._number

    def wants_place(self, worker: int) -> int:
        """The checkpoint for which to ask this worker with what it is told next; 0: for none."""
        return self._number if worker in self._to_ask else 0

    def take(self, worker: int, checkpoint: int, place: bytes) -> None:
        """A worker has told its place; what is of an earlier checkpoint, or told again, is void."""
        if worker in self._awaited and checkpoint == self._number:
            self._places[worker] = place
            self.leave(worker)
            self.tick(self._began)

    def leave(self, worker: int) -> None:
        """A worker has nothing to tell any more."""
        self._awaited.discard(worker)
        self._to_ask.discard(worker)

    def tick(self, now: float) -> None:
        """Write what is complete, or has waited for long enough; nobody waits for a slow disk."""
        waited_s = now - self._began
        if self._archive.is_writing:
            return
        if not self._awaited or waited_s > PATIENCE_S:
            self._write()
        elif self._is_last and waited_s > LAST_PATIENCE_S:  # somebody may lose patience with us
            assert self._snapshot is not None
            self._is_last = False
            with suppress(OSError):  # too many files are open
                self._archive.save(self._snapshot.twin(), self._places)

    def finish(self) -> None:
        """The run is over: whatever is not written yet is written now."""
        self._write()
        self._archive.wait()

    def _write(self) -> None:
        if self._snapshot is not None:
            self._archive.save(self._snapshot, self._places)
            self._snapshot = None
            self._awaited.clear()
            self._to_ask.clear()
