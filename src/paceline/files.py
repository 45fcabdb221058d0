# SPDX-License-Identifier: BSD-3-Clause
"""Write files: plainly through a `Disk`, or atomically, so that readers see all of a file or none.

Everything that a run writes, apart from the output of its processes, goes through a `Disk`. Tests
replace it with one that is full, slow, or loses what wasn't synced. Readers use the paths directly.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

__all__ = ["DISK", "Disk", "DiskFile", "atomic_write"]


class DiskFile(FileIO):
    """A file to write to; nothing is buffered."""

    def write(self, data: "ReadableBuffer", /) -> int:
        """Write all of the data; if this raises OSError, a part of it may have been written."""
        left = whole = memoryview(data).cast("B")
        while left:
            left = left[super().write(left) :]
        return len(whole)

    def sync(self) -> None:
        """Wait until what was written survives a power failure; any thread may call this."""
        os.fsync(self.fileno())


class Disk:
    """The disk of this machine; any method may raise OSError."""

    def open(
        self, path: Path, mode: Literal["wb", "xb", "r+b"], permissions: int = 0o666
    ) -> DiskFile:
        """Open a file to write to; the modes are Python's."""
        return DiskFile(path, mode, opener=partial(os.open, mode=permissions))

    def replace(self, source: Path, target: Path) -> None:
        """Move a file to another name, which may exist."""
        source.replace(target)

    def unlink(self, path: Path) -> None:
        """Remove a file, if it exists."""
        path.unlink(missing_ok=True)

    def make_folder(self, path: Path) -> None:
        """Create a folder, unless it exists."""
        path.mkdir(exist_ok=True)

    def sync_folder(self, path: Path) -> None:
        """Wait until the names in a folder survive a power failure."""
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def modified_at(self, path: Path) -> float:
        """Return when a file was last written, as `time.time` counts."""
        return path.stat().st_mtime


DISK = Disk()


@contextmanager
def atomic_write(path: Path, *, alone: bool = True, disk: Disk = DISK) -> Iterator[DiskFile]:
    """Yield a file with a temporary name; on success, sync it and move it to `path`.

    If the block raises, for example OSError because the disk is full, the old file stays as it is.
    Pass `alone=False` if several processes may write the same file at once: each then uses a
    temporary file of its own. With `alone=True` the leftover of a killed process is overwritten.
    """
    own = "" if alone else f".{os.getpid()}"
    unfinished = path.with_name(f".{path.name}{own}.partial")
    try:
        with disk.open(unfinished, "wb") as file:
            yield file
            file.sync()
        disk.replace(unfinished, path)
        disk.sync_folder(path.parent)
    except BaseException:
        with suppress(OSError):
            disk.unlink(unfinished)
        raise
