# SPDX-License-Identifier: BSD-3-Clause
"""Read traces: a whole one with `read_trace`, a growing one with `TraceReader`.

This is the only reader of the format. It decodes whole lines only. A strict reader raises
`TraceError` with the number of the first bad line; a tolerant one skips bad lines, because a
growing file may hold a line that a killed server left unfinished.
"""

import os
import zlib
from pathlib import Path
from typing import BinaryIO, TypeVar

import msgspec

from paceline.errors import TraceError
from paceline.trace.schema import FORMAT, NAME, Ended, Header, Record, Trace

__all__ = ["TraceReader", "read_end", "read_trace", "trace_file"]

CHUNK_BYTES = 1 << 20

_BAD_LINE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


class _Format(msgspec.Struct, tag="header"):
    """The part of a header that every version of the format has."""

    paceline_trace: int


class _Checksum(msgspec.Struct, tag="ended"):
    """The part of an `ended` record that says what the file was."""

    checksum: int | None = None


T = TypeVar("T")
_FORMAT = msgspec.json.Decoder(_Format)
_HEADER = msgspec.json.Decoder(Header)
_RECORD = msgspec.json.Decoder(Record)
_CHECKSUM = msgspec.json.Decoder(_Checksum)
_ENDED = b'{"type":"ended"'  # quotes inside of a string are escaped, so this is always a record


class TraceReader:
    """Reads the lines that were added to a trace since the last call of `read`."""

    def __init__(
        self, path: str | os.PathLike[str], *, is_strict: bool = False, is_growing: bool = True
    ) -> None:
        """Prepare to read the file from its beginning.

        `is_strict`: raise `TraceError` for a file that can't be read and for a bad line, instead of
        returning nothing and skipping the line.
        `is_growing`: leave a last line without a newline for the next call.
        """
        self.header: Header | None = None  # None: the first line wasn't read, or is no header
        self.offset = 0  # bytes of the file that were read, whole lines only
        self.checksum = 0  # CRC-32 of these bytes
        self.changed_before = 0  # first line with an `ended` whose checksum doesn't match; 0: none
        self.generation = 0  # grows whenever the file was replaced or truncated
        self._path = Path(path)
        self._is_strict = is_strict
        self._is_growing = is_growing
        self._lines = 0  # read
        self._inode = 0

    def read(self, max_bytes: int | None = None) -> list[Record]:
        """Return the new records, of about `max_bytes`; none only at the end of the file.

        A file that was replaced or truncated is read from its beginning, and `generation` grows:
        what earlier calls returned is then no longer in the file.
        """
        found: list[Record] = []
        try:
            with self._path.open("rb") as file:
                self._check_replaced(file)
                end = None if max_bytes is None else self.offset + max_bytes
                while not found or end is None or self.offset < end:
                    text = self._read_lines(file)
                    if not text:
                        break
                    found += self._decode(text)
                    self.offset += len(text)
        except OSError as error:
            if self._is_strict:
                raise TraceError(f"cannot read {self._path}: {error.strerror}") from None
        return found

    def _check_replaced(self, file: BinaryIO) -> None:
        status = os.fstat(file.fileno())
        if status.st_ino != self._inode or status.st_size < self.offset:
            self.generation += self._inode != 0
            self._inode = status.st_ino
            self.offset = self.checksum = self.changed_before = self._lines = 0
            self.header = None

    def _read_lines(self, file: BinaryIO) -> bytes:
        """Read about a chunk of whole lines; empty at the end."""
        if self._is_growing:
            file.seek(self.offset)  # a complete trace may be a pipe, which can't seek
        text = file.read(CHUNK_BYTES)
        if len(text) == CHUNK_BYTES and not text.endswith(b"\n"):
            text += file.readline(-1 if self._is_strict else CHUNK_BYTES)
        if not self._is_growing:
            return text
        end = text.rfind(b"\n") + 1
        if not end and not self._is_strict and len(text) > CHUNK_BYTES:
            return text  # no record is this long: skip it instead of collecting it in memory
        return text[:end]

    def _decode(self, text: bytes) -> list[Record]:
        self._compare_checksums(text)
        lines = text.splitlines()
        if self.offset == 0 and self._decode_header(lines[0]):
            del lines[0]
            self._lines = 1
        try:
            found = list(map(_RECORD.decode, lines))
        except _BAD_LINE:
            found = self._decode_one_by_one(lines)
        self._lines += len(lines)
        return found

    def _compare_checksums(self, text: bytes) -> None:
        """Compare the lines before each `ended` record with the checksum in it."""
        begin, at = 0, text.find(_ENDED)
        while at >= 0:
            self.checksum = zlib.crc32(text[begin:at], self.checksum)
            begin, end = at, text.find(b"\n", at)
            try:
                expected = _CHECKSUM.decode(text[at : end if end >= 0 else None]).checksum
            except _BAD_LINE:
                expected = None
            if expected not in (None, self.checksum) and not self.changed_before:
                self.changed_before = self._lines + text.count(b"\n", 0, at) + 1
            at = text.find(_ENDED, at + 1)
        self.checksum = zlib.crc32(text[begin:], self.checksum)

    def _decode_header(self, line: bytes) -> bool:
        """Decode the first line; return whether it is a header."""
        try:
            self.header = _header(line, f"{self._path}:1")
        except TraceError:
            if self._is_strict:
                raise
        return self.header is not None

    def _decode_one_by_one(self, lines: list[bytes]) -> list[Record]:
        """Decode lines of which at least one is bad."""
        found = []
        for number, line in enumerate(lines, start=self._lines + 1):
            try:
                found.append(_decode(_RECORD, line, f"{self._path}:{number}"))
            except TraceError:
                if self._is_strict:
                    raise
        return found


def _header(line: bytes, place: str) -> Header:
    version = _decode(_FORMAT, line, f"{place} (the header)").paceline_trace
    if not 1 <= version <= FORMAT:
        raise TraceError(f"{place} has format {version}; this version reads 1 to {FORMAT}")
    return _decode(_HEADER, line, f"{place} (the header)")


def _decode(decoder: "msgspec.json.Decoder[T]", line: bytes, place: str) -> T:
    if not line.strip():
        raise TraceError(f"{place}: the line is empty")
    try:
        return decoder.decode(line)
    except _BAD_LINE as error:
        raise TraceError(f"{place}: {error}") from None


def read_trace(path: str | os.PathLike[str], *, is_growing: bool = False) -> Trace:
    """Read a whole trace; raise `TraceError`, which names the line and the reason, if it is bad.

    `is_growing`: its run still writes it, so the last line may be unfinished.
    """
    reader = TraceReader(path, is_strict=True, is_growing=is_growing)
    records = reader.read()
    if reader.header is None:
        raise TraceError(f"{os.fspath(path)} is empty; a trace begins with its header")
    return Trace(reader.header, records, is_growing, reader.changed_before)


def read_end(path: str | os.PathLike[str]) -> Ended | None:
    """Return the last record of a trace if it says how the run ended; reads only this line."""
    try:
        with Path(path).open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - CHUNK_BYTES))
            last = file.read().rsplit(b"\n", 2)[-2:]
            record = _RECORD.decode(last[0])
    except (OSError, *_BAD_LINE):
        return None
    return record if isinstance(record, Ended) and last[1:] == [b""] else None


def trace_file(path: str | os.PathLike[str]) -> Path:
    """Return the path of a trace: the given file, or the trace in the given run folder."""
    return Path(path, NAME) if Path(path).is_dir() else Path(path)
