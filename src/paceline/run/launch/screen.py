# SPDX-License-Identifier: BSD-3-Clause
"""Where the output of a run is shown: a terminal, or the pipe or file that it goes to.

A terminal may be closed or paused (Ctrl-S), and a program that reads from a pipe may exit or be
stopped. None of this stops the run, or keeps it from being stopped: what can't be written waits for
a while, and everything is in the run's folder anyway.
"""

import os
import sys
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from select import POLLOUT, poll
from time import monotonic
from typing import Protocol, TextIO

__all__ = ["PlainScreen", "SafeScreen", "Screen", "ignoring_closed_stream"]

LINES_MAX = 10_000  # that wait for a stream; later ones aren't shown
CLOSE_S = 2.0  # at the end, for somebody to read the lines that wait


class Screen(Protocol):
    """Where the output of a run is shown."""

    def line(self, text: str, to: TextIO) -> None:
        """Show a line of this stream."""

    def tick(self) -> None:
        """Called a few times a second."""

    def close(self) -> None:
        """Called when the run is over."""


class PlainScreen:
    """Prints lines one after the other."""

    def line(self, text: str, to: TextIO) -> None:
        """Print the line; replace what the stream's encoding can't express."""
        encoding = to.encoding or "utf-8"
        print(text.encode(encoding, "replace").decode(encoding), file=to)

    def tick(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


class SafeScreen:
    """Wraps another screen, so that a stream that is closed or isn't read doesn't stop the run.

    A pipe always takes lines of up to 4 KB if it takes anything. Longer ones can still block.
    """

    def __init__(self, screen: Screen) -> None:
        self._screen = screen
        self._waiting: dict[TextIO, deque[str]] = {}  # lines that nobody has read yet
        self._missing: dict[TextIO, int] = {}  # the number of lines that weren't kept

    def line(self, text: str, to: TextIO) -> None:
        """Show the line as soon as the stream can be written to, unless it is closed."""
        waiting = self._waiting.setdefault(to, deque())
        if len(waiting) < LINES_MAX:
            waiting.append(text)
        else:
            self._missing[to] = self._missing.get(to, 0) + 1
        self._show_waiting(to)

    def tick(self) -> None:
        """Show lines that wait, and update the wrapped screen."""
        for to in self._waiting:
            self._show_waiting(to)
        if _can_write(sys.stderr):
            with ignoring_closed_stream(sys.stderr):
                self._screen.tick()

    def close(self) -> None:
        """Show lines that wait, unless nobody reads them for a while; close the wrapped screen."""
        until = monotonic() + CLOSE_S
        for to, waiting in self._waiting.items():
            while waiting and _can_write(to, max(0.0, until - monotonic())):
                self._show_waiting(to)
        if _can_write(sys.stderr):
            with ignoring_closed_stream(sys.stderr):
                self._screen.close()

    def _show_waiting(self, to: TextIO) -> None:
        waiting = self._waiting[to]
        while waiting and _can_write(to):
            self._show(waiting.popleft(), to)
        if not waiting and (missing := self._missing.pop(to, 0)):
            self._show(f"paceline  | {missing:,} lines aren't shown, because nobody read them", to)

    def _show(self, text: str, to: TextIO) -> None:
        with ignoring_closed_stream(to):
            self._screen.line(text, to)
            to.flush()


def _can_write(stream: TextIO, wait_s: float = 0.0) -> bool:
    """Return whether writing to the stream won't block, if need be after waiting for that."""
    try:
        poller = poll()
        poller.register(stream.fileno(), POLLOUT)
    except (OSError, ValueError):  # it isn't a file
        return True
    return bool(poller.poll(1000.0 * wait_s))  # also if it is closed: writing fails at once


@contextmanager
def ignoring_closed_stream(stream: TextIO) -> Iterator[None]:
    """Discard what can't be written to the stream, now and later."""
    try:
        yield
    except OSError:
        devnull = os.open(os.devnull, os.O_WRONLY)
        os.dup2(devnull, stream.fileno())
        os.close(devnull)
