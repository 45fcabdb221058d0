# SPDX-License-Identifier: BSD-3-Clause
"""Checkpoints: what a run needs to continue, in files that are complete or don't exist.

A file has a magic line, lengths and checksums, a tree of plain values (msgpack, no pickle), the
workers' positions in their data, and the tensors. It is written under a temporary name, synced and
renamed; the previous checkpoint stays until the new one exists. Checksums reveal a file that is
damaged anyway; it is set aside, and the previous checkpoint is used.

A thread writes the file. It only handles bytes that were copied for it and that nothing else uses.
"""

import os
import zlib
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import msgspec

from paceline.errors import CheckpointError, PacelineError, SpecError
from paceline.files import DISK, Disk, DiskFile, atomic_write
from paceline.run.server.checkpoint_file import MAGIC, SIZES, checkpoint_files
from paceline.run.system import BackgroundWork, start_thread
from paceline.run.tensors.shared_region import Region
from paceline.run.tensors.state_packing import pack, unpack

__all__ = ["KEPT", "Archive", "Saved", "Snapshot"]

KEPT = 2  # so that there is one to fall back on
_CHUNK = 8 << 20


class _Damaged(CheckpointError):
    """Raised when a file doesn't contain what was written to it."""


@dataclass(frozen=True)
class Saved:
    """The state of a run between two updates: plain values and tensors."""

    version: int
    samples: int  # that went into updates
    options: list[Any]  # of the optimizers, changed by scripts
    memory: Any  # of the policy
    shard: dict[str, Any]
    positions: dict[int, bytes]  # of the workers in their data, encoded by them
    data: list[Any] = field(default_factory=list)
    """By stream: samples done, the next batch, batches that aren't done."""
    skipped: int = 0  # updates that were made without a step
    trace: tuple[int, int] = (0, 0)
    """Bytes of the trace that had been written, and their CRC-32."""


class Snapshot(NamedTuple):
    """A copy of a run that is going to be written."""

    version: int
    tree: bytes
    fd: int  # the memory of the tensors; closed when they are written

    @classmethod
    def of(cls, saved: Saved) -> "Snapshot":
        """Copy everything but the positions, which come later.

        Raises SpecError if there is not enough memory, or something in the state can't be saved.
        """
        tree = {part.name: getattr(saved, part.name) for part in fields(saved)}
        del tree["positions"]
        body, fd = pack(tree, "checkpoint")
        return cls(saved.version, body, fd)

    def close(self) -> None:
        """Free its memory."""
        os.close(self.fd)

    def duplicate(self) -> "Snapshot":
        """Return the same snapshot, to be written once more."""
        return self._replace(fd=os.dup(self.fd))


class Archive:
    """The checkpoints of a run in their folder."""

    def __init__(
        self,
        folder: Path,
        say: Callable[[str], None],
        *,
        disk: Disk = DISK,
        start: Callable[[Callable[[], None], str], BackgroundWork] = start_thread,
        first_spoiled: Callable[[dict[str, Any]], str] | None = None,
    ) -> None:
        """`start`: does work in the background; its arguments are the work and a name for it.

        `first_spoiled`: names a tensor of the shard from which no run can continue, "" if there is
        none. A version that has one isn't written.
        """
        self.failure = ""  # why the newest checkpoint could not be written; "": it was
        self._folder = folder
        self._say = say
        self._disk = disk
        self._start = start
        self._first_spoiled = first_spoiled
        self.spoiled = ""  # why a version was not worth saving; "": all were
        self._writing: BackgroundWork | None = None

    def load(self) -> Saved | None:
        """Return the newest intact checkpoint; None if there never was one.

        Raises CheckpointError if there are checkpoints and none is intact.
        """
        files = checkpoint_files(self._folder)
        for path in files:
            try:
                return _read(path)
            except _Damaged as error:
                self._say(f"{error}; setting it aside")
                with suppress(OSError):
                    self._disk.replace(path, path.with_suffix(".damaged"))
        if files or any(self._folder.glob("*.damaged")):  # set aside by an earlier attempt
            raise CheckpointError(f"no checkpoint in {self._folder} is intact; start a new run")
        return None

    def save(
        self,
        snapshot: Snapshot,
        positions: dict[int, bytes],
        sync_trace: Callable[[], None] = lambda: None,
        *,
        renews: bool = False,
    ) -> None:
        """Write a snapshot in the background.

        `sync_trace`: called before the checkpoint appears, because it refers to the trace.
        `renews`: the same snapshot was written before, with fewer positions.
        """
        self.wait()
        work = partial(self._save, snapshot, dict(positions), sync_trace, renews)
        try:
            self._writing = self._start(work, "checkpoint")
        except RuntimeError:  # no more threads: write it here, while the workers wait
            work()

    @property
    def is_writing(self) -> bool:
        """Whether a checkpoint is being written."""
        return self._writing is not None and self._writing.is_alive()

    def wait(self) -> None:
        """Wait until nothing is being written."""
        if self._writing is not None:
            self._writing.join()
            self._writing = None

    def _save(
        self,
        snapshot: Snapshot,
        positions: dict[int, bytes],
        sync_trace: Callable[[], None],
        renews: bool,
    ) -> None:
        path = self._folder / f"{snapshot.version:010}.ckpt"
        try:
            if what := self._spoiled_in(snapshot):
                self.spoiled = self.describe(snapshot.version, what)
                return
            if not self._folder.is_dir():
                self._disk.make_folder(self._folder)
                self._disk.sync_folder(self._folder.parent)
            self._remove(self._folder.glob("*.partial"))  # left by a server that was killed
            with atomic_write(path, disk=self._disk) as file:
                _write(file, snapshot, positions)
                sync_trace()
        except Exception as error:  # a thread that dies would lose the checkpoint silently
            self._fail(snapshot.version, error, renews)
        else:
            self.failure = ""
            self._remove(checkpoint_files(self._folder)[KEPT:])
        finally:
            snapshot.close()

    def _fail(self, version: int, error: Exception, renews: bool) -> None:
        """Say why a checkpoint was not written, and which one stays."""
        newest = self._newest()
        stays = "there is no earlier one" if newest is None else f"keeping that of version {newest}"
        why = (error.strerror if isinstance(error, OSError) else None) or repr(error)
        failure = f"cannot write the checkpoint of version {version}: {why}"
        if not renews:  # otherwise it is as good as the first attempt was
            self.failure = failure
        self._say(f"{failure}; {stays}")

    def _spoiled_in(self, snapshot: Snapshot) -> str:
        if self._first_spoiled is None:
            return ""
        return self._first_spoiled(unpack(snapshot.tree, snapshot.fd, copy=False)["shard"])

    def describe(self, version: int, what: str) -> str:
        """Return why a version is not worth saving: something of it is spoiled."""
        newest = self._newest()
        found = f"{what} contains NaN or infinity in version {version}"
        if newest is None:
            return f"{found}, and there is no checkpoint; lower the learning rate and start again"
        return (
            f"{found}, but not in the checkpoint of version {newest}; resume the run from it and "
            "set a lower learning rate after run.prepare()"
        )

    def _newest(self) -> int | None:
        """Return the version of the newest checkpoint, None if there is none."""
        return next((int(path.stem) for path in checkpoint_files(self._folder)), None)

    def _remove(self, files: Iterable[Path]) -> None:
        """Remove files; a failure costs disk space and does no other harm, so only print it."""
        for path in files:
            try:
                self._disk.unlink(path)
            except OSError as error:
                self._say(f"cannot remove {path}: {error.strerror}")


def _write(file: DiskFile, snapshot: Snapshot, positions: dict[int, bytes]) -> None:
    encoded = msgspec.msgpack.encode(positions)
    size = os.fstat(snapshot.fd).st_size
    check = 0
    file.seek(len(MAGIC) + SIZES.size)
    file.write(snapshot.tree + encoded)
    for offset in range(0, size, _CHUNK):
        chunk = os.pread(snapshot.fd, _CHUNK, offset)
        check = zlib.crc32(chunk, check)
        file.write(chunk)
    file.seek(0)
    plain = zlib.crc32(snapshot.tree + encoded)
    file.write(MAGIC + SIZES.pack(len(snapshot.tree), len(encoded), size, plain, check))


def _read(path: Path) -> Saved:
    """Read what `_write` wrote; raises CheckpointError if it is anything else."""
    try:
        with path.open("rb") as file:
            return _parse(path, file)
    except (CheckpointError, SpecError):  # damaged; or not enough memory for it
        raise
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from None
    except (PacelineError, msgspec.MsgspecError, TypeError) as error:
        raise CheckpointError(f"{path} is not a checkpoint of this release: {error}") from None


def _parse(path: Path, file: BinaryIO) -> Saved:
    head = file.read(len(MAGIC) + SIZES.size)
    if len(head) < len(MAGIC) + SIZES.size or not head.startswith(MAGIC):
        raise _Damaged(f"{path} is damaged, or not a checkpoint of this release")
    tree_bytes, positions_bytes, size, plain, check = SIZES.unpack(head[len(MAGIC) :])
    found_bytes = os.fstat(file.fileno()).st_size
    wanted = len(head) + tree_bytes + positions_bytes + size
    if found_bytes != wanted:
        raise _Damaged(f"{path} is damaged: expected {wanted} bytes, got {found_bytes}")
    tree, encoded = file.read(tree_bytes), file.read(positions_bytes)
    if zlib.crc32(tree + encoded) != plain:
        raise _Damaged(f"{path} is damaged: its checksum is wrong")
    _, fd = Region.create(size, "checkpoint")
    try:
        found = 0
        for offset in range(0, size, _CHUNK):
            chunk = file.read(_CHUNK)
            found = zlib.crc32(chunk, found)
            os.pwrite(fd, chunk, offset)
        if found != check:
            raise _Damaged(f"{path} is damaged: the checksum of its tensors is wrong")
        positions = msgspec.msgpack.decode(encoded, type=dict[int, bytes])
        return Saved(**unpack(tree, fd), positions=positions)
    finally:
        os.close(fd)
