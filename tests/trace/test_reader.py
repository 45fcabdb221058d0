# SPDX-License-Identifier: BSD-3-Clause
"""Read whole and growing traces: bad lines, unfinished lines, and files that were replaced."""

import os
import re
from contextlib import suppress
from itertools import chain
from pathlib import Path
from threading import Thread

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.events import Fate
from paceline.errors import TraceError
from paceline.trace import reader as reader_module
from paceline.trace.reader import TraceReader, read_end, read_trace, trace_file
from paceline.trace.schema import (
    FORMAT,
    Ended,
    Gradient,
    Header,
    Joined,
    Record,
    Resumed,
    Trace,
    Update,
)

HEADER = Header(source="sim", policy="sync", workers=1)
RECORDS: list[Record] = [
    Joined(0.0, 0),
    Resumed(0.0),
    Gradient(1.0, 0, 1, 0, Fate.ACCEPTED, 0, 0.0, 1.0),
    Update(1.0, 1, (0,), 1),
    Ended(1.0, 1),
]


def line(record: Header | Record) -> bytes:
    """Return the line of this record."""
    return msgspec.json.encode(record) + b"\n"


GOOD = b"".join(map(line, (HEADER, *RECORDS)))


def append(path: Path, text: bytes) -> None:
    """Add these bytes to the file."""
    with path.open("ab") as file:
        file.write(text)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where the trace will be."""
    return tmp_path / "trace.jsonl"


# ---- the end ----


def test_end_is_read_without_the_rest(path: Path) -> None:
    path.write_bytes(b"anything\n" * reader_module.CHUNK_BYTES + line(RECORDS[-1]))
    assert read_end(path) == RECORDS[-1]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        line(HEADER),
        GOOD + line(Joined(2.0, 0)),  # the run was resumed
        GOOD + b"{",
        GOOD + b"{\n",
        GOOD[:-1],  # not yet complete
    ],
)
def test_trace_of_a_run_that_goes_on_has_no_end(path: Path, content: bytes) -> None:
    assert read_end(path) is None  # there is no file yet
    path.write_bytes(content)
    assert read_end(path) is None


# ---- whole traces ----


def test_folder_of_a_run_stands_for_its_trace(tmp_path: Path) -> None:
    assert trace_file(tmp_path) == tmp_path / "trace.jsonl"
    assert trace_file(tmp_path / "other.jsonl") == tmp_path / "other.jsonl"


def test_complete_trace_needs_no_newline_at_its_end(path: Path) -> None:
    path.write_bytes(GOOD[:-1])
    assert read_trace(path) == Trace(HEADER, RECORDS)


def test_unfinished_last_line_of_a_growing_trace_is_left_out(path: Path) -> None:
    path.write_bytes(GOOD[:-1])
    assert read_trace(path, is_growing=True) == Trace(HEADER, RECORDS[:-1], is_growing=True)


def test_trace_is_read_from_a_pipe(path: Path) -> None:
    os.mkfifo(path)
    writer = Thread(target=path.write_bytes, args=(GOOD,))
    writer.start()
    assert read_trace(path) == Trace(HEADER, RECORDS)
    writer.join()


@pytest.mark.parametrize("chunk", [1, 7, 100, 10_000])
def test_size_of_the_chunks_does_not_matter(
    path: Path, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader_module, "CHUNK_BYTES", chunk)
    path.write_bytes(GOOD)
    assert read_trace(path) == Trace(HEADER, RECORDS)
    assert read_trace(path, is_growing=True).records == RECORDS


def test_line_number_is_right_beyond_the_first_chunk(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader_module, "CHUNK_BYTES", 200)
    path.write_bytes(GOOD + line(Joined(2.0, 0)) * 50 + b"bad\n" + line(Joined(2.0, 0)))
    with pytest.raises(TraceError, match=re.escape(f"{path}:57: ")):
        read_trace(path)


# ---- bad files ----


def changed(line: int, **fields: object) -> bytes:
    """Return the good file with other fields in one of its lines."""
    lines = GOOD.splitlines(keepends=True)
    whole = msgspec.json.decode(lines[line - 1]) | fields
    lines[line - 1] = msgspec.json.encode(whole) + b"\n"
    return b"".join(lines)


def put(line: int, content: bytes) -> bytes:
    """Return the good file with something else as one of its lines."""
    lines = GOOD.splitlines(keepends=True)
    lines[line - 1] = content + b"\n"
    return b"".join(lines)


BAD_FILES = {
    "only an empty line": (b"\n", 1, ""),
    "plain text": (b"not a trace\n", 1, "malformed"),
    "binary garbage": (bytes(range(128, 256)) * 8, 1, "malformed"),
    "JSON that is not an object": (b"[1, 2]\n", 1, "object"),
    "no header": (GOOD.partition(b"\n")[2], 1, "header"),
    "a newer format": (changed(1, paceline_trace=FORMAT + 1), 1, f"format {FORMAT + 1}"),
    "a format that is not a number": (changed(1, paceline_trace="one"), 1, "paceline_trace"),
    "a newer format with new fields": (
        changed(1, paceline_trace=FORMAT + 1, colour="red"),
        1,
        f"format {FORMAT + 1}",
    ),
    "no format": (put(1, b'{"type":"header","source":"sim","policy":"sync","workers":1}'), 1, ""),
    "an unknown field in the header": (changed(1, colour="red"), 1, "colour"),
    "an unknown source": (changed(1, source="dream"), 1, "dream"),
    "a second header": (put(2, GOOD.splitlines()[0]), 2, "header"),
    "a line that is not JSON": (put(3, b"{'type': 'resumed'}"), 3, "malformed"),
    "an empty line": (put(3, b""), 3, ""),
    "garbage in the middle": (put(3, b"\x80\xff\x00"), 3, "malformed"),
    "a string that is not UTF-8": (
        put(2, b'{"type":"left","t":0,"worker":0,"reason":"\xff"}'),
        2,
        "",
    ),
    "an unknown record": (changed(5, type="upgrade"), 5, "upgrade"),
    "a record without its type": (put(3, b'{"t": 0.0}'), 3, "type"),
    "an unknown field": (changed(4, colour="red"), 4, "colour"),
    "a missing field": (put(2, b'{"type":"joined","t":0.0}'), 2, "worker"),
    "a time that is a string": (changed(4, t="soon"), 4, "t"),
    "a time that is null": (changed(4, t=None), 4, "t"),
    "a worker that is a fraction": (changed(2, worker=0.5), 2, "worker"),
    "a negative worker": (changed(2, worker=-1), 2, "worker"),
    "a negative computation time": (changed(4, compute_s=-0.5), 4, "compute_s"),
    "a negative number of samples": (changed(4, samples=-1), 4, "samples"),
    "a negative number of bytes": (changed(4, pushed_bytes=-1), 4, "pushed_bytes"),
    "a negative squared norm": (changed(4, sq_norm=-1.0), 4, "sq_norm"),
    "an unknown fate": (changed(4, fate="lost"), 4, "lost"),
    "contributors that are not a list": (changed(5, contributors="0"), 5, "contributors"),
    "deeply nested lists": (put(3, b'{"a":' + b"[" * 100_000), 3, ""),
    "a truncated last line": (GOOD[:-20], 6, "truncated"),
}


@pytest.mark.parametrize("bad", BAD_FILES)
def test_bad_file_is_reported_with_line_and_reason(bad: str, tmp_path: Path) -> None:
    content, line, reason = BAD_FILES[bad]
    path = tmp_path / "bad.jsonl"
    path.write_bytes(content)
    with pytest.raises(TraceError) as caught:
        read_trace(path)
    message = str(caught.value)
    place, _, why = message.partition(f"{path}:{line}")
    assert place == ""
    assert re.match(r"\D", why), message  # not the beginning of a longer number
    assert why.strip(" :"), message
    assert reason in why
    assert "\n" not in message


def test_good_file_is_read(tmp_path: Path) -> None:
    """So the errors above come from the changes, and not from the file they start from."""
    (tmp_path / "good.jsonl").write_bytes(GOOD)
    assert len(read_trace(tmp_path / "good.jsonl").records) == 5


def test_empty_file_is_reported_as_empty(tmp_path: Path) -> None:
    path = tmp_path / "empty.jsonl"
    path.touch()
    with pytest.raises(TraceError, match=re.escape(f"{path} is empty")):
        read_trace(path)


def test_missing_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "missing.jsonl"
    with pytest.raises(TraceError, match=re.escape(f"{path}: No such file")):
        read_trace(path)


def test_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=re.escape(f"{tmp_path}: Is a directory")):
        read_trace(tmp_path)


@given(content=st.binary(max_size=300) | st.binary(max_size=100).map(lambda tail: GOOD + tail))
def test_any_content_is_read_or_refused(
    content: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / "whatever.jsonl"
    path.write_bytes(content)
    with suppress(TraceError):
        read_trace(path)


# ---- growing traces ----


def test_each_read_returns_only_what_is_new(path: Path) -> None:
    reader = TraceReader(path)
    assert reader.read() == []
    append(path, line(HEADER) + line(RECORDS[0]))
    assert reader.read() == RECORDS[:1]
    assert reader.header == HEADER
    append(path, b"".join(map(line, RECORDS[1:])))
    assert reader.read() == RECORDS[1:]
    assert reader.read() == []
    assert reader.offset == len(GOOD)
    assert reader.generation == 0


def test_unfinished_line_is_read_once_it_is_whole(path: Path) -> None:
    reader = TraceReader(path)
    for begin in range(0, len(GOOD), 10):
        append(path, GOOD[begin : begin + 10])
        found = reader.read()
        whole = GOOD[: begin + 10]
        assert reader.offset == whole.rfind(b"\n") + 1
        assert len(found) <= 1
    assert reader.read() == []
    assert reader.header == HEADER


def test_tolerant_reader_skips_bad_lines(path: Path) -> None:
    path.write_bytes(line(HEADER) + b'{"t":\n\n\xff\n[1]\n' + line(RECORDS[0]))
    assert TraceReader(path).read() == RECORDS[:1]


def test_tolerant_reader_needs_no_header(path: Path) -> None:
    path.write_bytes(line(RECORDS[0]) + line(RECORDS[1]))
    reader = TraceReader(path)
    assert reader.read() == RECORDS[:2]
    assert reader.header is None


def test_strict_reader_names_the_bad_line_of_a_later_read(path: Path) -> None:
    reader = TraceReader(path, is_strict=True)
    path.write_bytes(GOOD)
    assert reader.read() == RECORDS
    append(path, b"bad\n")
    with pytest.raises(TraceError, match=re.escape(f"{path}:7: ")):
        reader.read()


def test_strict_reader_names_a_missing_file(path: Path) -> None:
    with pytest.raises(TraceError, match=re.escape(f"cannot read {path}: No such file")):
        TraceReader(path, is_strict=True).read()


def test_truncated_file_is_read_from_its_beginning(path: Path) -> None:
    path.write_bytes(GOOD)
    reader = TraceReader(path)
    reader.read()
    path.write_bytes(line(HEADER) + line(RECORDS[1]))
    assert reader.read() == RECORDS[1:2]
    assert reader.generation == 1


def test_replaced_file_is_read_from_its_beginning(path: Path, tmp_path: Path) -> None:
    path.write_bytes(GOOD)
    reader = TraceReader(path)
    reader.read()
    (tmp_path / "other").write_bytes(GOOD + line(RECORDS[0]))
    (tmp_path / "other").replace(path)
    assert reader.read() == [*RECORDS, RECORDS[0]]
    assert reader.generation == 1


def test_limit_spreads_a_long_trace_over_several_reads(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunk = len(line(HEADER)) + 60
    monkeypatch.setattr(reader_module, "CHUNK_BYTES", chunk)
    path.write_bytes(GOOD)
    reader = TraceReader(path)
    batches = []
    while batch := reader.read(max_bytes=chunk):
        batches.append(batch)
    assert list(chain.from_iterable(batches)) == RECORDS
    assert len(batches) > 1


def test_tolerant_reader_skips_a_line_that_is_too_long(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader_module, "CHUNK_BYTES", 1000)
    path.write_bytes(line(HEADER) + b"x" * 5000 + b"\n" + line(RECORDS[0]))
    assert TraceReader(path).read() == RECORDS[:1]


def test_strict_reader_reads_a_line_of_any_length(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader_module, "CHUNK_BYTES", 10)
    path.write_bytes(GOOD)
    assert TraceReader(path, is_strict=True).read() == RECORDS
