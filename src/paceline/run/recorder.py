# SPDX-License-Identifier: BSD-3-Clause
"""Writes the trace of a run while it happens, line by line.

What happens is only noted at first, and becomes lines when nobody waits for the server.
"""

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import msgspec

from paceline.errors import SpecError
from paceline.watch.trace import Header, Record

__all__ = ["Recorder"]


class Recorder:
    """The trace of a run that goes on; whole lines only, flushed now and then."""

    def __init__(self, path: Path, header: Header) -> None:
        self._encode = msgspec.json.Encoder().encode
        self._is_broken = False
        self._given: list[Iterable[Record]] = []
        self._lines: list[bytes] = [self._encode(header)]
        try:
            self._file = path.open("wb", buffering=0)
        except OSError as error:
            raise SpecError(f"cannot write {path}: {error.strerror}") from None

    def write(self, records: Iterable[Record]) -> None:
        """Take these in; they become lines when there is time for it."""
        if not self._is_broken:
            self._given.append(records)

    def catch_up(self) -> None:
        """Make lines of what was taken in."""
        self._lines += [self._encode(record) for records in self._given for record in records]
        self._given.clear()

    def flush(self) -> None:
        """Bring everything to the file; where it cannot be, say so and record no more."""
        self.catch_up()
        left = b"".join([line + b"\n" for line in self._lines])
        self._lines.clear()
        end = self._file.tell()
        try:
            while left and not self._is_broken:
                left = left[self._file.write(left) :]
        except OSError as error:
            self._is_broken = True
            print(f"the trace ends here, for it cannot be written: {error.strerror}", flush=True)
            with suppress(OSError):
                self._file.truncate(end)  # whole lines only

    def close(self) -> None:
        """The run is over."""
        self.flush()
        self._file.close()
