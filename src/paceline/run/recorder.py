# SPDX-License-Identifier: BSD-3-Clause
"""Writes the trace of a run while it happens, line by line."""

from pathlib import Path

import msgspec

from paceline.errors import SpecError
from paceline.watch.trace import Header, Record

__all__ = ["Recorder"]


class Recorder:
    """The trace of a run that goes on; whole lines only, flushed now and then."""

    def __init__(self, path: Path, header: Header) -> None:
        self._encode = msgspec.json.Encoder().encode
        self._lines: list[bytes] = [self._encode(header)]
        try:
            self._file = path.open("wb", buffering=0)
        except OSError as error:
            raise SpecError(f"cannot write {path}: {error.strerror}") from None

    def write(self, records: list[Record]) -> None:
        """Take these in."""
        self._lines += map(self._encode, records)

    def flush(self) -> None:
        """Bring everything to the file."""
        if self._lines:
            self._file.write(b"\n".join(self._lines) + b"\n")
            self._lines.clear()

    def close(self) -> None:
        """The run is over."""
        self.flush()
        self._file.close()
