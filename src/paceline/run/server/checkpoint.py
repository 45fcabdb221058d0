# SPDX-License-Identifier: BSD-3-Clause
"""Checkpoints: what a run needs to continue, in files that are complete or don't exist.

A file has a magic line, lengths and checksums, a tree of plain values (msgpack, no pickle), the
workers' positions in their data, and the tensors. It is written under a temporary name, synced and
renamed; the previous checkpoint stays until the new one exists. Checksums reveal a file that is
damaged anyway; it is set aside, and the previous checkpoint is used.

A thread writes the file. It only handles bytes that were copied for it and that nothing else uses.
"""

import os
import struct
import zlib
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field, fields
from pathlib import Path
from threading import Thread
from typing import Any, BinaryIO, NamedTuple

import msgspec

from paceline.errors import CheckpointError, PacelineError, SpecError
from paceline.files import atomic_write
from paceline.run.tensors.shared_region import Region
from paceline.run.tensors.state_packing import pack, unpack

__all__ = ["KEPT", "Archive", "Saved", "Snapshot"]

KEPT = 2  # so that there is one to fall back on
MAGIC = b"paceline checkpoint 1\n"
_SIZES = struct.Struct("<QQQII")  # bytes of tree, positions, tensors; checksums of the two, tensors
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


class Snapshot(NamedTuple):
    """A copy of a run that is going to be written."""

    version: int
    tree: bytes
    fd: int  # the memory of the tensors; closed when they are written

    @classmethod
    def of(cls, saved: Saved) -> "Snapshot":
        """Copy everything but the positions, which come later.

        Raises SpecError if there is not enough memory.
        """
        tree = {part.name: getattr(saved, part.name) for part in fields(saved)}
        del tree["positions"]
        body, fd = pack(tree, "checkpoint")
        return cls(saved.version, body, fd)

    def duplicate(self) -> "Snapshot":
        """Return the same snapshot, to be written once more."""
        return self._replace(fd=os.dup(self.fd))


class Archive:
    """The checkpoints of a run in their folder."""

    def __init__(self, folder: Path, say: Callable[[str], None]) -> None:
        self._folder = folder
        self._say = say
        self._thread: Thread | None = None

    def load(self) -> Saved | None:
        """Return the newest intact checkpoint; None if there never was one.

        Raises CheckpointError if there are checkpoints and none is intact.
        """
        files = self._files()
        for path in files:
            try:
                return _read(path)
            except _Damaged as error:
                self._say(f"{error}; setting it aside")
                with suppress(OSError):
                    path.rename(path.with_suffix(".damaged"))
        if files or any(self._folder.glob("*.damaged")):  # set aside by an earlier attempt
            raise CheckpointError(f"no checkpoint in {self._folder} is intact; start a new run")
        return None

    def save(self, snapshot: Snapshot, positions: dict[int, bytes]) -> None:
        """Write a snapshot in the background."""
        self.wait()
        thread = Thread(target=self._save, args=(snapshot, dict(positions)), name="checkpoint")
        try:
            thread.start()
        except RuntimeError:  # no more threads: write it here, while the workers wait
            self._save(snapshot, positions)
        else:
            self._thread = thread

    @property
    def is_writing(self) -> bool:
        """Whether a checkpoint is being written."""
        return self._thread is not None and self._thread.is_alive()

    def wait(self) -> None:
        """Wait until nothing is being written."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _save(self, snapshot: Snapshot, positions: dict[int, bytes]) -> None:
        path = self._folder / f"{snapshot.version:010}.ckpt"
        try:
            self._folder.mkdir(exist_ok=True)
            self._remove(self._folder.glob("*.partial"))  # left by a server that was killed
            with atomic_write(path) as partial:
                _write(partial, snapshot, positions)
        except OSError as error:
            before = [int(old.stem) for old in self._files()]
            stays = f"keeping that of version {before[0]}" if before else "there is no earlier one"
            self._say(
                f"cannot write the checkpoint of version {snapshot.version}: "
                f"{error.strerror}; {stays}"
            )
        else:
            self._remove(self._files()[KEPT:])
        finally:
            os.close(snapshot.fd)

    def _remove(self, files: Iterable[Path]) -> None:
        """Remove files; a failure costs disk space and does no other harm, so only print it."""
        for path in files:
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                self._say(f"cannot remove {path}: {error.strerror}")

    def _files(self) -> list[Path]:
        """Return the checkpoint files, newest first."""
        found = [path for path in self._folder.glob("*.ckpt") if path.stem.isdecimal()]
        return sorted(found, key=lambda path: int(path.stem), reverse=True)


def _write(path: Path, snapshot: Snapshot, positions: dict[int, bytes]) -> None:
    encoded = msgspec.msgpack.encode(positions)
    size = os.fstat(snapshot.fd).st_size
    check = 0
    with path.open("wb", buffering=0) as file:
        file.seek(len(MAGIC) + _SIZES.size)
        _write_all(file.fileno(), snapshot.tree + encoded)
        for offset in range(0, size, _CHUNK):
            chunk = os.pread(snapshot.fd, _CHUNK, offset)
            check = zlib.crc32(chunk, check)
            _write_all(file.fileno(), chunk)
        file.seek(0)
        plain = zlib.crc32(snapshot.tree + encoded)
        head = _SIZES.pack(len(snapshot.tree), len(encoded), size, plain, check)
        _write_all(file.fileno(), MAGIC + head)


def _write_all(fd: int, data: bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[os.write(fd, left) :]


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
    head = file.read(len(MAGIC) + _SIZES.size)
    if len(head) < len(MAGIC) + _SIZES.size or not head.startswith(MAGIC):
        raise _Damaged(f"{path} is damaged, or not a checkpoint of this release")
    tree_bytes, positions_bytes, size, plain, check = _SIZES.unpack(head[len(MAGIC) :])
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
