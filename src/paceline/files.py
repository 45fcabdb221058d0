# SPDX-License-Identifier: BSD-3-Clause
"""Files that appear whole or not at all."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

__all__ = ["written_whole"]


@contextmanager
def written_whole(path: Path, *, alone: bool = True) -> Iterator[Path]:
    """Where to write a file; it is put in its place when that went well, and safe on the disk.

    Whatever is raised meanwhile, an OSError at a full disk say, what was there before stays.
    `alone`: no other process writes it now, so what one that was killed has left is written over.
    """
    own = "" if alone else f".{os.getpid()}"
    partial = path.with_name(f".{path.name}{own}.partial")
    try:
        yield partial
        with partial.open("rb") as file:
            os.fsync(file.fileno())
        partial.replace(path)
        _sync_folder(path.parent)
    except BaseException:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        raise


def _sync_folder(folder: Path) -> None:
    """Sync a folder, so that the names in it survive a crash."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
