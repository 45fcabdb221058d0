# SPDX-License-Identifier: BSD-3-Clause
"""Write files atomically: readers see the whole file or none of it."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

__all__ = ["atomic_write"]


@contextmanager
def atomic_write(path: Path, *, alone: bool = True) -> Iterator[Path]:
    """Yield a temporary path to write to; on success, sync it to disk and move it to `path`.

    If the block raises, for example OSError because the disk is full, the old file stays as it is.
    Pass `alone=False` if several processes may write the same file at once: each then uses a
    temporary file of its own. With `alone=True` the leftover of a killed process is overwritten.
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
