# SPDX-License-Identifier: BSD-3-Clause
"""What the processes of a run print: shown with their names in front, and kept in files.

A process has three pipes: standard output, standard error, and one through which it tells the
failure that has ended its script. The same failure is shown once, however many workers have it.

A bar of progress, a line that is written over again and again, is shown every few seconds as it
stands then, and once it is whole. The file has all that it was, a line for each.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from selectors import EVENT_READ, BaseSelector
from typing import NamedTuple, Protocol, TextIO

from paceline.run.launch.child import END_OF_FAILURE, Ends

__all__ = [
    "Failure",
    "Output",
    "OutputStream",
    "PipeSafeScreen",
    "PlainScreen",
    "Screen",
    "patience_with",
]

BAR_S = 5.0  # from one look at a bar of progress to the next

_UP = b"\x1b[A"  # the cursor, as below the first of several bars of tqdm after each state


class Screen(Protocol):
    """Where a run is shown."""

    def line(self, text: str, to: TextIO) -> None:
        """Show a line that belongs to this stream."""

    def tick(self) -> None:
        """Called a few times a second."""

    def close(self) -> None:
        """The run is over."""


class PlainScreen:
    """Lines, one after the other."""

    def line(self, text: str, to: TextIO) -> None:
        """Print it, whatever letters the stream knows."""
        encoding = to.encoding or "utf-8"
        print(text.encode(encoding, "replace").decode(encoding), file=to)

    def tick(self) -> None:
        """Nothing moves here."""

    def close(self) -> None:
        """Nothing is left to do."""


class PipeSafeScreen:
    """Another screen. Nobody reading what it shows, a closed pipe or terminal, ends no run."""

    def __init__(self, screen: Screen) -> None:
        self._screen = screen

    def line(self, text: str, to: TextIO) -> None:
        """Show it, as long as somebody reads."""
        with patience_with(to):
            self._screen.line(text, to)
            to.flush()

    def tick(self) -> None:
        """As the other one."""
        with patience_with(sys.stderr):
            self._screen.tick()

    def close(self) -> None:
        """As the other one."""
        with patience_with(sys.stderr):
            self._screen.close()


@contextmanager
def patience_with(stream: TextIO) -> Iterator[None]:
    """Let what cannot be written go nowhere, now and from now on."""
    try:
        yield
    except OSError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


@dataclass(eq=False)
class OutputStream:
    """Our end of a pipe."""

    name: str  # of the process
    fd: int
    to: TextIO | None  # None: it tells of a failure
    rest: bytes = b""  # a line that has no end yet; it begins with \r iff others were in its place
    overwritten: bytes = b""  # the last of those

    bar_due: float = 0.0  # when a bar may be shown again
    bar_shown: bytes = b""  # as it was then

    @property
    def bar(self) -> bytes:
        """A line that is written over again and again, as it stands; empty: there is none."""
        if not self.rest.startswith(b"\r"):
            return b""
        return next(iter(_states(self.rest)), self.overwritten)


class Lines(NamedTuple):
    """What was printed."""

    shown: list[bytes]
    kept: list[bytes]


@dataclass(frozen=True)
class Failure:
    """What has ended a script."""

    text: str
    same_as: str  # the process that failed like this before all others; "": it is the first time


class Output:
    """All that is printed in a run."""

    def __init__(self, selector: BaseSelector, screen: Screen, folder: Path) -> None:
        self._selector = selector
        self._screen = screen
        self._folder = folder
        self._is_kept = True  # until that fails
        self._files: dict[str, int] = {}
        self._streams: dict[str, list[OutputStream]] = {}
        self._first: dict[str, str] = {}  # the failures that were shown, and whose they were
        self._failures: dict[str, Failure] = {}  # of processes that have not ended yet

    def say(self, text: str) -> None:
        """A word of the launcher."""
        self._screen.line(f"paceline  | {text}", sys.stderr)

    def pipes(self, name: str) -> Ends:
        """Pipes for a process that is to be started: its ends, which are the caller's to close."""
        pairs: list[tuple[int, int]] = []
        try:
            pairs.extend(os.pipe() for _ in range(3))
        except OSError:
            for fd in (fd for pair in pairs for fd in pair):
                os.close(fd)
            raise
        self._failures.pop(name, None)
        for (fd, _), to in zip(pairs, (sys.stdout, sys.stderr, None), strict=True):
            os.set_blocking(fd, False)
            stream = OutputStream(name, fd, to)
            self._streams.setdefault(name, []).append(stream)
            self._selector.register(fd, EVENT_READ, stream)
        return Ends(*(theirs for _, theirs in pairs))

    def read(self, stream: OutputStream) -> bool:
        """Pass on what is there; return whether there may be more."""
        try:
            data = os.read(stream.fd, 1 << 16)
        except BlockingIOError:
            return False
        if stream.to is None:
            self._hear(stream, data)
        else:
            self._pass_on(stream, stream.to, data)
        if not data:
            self._selector.unregister(stream.fd)
            os.close(stream.fd)
            self._streams[stream.name].remove(stream)
        return bool(data)

    def tick(self, now: float) -> None:
        """Show bars of progress as they stand, if that is due."""
        for stream in (stream for streams in self._streams.values() for stream in streams):
            bar = stream.bar
            if stream.to is not None and bar and bar != stream.bar_shown and now >= stream.bar_due:
                stream.bar_due, stream.bar_shown = now + BAR_S, bar
                self._show(stream, stream.to, [bar])

    def drain(self, name: str) -> Failure | None:
        """Pass on all that a process had to say, which has ended; return what it failed of."""
        for stream in list(self._streams.get(name, ())):
            while self.read(stream):
                pass
        return self._failures.pop(name, None)

    def close(self) -> None:
        """Close everything; what comes later is lost."""
        for stream in (stream for streams in self._streams.values() for stream in streams):
            if stream.to is not None:
                self._pass_on(stream, stream.to, b"")
            self._selector.unregister(stream.fd)
            os.close(stream.fd)
        self._streams.clear()
        for fd in self._files.values():
            os.close(fd)
        self._files.clear()

    def _hear(self, stream: OutputStream, data: bytes) -> None:
        stream.rest += data
        if not stream.rest.endswith(END_OF_FAILURE):
            return
        told, stream.rest = stream.rest.removesuffix(END_OF_FAILURE), b""
        lines = told.rstrip(b"\n").split(b"\n")
        text = told.decode(errors="replace")
        self._failures[stream.name] = Failure(text, self._first.get(text, ""))
        self._keep(stream.name, lines)
        if text not in self._first:
            self._first[text] = stream.name
            self._show(stream, sys.stderr, lines)

    def _pass_on(self, stream: OutputStream, to: TextIO, data: bytes) -> None:
        lines = _cut(stream, data)
        self._show(stream, to, lines.shown)
        self._keep(stream.name, lines.kept)

    def _show(self, stream: OutputStream, to: TextIO, lines: list[bytes]) -> None:
        for line in lines:
            self._screen.line(f"{stream.name:9} | {line.decode(errors='replace')}", to)

    def _keep(self, name: str, lines: list[bytes]) -> None:
        """Write the lines into the process's own file; a full disk does not end the run."""
        if not lines or not self._is_kept:
            return
        path = self._folder / f"{name.replace(' ', '-')}.log"
        try:
            if name not in self._files:
                self._folder.mkdir(exist_ok=True)
                self._files[name] = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
            left = b"\n".join(lines) + b"\n"
            while left:
                left = left[os.write(self._files[name], left) :]
        except OSError as error:
            self._is_kept = False
            self.say(f"what is printed is not kept any more, for {path}: {error.strerror}")


def _cut(stream: OutputStream, data: bytes) -> Lines:
    """The lines that are whole now; at the end of the stream, all that is left."""
    text = stream.rest + data
    while (up_and_down := _UP + b"\n") in text:
        text = text.replace(up_and_down, b"")
    text = text.replace(b"\r\n", b"\n")
    if not data and (text.strip() or stream.overwritten):
        text += b"\n"
    *whole, begun = text.split(b"\n")
    lines = Lines([], [])
    for line in whole:
        states = _states(line)
        if not (states or stream.overwritten):
            states = [b""]
        newest = states[-1] if states else stream.overwritten
        if not newest or newest != stream.bar_shown:
            lines.shown.append(newest)
        lines.kept.extend(states)
        stream.overwritten = stream.bar_shown = b""
    before, end, after = begun.rpartition(b"\r")
    states = _states(before)
    lines.kept.extend(states)
    stream.overwritten = states[-1] if states else stream.overwritten
    stream.rest = end + after
    return lines


def _states(line: bytes) -> list[bytes]:
    """What a line was, one after the other; a bar that goes is written over with spaces."""
    return [state for state in line.replace(_UP, b"").split(b"\r") if state.strip()]
