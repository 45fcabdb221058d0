# SPDX-License-Identifier: BSD-3-Clause
"""Write the trace of a run, line by line, while it runs.

Records are collected first, and encoded and written when no worker waits for the server. A run that
continues appends to its trace.

If the disk is full, records are lost. As soon as there is space again, a `Gap` says what is
missing and where the run is, and recording goes on. The last record has a checksum of all lines
before it, and each checkpoint has one of the trace so far, so no part of a trace can get lost
unnoticed.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from time import time
from typing import Any, NamedTuple
from zlib import crc32

import msgspec

from paceline.core.ledger import Origin
from paceline.errors import SpecError, TraceError
from paceline.files import DISK, Disk
from paceline.trace.reader import TraceReader
from paceline.trace.schema import Ended, Gap, Gradient, Header, Record, Restored, Resumed, Update

__all__ = ["Mark", "Recorder"]

READ_BYTES = 8 << 20  # read a trace in pieces of this size, to bound the memory it takes
PENDING_MAX = 512  # events that wait to be written, on a server that is never idle


class Mark(NamedTuple):
    """What a trace had reached: its first bytes, and their CRC-32."""

    size_bytes: int = 0
    checksum: int = 0


class Recorder:
    """The trace of a run in progress; only complete lines are ever written."""

    def __init__(
        self,
        path: Path,
        header: Header,
        *,
        begins_anew: bool = True,
        disk: Disk = DISK,
        wall_clock: Callable[[], float] = time,
    ) -> None:
        """Begin a trace, or continue the existing one and take `turns` and the times from it."""
        self.time = 0.0  # of the last line
        self.began: float | None = None  # when the run began; None: it hasn't
        self.updated: float | None = None  # when the last update was made; None: none was made
        self.reached = 0  # the highest version since the run began or a user resumed it
        self.turns: dict[int, int] = {}  # turns that each worker has had
        self.down_s = 0.0  # how long the run had no server
        self.mark = Mark()  # what is in the file
        self.failure = ""  # why nothing can be written at the moment; "": everything is written
        self._version = 0  # of the last line
        self._path = path
        self._encode = msgspec.json.Encoder().encode
        self._pending: list[Iterable[Record]] = []
        self._lines: list[bytes] = []
        self._first: list[bytes] = []  # written before any other line, even if records are lost
        self._has_ended = False  # the last record was written
        self._lost = 0  # records that could not be written since the last failure
        try:
            if not begins_anew:
                self.down_s = max(0.0, wall_clock() - disk.modified_at(path))
            self._file = disk.open(path, "wb" if begins_anew else "r+b")
            if begins_anew:
                disk.sync_folder(path.parent)
            else:
                self._continue(path)
        except OSError as error:
            raise SpecError(f"cannot write {path}: {error.strerror}") from None
        if not self.mark.size_bytes:  # new, or its server was killed before it wrote anything
            self._first.append(self._encode(header))

    def _continue(self, path: Path) -> None:
        """Move to the end of the last complete line; a killed server may have left half a line."""
        reader = TraceReader(path, is_strict=True)
        try:
            while records := reader.read(READ_BYTES):
                for record in records:
                    self._read(record)
        except TraceError as error:
            self._file.close()
            raise TraceError(f"{error}; move the file away to continue") from None
        self.mark = Mark(reader.offset, reader.checksum)
        self._file.seek(reader.offset)
        self._file.truncate()

    def _read(self, record: Record) -> None:
        self.time = max(self.time, record.t)
        match record:
            case Resumed() if self.began is None:
                self.began = record.t
            case Update():
                self.updated = record.t
                self._reach(record.update)
            case Gap():
                self._reach(record.version)
                if record.ledger is not None:
                    if record.ledger.begun and self.began is None:
                        self.began = record.t
                    for worker, turn in record.ledger.turns.items():
                        self.turns[worker] = max(self.turns.get(worker, 0), turn)
            case Restored():
                self._version = record.version
                if record.resumed:
                    self.reached = record.version
            case Gradient():
                self.turns[record.worker] = max(self.turns.get(record.worker, 0), record.turn)
            case _:
                pass

    def _reach(self, version: int) -> None:
        self._version = version
        self.reached = max(self.reached, version)

    def holds(self, version: int, mark: Mark) -> bool:
        """Return whether the trace still has everything that it had at this checkpoint."""
        if self._version < version or self.mark.size_bytes < mark.size_bytes:
            return False
        with self._path.open("rb") as file:
            left, checksum = mark.size_bytes, 0
            while chunk := file.read(min(left, READ_BYTES)):
                left, checksum = left - len(chunk), crc32(chunk, checksum)
        return checksum == mark.checksum

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
        self._first.append(self._encode(restored))
        return restored

    def note_gap(self, origin: Origin, data: list[Any]) -> None:
        """Record, before `restore`, that the trace lacks what it had at this checkpoint."""
        self.reached = max(self.reached, origin.version)
        gap = Gap(self.time, origin.version, origin.samples, data=data)
        self._first.append(self._encode(gap))

    def write(self, records: Iterable[Record]) -> None:
        """Record these, unless the end was written; they are written when the server is idle."""
        if self._has_ended:
            return
        self._pending.append(records)
        if len(self._pending) >= PENDING_MAX:
            self.flush()

    def encode_pending(self) -> None:
        """Encode what was recorded since the last call."""
        self._lines += [self._encode(record) for records in self._pending for record in records]
        self._pending.clear()

    def flush(self) -> None:
        """Write everything to the file; if that fails, say so, and count what is lost."""
        if self._has_ended:
            return
        self.encode_pending()
        lines, self._lines = self._lines, []
        if not self.failure and not self._append(lines):
            print(f"cannot write the trace, records are lost: {self.failure}", flush=True)
        if self.failure:
            self._lost += len(lines)

    def resume(self, gap: Gap) -> None:
        """Try to write again after a failure; begin with this record of what is missing."""
        if self._has_ended:
            return
        self.flush()
        if self._append([self._encode(msgspec.structs.replace(gap, records=self._lost))]):
            print(f"recording again; the trace lacks {self._lost:,} records", flush=True)
            self._lost = 0

    def end(self, ended: Ended, gap: Gap) -> str:
        """Write the last record, and close the file; return why that failed, "" if it didn't.

        `gap`: where the run is, in case that records are missing.
        """
        self.flush()
        if self.failure:
            self.resume(gap)
        if not self.failure:
            ended = msgspec.structs.replace(ended, checksum=self.mark.checksum)
            self._append([self._encode(ended)])
        self.close()
        self._has_ended = True
        return self.failure and f"cannot write the end of the trace: {self.failure}"

    def sync(self) -> None:
        """Wait until what was written survives a power failure; any thread may call this.

        Raises OSError.
        """
        self._file.sync()

    def close(self) -> None:
        """Write what is left, sync it, and close the file."""
        self.flush()
        try:
            self.sync()
        except OSError as error:
            self.failure = self.failure or error.strerror or str(error)
        self._file.close()

    def _append(self, lines: list[bytes]) -> bool:
        """Write these lines after the first ones; return whether that succeeded."""
        text = b"".join([line + b"\n" for line in (*self._first, *lines)])
        end = self.mark.size_bytes
        try:
            if self.failure:
                self._file.truncate(end)  # of an incomplete line
                self._file.seek(end)
            if text:
                self._file.write(text)
        except OSError as error:
            self.failure = error.strerror or str(error)
            with suppress(OSError):
                self._file.truncate(end)
            return False
        self.failure = ""
        self._first.clear()
        self.mark = Mark(end + len(text), crc32(text, self.mark.checksum))
        return True
