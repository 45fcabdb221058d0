# SPDX-License-Identifier: BSD-3-Clause
"""Write the trace of a run, line by line, while it runs.

Records are collected first, and encoded and written when no worker waits for the server. A run that
continues appends to its trace.
"""

from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from time import time
from typing import Any

import msgspec

from paceline.core.ledger import Origin
from paceline.errors import SpecError, TraceError
from paceline.trace.reader import TraceReader
from paceline.trace.schema import Gradient, Header, Record, Restored, Resumed, Update

__all__ = ["Recorder"]

READ_BYTES = 8 << 20  # read a trace in pieces of this size, to bound the memory it takes
PENDING_MAX = 512  # events that wait to be written, on a server that is never idle


class Recorder:
    """The trace of a run in progress; only complete lines are ever written."""

    def __init__(self, path: Path, header: Header, *, begins_anew: bool = True) -> None:
        """Begin a trace, or continue the existing one and take `turns` and the times from it."""
        self.time = 0.0  # of the last line
        self.began: float | None = None  # when the run began; None: it hasn't
        self.updated: float | None = None  # when the last update was made; None: none was made
        self.reached = 0  # the highest version since the run began or a user resumed it
        self.turns: dict[int, int] = {}  # turns that each worker has had
        self.down_s = 0.0  # how long the run had no server
        self._encode = msgspec.json.Encoder().encode
        self._is_broken = False
        self._pending: list[Iterable[Record]] = []
        self._lines: list[bytes] = []
        try:
            self._file = path.open("wb" if begins_anew else "r+b", buffering=0)
            if not begins_anew:
                self._continue(path)
        except OSError as error:
            raise SpecError(f"cannot write {path}: {error.strerror}") from None
        if self._file.tell() == 0:  # new, or its server was killed before it wrote anything
            self._lines.append(self._encode(header))

    def _continue(self, path: Path) -> None:
        """Move to the end of the last complete line; a killed server may have left half a line."""
        self.down_s = max(0.0, time() - path.stat().st_mtime)
        reader = TraceReader(path, is_strict=True)
        try:
            while records := reader.read(READ_BYTES):
                for record in records:
                    self._read(record)
        except TraceError as error:
            self._file.close()
            raise TraceError(f"{error}; move the file away to continue") from None
        self._file.seek(reader.offset)
        self._file.truncate()

    def _read(self, record: Record) -> None:
        self.time = max(self.time, record.t)
        match record:
            case Resumed() if self.began is None:
                self.began = record.t
            case Update():
                self.updated = record.t
                self.reached = max(self.reached, record.update)
            case Restored() if record.resumed:
                self.reached = record.version
            case Gradient():
                self.turns[record.worker] = max(self.turns.get(record.worker, 0), record.turn)
            case _:
                pass

    def restore(
        self, header: Header, origin: Origin, resumed: bool, data: Sequence[Any] = ()
    ) -> Restored:
        """Record that the run continues from here; `resumed`: because a user resumed it.

        `data`: what is done of each stream of batches.
        """
        if resumed:
            self.reached = origin.version
        restored = Restored(
            t=self.time,
            version=origin.version,
            header=header,
            down_s=self.down_s,
            turns=self.turns,
            memory=origin.memory,
            resumed=resumed,
            samples=origin.samples,
            data=list(data),
        )
        self.write([restored])
        return restored

    def write(self, records: Iterable[Record]) -> None:
        """Record these; they are written when the server is idle."""
        if not self._is_broken:
            self._pending.append(records)
            if len(self._pending) >= PENDING_MAX:
                self.flush()

    def encode_pending(self) -> None:
        """Encode what was recorded since the last call."""
        self._lines += [self._encode(record) for records in self._pending for record in records]
        self._pending.clear()

    def flush(self) -> None:
        """Write everything to the file; if that fails, say so and record no more."""
        self.encode_pending()
        left = b"".join([line + b"\n" for line in self._lines])
        self._lines.clear()
        end = self._file.tell()
        try:
            while left and not self._is_broken:
                left = left[self._file.write(left) :]
        except OSError as error:
            self._is_broken = True
            print(f"cannot write the trace, which ends here: {error.strerror}", flush=True)
            with suppress(OSError):
                self._file.truncate(end)  # no incomplete line

    def close(self) -> None:
        """Write what is left, and close the file."""
        self.flush()
        self._file.close()
