# SPDX-License-Identifier: BSD-3-Clause
"""Checkpoints: what a run needs to go on, in files that are whole or not there at all.

A file has a magic line, lengths and checksums, a tree of plain values (msgpack, no pickle), the
workers' places in their data, and the tensors. It is written beside its place, brought to the disk,
and then renamed; the checkpoint before it stays until another has taken its place. A file that is
torn all the same is found by its checksums, put aside, and the one before it is taken.

Writing happens on a thread that only moves bytes: they were copied before, and belong to nobody.
"""

import os
import struct
import zlib
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from threading import Thread
from typing import Any, BinaryIO, NamedTuple

import msgspec

from paceline.errors import CheckpointError, PacelineError, SpecError
from paceline.run.tensors.region import Region
from paceline.run.tensors.state import pack, unpack

__all__ = ["KEPT", "Archive", "Saved", "Snapshot"]

KEPT = 2  # so that there is one to fall back on
MAGIC = b"paceline checkpoint 1\n"
_SIZES = struct.Struct("<QQQII")  # bytes of tree, places, tensors; checksums of the plain, tensors
_CHUNK = 8 << 20


class _Torn(CheckpointError):
    """A file is not what was written."""


@dataclass(frozen=True)
class Saved:
    """A run between two updates; plain values and tensors."""

    version: int
    samples: int  # that came into updates
    options: list[Any]  # what scripts have changed in the settings of the optimizers
    memory: Any  # what the policy remembers
    shard: dict[str, Any]
    places: dict[int, bytes]  # of the workers in their data, as each of them tells it


class Snapshot(NamedTuple):
    """A copy of a run, on its way to the disk."""

    version: int
    tree: bytes
    fd: int  # where the tensors lie; closed when they are written

    @classmethod
    def of(cls, saved: Saved) -> "Snapshot":
        """Copy everything but the places, which come later; raises SpecError without memory."""
        tree = {part.name: getattr(saved, part.name) for part in fields(saved)}
        del tree["places"]
        body, fd = pack(tree, "checkpoint")
        return cls(saved.version, body, fd)

    def twin(self) -> "Snapshot":
        """The same, to be written once more."""
        return self._replace(fd=os.dup(self.fd))


class Archive:
    """The checkpoints of a run, in their folder."""

    def __init__(self, folder: Path, say: Callable[[str], None]) -> None:
        self._folder = folder
        self._say = say
        self._thread: Thread | None = None

    def load(self) -> Saved | None:
        """The newest that is sound, None if there never was one; raises CheckpointError."""
        files = self._files()
        for path in files:
            try:
                return _read(path)
            except _Torn as error:
                self._say(f"{error}; it is put aside")
                with suppress(OSError):
                    path.rename(path.with_suffix(".torn"))
        if files or any(self._folder.glob("*.torn")):  # when this was tried before
            raise CheckpointError(f"no checkpoint in {self._folder} is whole; begin a new run")
        return None

    def save(self, snapshot: Snapshot, places: dict[int, bytes]) -> None:
        """Write it in the background."""
        self.wait()
        thread = Thread(target=self._save, args=(snapshot, dict(places)), name="checkpoint")
        try:
            thread.start()
        except RuntimeError:  # the system will not have one more: so everybody waits
            self._save(snapshot, places)
        else:
            self._thread = thread

    @property
    def is_writing(self) -> bool:
        """Whether a checkpoint is on its way."""
        return self._thread is not None and self._thread.is_alive()

    def wait(self) -> None:
        """Until nothing is on its way."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _save(self, snapshot: Snapshot, places: dict[int, bytes]) -> None:
        path = self._folder / f"{snapshot.version:010}.ckpt"
        partial = path.with_suffix(".partial")
        try:
            self._folder.mkdir(exist_ok=True)
            self._remove(self._folder.glob("*.partial"))  # of a server that was killed
            _write(partial, snapshot, places)
            partial.replace(path)
            _bring_to_disk(self._folder)
        except OSError as error:
            with suppress(OSError):
                partial.unlink(missing_ok=True)
            before = [int(old.stem) for old in self._files()]
            stays = f"that of version {before[0]} stays" if before else "there is none before it"
            self._say(
                f"the checkpoint of version {snapshot.version} cannot be written: "
                f"{error.strerror}; {stays}"
            )
        else:
            self._remove(self._files()[KEPT:])
        finally:
            os.close(snapshot.fd)

    def _remove(self, files: Iterable[Path]) -> None:
        """Make room; what stays in spite of it does no harm but to the disk."""
        for path in files:
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                self._say(f"{path} cannot be removed: {error.strerror}")

    def _files(self) -> list[Path]:
        """The newest first."""
        found = [path for path in self._folder.glob("*.ckpt") if path.stem.isdecimal()]
        return sorted(found, key=lambda path: int(path.stem), reverse=True)


def _write(path: Path, snapshot: Snapshot, places: dict[int, bytes]) -> None:
    told = msgspec.msgpack.encode(places)
    size = os.fstat(snapshot.fd).st_size
    check = 0
    with path.open("wb", buffering=0) as file:
        file.seek(len(MAGIC) + _SIZES.size)
        _write_all(file.fileno(), snapshot.tree + told)
        for offset in range(0, size, _CHUNK):
            chunk = os.pread(snapshot.fd, _CHUNK, offset)
            check = zlib.crc32(chunk, check)
            _write_all(file.fileno(), chunk)
        file.seek(0)
        plain = zlib.crc32(snapshot.tree + told)
        head = _SIZES.pack(len(snapshot.tree), len(told), size, plain, check)
        _write_all(file.fileno(), MAGIC + head)
        os.fsync(file.fileno())


def _write_all(fd: int, data: bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[os.write(fd, left) :]


def _bring_to_disk(folder: Path) -> None:
    """A name is safe when its folder is."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _read(path: Path) -> Saved:
    """Read what `_write` wrote; raises CheckpointError, whatever is there."""
    try:
        with path.open("rb") as file:
            return _parse(path, file)
    except (CheckpointError, SpecError):  # it is torn; there is no memory for it
        raise
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from None
    except (PacelineError, msgspec.MsgspecError, TypeError) as error:
        raise CheckpointError(f"{path} is not a checkpoint of this release: {error}") from None


def _parse(path: Path, file: BinaryIO) -> Saved:
    head = file.read(len(MAGIC) + _SIZES.size)
    if len(head) < len(MAGIC) + _SIZES.size or not head.startswith(MAGIC):
        raise _Torn(f"{path} is torn, or not a checkpoint of this release")
    tree_bytes, places_bytes, size, plain, check = _SIZES.unpack(head[len(MAGIC) :])
    there = os.fstat(file.fileno()).st_size
    wanted = len(head) + tree_bytes + places_bytes + size
    if there != wanted:
        raise _Torn(f"{path} is torn: it has {there} bytes and should have {wanted}")
    tree, told = file.read(tree_bytes), file.read(places_bytes)
    if zlib.crc32(tree + told) != plain:
        raise _Torn(f"{path} is torn: its checksum does not fit")
    _, fd = Region.create(size, "checkpoint")
    try:
        found = 0
        for offset in range(0, size, _CHUNK):
            chunk = file.read(_CHUNK)
            found = zlib.crc32(chunk, found)
            os.pwrite(fd, chunk, offset)
        if found != check:
            raise _Torn(f"{path} is torn: the checksum of its tensors does not fit")
        places = msgspec.msgpack.decode(told, type=dict[int, bytes])
        return Saved(**unpack(tree, fd), places=places)
    finally:
        os.close(fd)
