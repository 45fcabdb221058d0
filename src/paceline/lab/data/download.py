# SPDX-License-Identifier: BSD-3-Clause
"""Find the files of a data set, and download those that are missing.

The data folder has one folder per data set. A missing file is downloaded, checked against its
SHA-256, and only then moved into place. A file that exists isn't checked as a whole, because that
takes longer than reading it: the module that reads the file reports what is wrong with it.
"""

import gzip
import hashlib
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import BinaryIO
from urllib.error import HTTPError, URLError
from urllib.request import urlopen

from paceline.errors import SpecError
from paceline.files import atomic_write

__all__ = ["DownloadProgress", "Source", "damaged_file", "locate", "read_file"]

TIMEOUT_S = 60.0  # without a byte from the server
_CHUNK = 1 << 20

DownloadProgress = Callable[[int, int | None], None]
"""Called with the bytes so far, and with the total if the server has announced it."""


@dataclass(frozen=True)
class Source:
    """A file of a data set."""

    path: str  # in the data folder, such as "mnist/train-labels-idx1-ubyte.gz"
    url: str  # the official source
    sha256: str  # of the official file
    others: tuple[str, ...] = ()  # paths of the same data in another packing, used if present


def locate(folder: Path, source: Source, progress: DownloadProgress | None = None) -> Path:
    """Return the path of the file, and download it if it is missing; raises SpecError."""
    for path in (source.path, *source.others):
        if _exists(folder / path):
            return folder / path
    missing = f"{source.path} is not in {folder}"
    destination = folder / source.path
    try:
        destination.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SpecError(
            f"{missing}, and that folder is not writable ({error.strerror}); name a folder that "
            "has the file with --data DIR"
        ) from error
    try:
        with atomic_write(destination, alone=False) as file:
            found = _download(source.url, file, progress or _ignore_progress)
            if found != source.sha256:
                raise SpecError(
                    f"{missing}, and {source.url} has the wrong content: expected SHA-256 "
                    f"{source.sha256}, got {found}; name a folder that has the file with --data DIR"
                )
    except (OSError, HTTPException) as error:
        raise SpecError(
            f"{missing}, and downloading {source.url} failed ({_reason(error)}); "
            "name a folder that has the file with --data DIR"
        ) from error
    return destination


def damaged_file(path: Path, why: str) -> SpecError:
    """Return the error for a file with unexpected content."""
    return SpecError(f"{path} is damaged: {why}; delete it, and it will be downloaded again")


def read_file(path: Path) -> bytes:
    """Return the content of a file, unpacked if its name ends in .gz; raises SpecError."""
    try:
        data = path.read_bytes()
        unpacked = gzip.decompress(data) if path.suffix == ".gz" else data
    except (OSError, EOFError, zlib.error) as error:
        raise damaged_file(path, str(error)) from error
    if not unpacked:
        raise damaged_file(path, "it is empty")
    return unpacked


def _exists(path: Path) -> bool:
    try:
        path.open("rb").close()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise SpecError(f"cannot read {path} ({error.strerror})") from error
    return True


def _download(url: str, file: BinaryIO, progress: DownloadProgress) -> str:
    """Write what the URL returns to a file, and return its SHA-256."""
    digest, size = hashlib.sha256(), 0
    try:
        response = urlopen(url, timeout=TIMEOUT_S)
    except HTTPError as error:
        error.close()  # otherwise the connection stays open as long as the error is referenced
        raise
    with response:
        length = response.headers.get("Content-Length", "")
        total = int(length) if length.isdecimal() else None
        progress(0, total)
        while chunk := response.read(_CHUNK):
            file.write(chunk)
            digest.update(chunk)
            size += len(chunk)
            progress(size, total)
    if total is not None and size < total:
        raise OSError(f"it ended after {size} of {total} bytes")
    return digest.hexdigest()


def _ignore_progress(size: int, total: int | None) -> None:
    """Do nothing."""


def _reason(error: Exception) -> str:
    """Return why a download failed, without urllib's wrapping."""
    if isinstance(error, URLError) and not isinstance(error, HTTPError):
        return str(error.reason)
    return str(error) or type(error).__name__
