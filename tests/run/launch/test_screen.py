# SPDX-License-Identifier: BSD-3-Clause
"""A pipe that is closed, or that nobody reads, stops nothing; what wasn't shown is counted."""

import io
import os
import select

import pytest

from paceline.run.launch import screen
from paceline.run.launch.screen import PlainScreen, SafeScreen

LINE = "x" * 1000


class Pipe:
    """A real pipe, and a stream that writes to it."""

    def __init__(self):
        self._reading, writing = os.pipe()
        os.set_blocking(self._reading, False)
        self.stream = os.fdopen(writing, "w")
        self._rest = b""

    def read(self):
        """Return the lines that are in the pipe."""
        data = self._rest
        while select.select([self._reading], [], [], 0)[0] and (
            more := os.read(self._reading, 1 << 16)
        ):
            data += more
        *lines, self._rest = data.split(b"\n")
        return [line.decode() for line in lines]

    def stop_reading(self):
        if self._reading >= 0:
            os.close(self._reading)
            self._reading = -1

    def close(self):
        self.stop_reading()
        self.stream.close()


@pytest.fixture
def pipe():
    one = Pipe()
    yield one
    one.close()


@pytest.fixture
def safe(monkeypatch):
    monkeypatch.setattr(screen, "CLOSE_S", 0.05)
    return SafeScreen(PlainScreen())


def fill(safe, pipe, lines=200):
    """Show more than fits into the pipe."""
    for number in range(lines):
        safe.line(f"{number} {LINE}", pipe.stream)


def numbers(lines):
    return [int(line.split()[0]) for line in lines]


def test_lines_wait_for_a_reader_and_keep_their_order(safe, pipe):
    fill(safe, pipe)
    shown = numbers(pipe.read())
    assert 0 < len(shown) < 200
    while shown[-1] < 199:
        safe.tick()
        shown += numbers(pipe.read())
    assert shown == list(range(200))


def test_other_stream_is_not_blocked(safe, pipe):
    other = Pipe()
    fill(safe, pipe)
    safe.line("stopping", other.stream)
    assert other.read() == ["stopping"]
    other.close()


def test_lines_beyond_a_limit_are_counted(safe, pipe, monkeypatch):
    monkeypatch.setattr(screen, "LINES_MAX", 20)
    fill(safe, pipe)
    shown = pipe.read()
    while "lines aren't shown" not in shown[-1]:
        safe.tick()
        shown += pipe.read()
    missing = 200 - (len(shown) - 1)
    assert missing > 0
    assert shown[-1] == f"paceline  | {missing} lines aren't shown, because nobody read them"
    safe.line("next", pipe.stream)
    assert pipe.read() == ["next"]


def test_end_does_not_wait_long_for_a_reader(safe, pipe):
    fill(safe, pipe)
    safe.close()


def test_closed_pipe_is_ignored(safe, pipe):
    pipe.stop_reading()
    fill(safe, pipe)
    safe.tick()
    safe.close()


def test_stream_that_is_no_file_gets_every_line(safe):
    stream = io.StringIO()
    safe.line("one", stream)
    safe.line("two", stream)
    assert stream.getvalue() == "one\ntwo\n"


def test_what_the_encoding_lacks_is_replaced():
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    PlainScreen().line("ä", stream)
    stream.flush()
    assert stream.buffer.getvalue() == b"?\n"
