# SPDX-License-Identifier: BSD-3-Clause
"""Writes the trace of a run while it happens, line by line.

What happens is only noted at first, and becomes lines when nobody waits for the server. Where a
trace is there already, the run goes on, and so does its trace.
"""

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from time import time

import msgspec

from paceline.core.ledger import Origin
from paceline.errors import SpecError, TraceError
from paceline.trace.reader import TraceReader
from paceline.trace.schema import Gradient, Header, Record, Restored, Resumed, Update

__all__ = ["Recorder"]

READ_BYTES = 8 << 20  # of a trace at once, so that memory doesn't grow with it
MOST = 512  # events that wait to become lines, on a server that is never quiet


class Recorder:
    """The trace of a run that goes on; whole lines only, flushed now and then."""

    def __init__(self, path: Path, header: Header, *, begins_anew: bool = True) -> None:
        """Begin a trace, or go on with one that is there: then `turns` and the times are its."""
        self.time = 0.0  # of the last line
        self.began: float | None = None  # when the first update was begun; None: none was
        self.updated: float | None = None  # when the last update was made; None: none was
        self.turns: dict[int, int] = {}  # how many pieces of work each worker has had
        self.down_s = 0.0  # for how long nobody has written
        self._encode = msgspec.json.Encoder().encode
        self._is_broken = False
        self._given: list[Iterable[Record]] = []
        self._lines: list[bytes] = []
        try:
            self._file = path.open("wb" if begins_anew else "r+b", buffering=0)
            if not begins_anew:
                self._go_on(path)
        except OSError as error:
            raise SpecError(f"cannot write {path}: {error.strerror}") from None
        if self._file.tell() == 0:  # also where a server was killed before it wrote anything
            self._lines.append(self._encode(header))

    def _go_on(self, path: Path) -> None:
        """Be at the end of the last whole line; its server may have been killed while it wrote."""
        self.down_s = max(0.0, time() - path.stat().st_mtime)
        reader = TraceReader(path, is_strict=True)
        try:
            while records := reader.read(READ_BYTES):
                for record in records:
                    self._take_in(record)
        except TraceError as error:
            self._file.close()
            raise TraceError(f"{error}; move the file away to go on") from None
        self._file.seek(reader.offset)
        self._file.truncate()

    def _take_in(self, record: Record) -> None:
        self.time = max(self.time, record.t)
        match record:
            case Resumed() if self.began is None:
                self.began = record.t
            case Update():
                self.updated = record.t
            case Gradient():
                self.turns[record.worker] = max(self.turns.get(record.worker, 0), record.turn)
            case _:
                pass

    def restore(self, header: Header, origin: Origin, resumed: bool) -> Restored:
        """Record that the run continues from here; `resumed`: because a user resumed it."""
        restored = Restored(
            t=self.time,
            version=origin.version,
            header=header,
            down_s=self.down_s,
            turns=self.turns,
            memory=origin.memory,
            resumed=resumed,
            samples=origin.samples,
        )
        self.write([restored])
        return restored

    def write(self, records: Iterable[Record]) -> None:
        """Take these in; they become lines when there is time for it."""
        if not self._is_broken:
            self._given.append(records)
            if len(self._given) >= MOST:
                self.flush()

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
