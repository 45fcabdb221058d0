# SPDX-License-Identifier: BSD-3-Clause
"""The files of a data set: where they lie, and where they come from when they do not.

A folder for data has a folder for each data set. A file that is missing there is fetched, checked
by its SHA-256, and only then put in its place. One that is there is not checked as a whole, for
that costs more than reading it: whoever reads it says what is wrong with it.
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
from paceline.files import written_whole

__all__ = ["Progress", "Source", "damaged", "locate", "read"]

SILENCE_S = 60.0  # of the other side, until it is given up
_CHUNK = 1 << 20

Progress = Callable[[int, int | None], None]
"""Called with the bytes so far, and all that there will be where the other side has told."""


@dataclass(frozen=True)
class Source:
    """A file of a data set."""

    path: str  # in the folder for data, such as "mnist/train-labels-idx1-ubyte.gz"
    url: str  # where its owners offer it
    sha256: str  # of what they offer
    others: tuple[str, ...] = ()  # paths of the same, otherwise packed: these will do as well


def locate(folder: Path, source: Source, progress: Progress | None = None) -> Path:
    """The file in the folder for data; fetched if it is not there. Raises SpecError."""
    for path in (source.path, *source.others):
        if _is_there(folder / path):
            return folder / path
    missing = f"{source.path} is not in {folder}"
    place = folder / source.path
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SpecError(
            f"{missing}, where nothing can be written ({error.strerror}); name a folder that has "
            "it with --data DIR"
        ) from error
    try:
        with written_whole(place, alone=False) as partial, partial.open("wb") as file:
            found = _download(source.url, file, progress or _nobody)
            if found != source.sha256:
                raise SpecError(
                    f"{missing}, and what {source.url} gives has the SHA-256 {found} instead of "
                    f"{source.sha256}: nothing was kept; name a folder that has it with --data DIR"
                )
    except (OSError, HTTPException) as error:
        raise SpecError(
            f"{missing}, and could not be fetched from {source.url} ({_reason(error)}); "
            "name a folder that has it with --data DIR"
        ) from error
    return place


def damaged(path: Path, why: str) -> SpecError:
    """The error for a file that is not what it should be."""
    return SpecError(f"{path} is damaged: {why}; delete it, and it will be fetched again")


def read(path: Path) -> bytes:
    """All that is in a file, unpacked where its name ends in .gz. Raises SpecError."""
    try:
        data = path.read_bytes()
        unpacked = gzip.decompress(data) if path.suffix == ".gz" else data
    except (OSError, EOFError, zlib.error) as error:
        raise damaged(path, str(error)) from error
    if not unpacked:
        raise damaged(path, "it is empty")
    return unpacked


def _is_there(path: Path) -> bool:
    try:
        path.open("rb").close()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise SpecError(f"{path} cannot be read ({error.strerror})") from error
    return True


def _download(url: str, file: BinaryIO, progress: Progress) -> str:
    """Write what lies there to a file, and tell its SHA-256."""
    digest, size = hashlib.sha256(), 0
    try:
        answer = urlopen(url, timeout=SILENCE_S)
    except HTTPError as error:
        error.close()  # or the connection stays open for as long as anyone looks at the error
        raise
    with answer:
        told = answer.headers.get("Content-Length", "")
        total = int(told) if told.isdecimal() else None
        progress(0, total)
        while chunk := answer.read(_CHUNK):
            file.write(chunk)
            digest.update(chunk)
            size += len(chunk)
            progress(size, total)
    if total is not None and size < total:
        raise OSError(f"it ended after {size} of {total} bytes")
    return digest.hexdigest()


def _nobody(size: int, total: int | None) -> None:
    """Where nobody wants to know."""


def _reason(error: Exception) -> str:
    """Why, without the name of Python's library around it."""
    if isinstance(error, URLError) and not isinstance(error, HTTPError):
        return str(error.reason)
    return str(error) or type(error).__name__
