# SPDX-License-Identifier: BSD-3-Clause
"""The output of a run's processes: shown with their names in front, and saved in files.

A process has three pipes: standard output, standard error, and one for the exception that ended its
script. Through the last one, a worker first tells that it joins, and perhaps that it leaves because
its host is about to go. The same failure is shown once, however many workers have it. Of a quiet
process, standard output and progress bars are only saved.

A progress bar, which is a line that keeps being overwritten, is shown every few seconds and when it
is complete. In the file, each of its states is a separate line.
"""

import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from selectors import EVENT_READ, BaseSelector
from typing import NamedTuple, TextIO

from paceline.run.launch.child import (
    END_OF_FAILURE,
    JOINING,
    LEAVING,
    ChildPipes,
    decode_failure,
)
from paceline.run.launch.screen import Screen

__all__ = ["Failure", "Output", "OutputStream"]

BAR_S = 5.0  # between two displays of a progress bar
LINE_BYTES_MAX = 1 << 20  # a longer line is split, so that the launcher doesn't have to hold it

_UP = b"\x1b[A"  # cursor up: tqdm writes it after each state of a bar below another


@dataclass(eq=False)
class OutputStream:
    """The launcher's end of a pipe."""

    name: str  # of the process
    fd: int
    to: TextIO | None  # None: it is for failures
    rest: bytearray = field(default_factory=bytearray)
    """An unfinished line; begins with \\r iff it overwrites earlier states."""

    overwritten: bytes = b""  # the last of these states
    is_quiet: bool = False  # only errors are shown
    is_erased: bool = False  # a bar was overwritten with spaces, so an ordinary line follows

    bar_due: float = 0.0  # when the bar may be shown again
    bar_shown: bytes = b""  # the state that was shown last

    @property
    def bar(self) -> bytes:
        """The current state of a progress bar; empty: there is none."""
        if not self.rest.startswith(b"\r"):
            return b""
        return next(iter(_states(bytes(self.rest))), self.overwritten)


class _SplitOutput(NamedTuple):
    """Lines to show, and lines to save."""

    shown: list[bytes]
    saved: list[bytes]


@dataclass(frozen=True)
class Failure:
    """The exception that ended a script."""

    text: str
    code: int  # of the error: that of its class if it is Paceline's own
    same_as: str  # the process that failed like this first; "": this one is the first


class Output:
    """The output of all processes of a run."""

    def __init__(self, selector: BaseSelector, screen: Screen, folder: Path | None) -> None:
        """`folder`: where to save the output; None: nowhere."""
        self._selector = selector
        self._screen = screen
        self._folder = folder
        self._is_saved = folder is not None  # until that fails
        self._files: dict[str, int] = {}
        self._streams: dict[str, list[OutputStream]] = {}
        self._first: dict[str, str] = {}  # failures that were shown, and the process that had each
        self._failures: dict[str, Failure] = {}  # of processes that haven't exited yet
        self._faults: dict[str, bytearray] = {}  # likewise: what the fault handler wrote
        self._joined: set[str] = set()  # workers that got parameters since they were started
        self._leaving: set[str] = set()  # likewise: that leave because their host is about to go

    def say(self, text: str) -> None:
        """Show a message of the launcher."""
        self._screen.line(f"paceline  | {text}", sys.stderr)

    def open_pipes(self, name: str, is_quiet: bool = False) -> ChildPipes:
        """Open the pipes of a process to be started; the caller closes the returned ends.

        Of a quiet process, only errors are shown.
        """
        pairs: list[tuple[int, int]] = []
        try:
            pairs.extend(os.pipe() for _ in range(3))
        except OSError:
            for fd in (fd for pair in pairs for fd in pair):
                os.close(fd)
            raise
        self._failures.pop(name, None)
        self._faults.pop(name, None)
        self._joined.discard(name)
        self._leaving.discard(name)
        for (fd, _), to in zip(pairs, (sys.stdout, sys.stderr, None), strict=True):
            os.set_blocking(fd, False)
            stream = OutputStream(name, fd, to, is_quiet=is_quiet)
            self._streams.setdefault(name, []).append(stream)
            self._selector.register(fd, EVENT_READ, stream)
        return ChildPipes(*(theirs for _, theirs in pairs))

    def read(self, stream: OutputStream) -> bool:
        """Pass on what is available; return whether there may be more."""
        try:
            data = os.read(stream.fd, 1 << 16)
        except BlockingIOError:
            return False
        if stream.to is None:
            self._read_failure(stream, data)
        else:
            self._pass_on(stream, stream.to, data)
        if not data:
            self._selector.unregister(stream.fd)
            os.close(stream.fd)
            self._streams[stream.name].remove(stream)
        return bool(data)

    def tick(self, now: float) -> None:
        """Show the progress bars that are due."""
        for stream in (stream for streams in self._streams.values() for stream in streams):
            bar = stream.bar
            if stream.to is None or stream.is_quiet:
                continue
            if bar and bar != stream.bar_shown and now >= stream.bar_due:
                stream.bar_due, stream.bar_shown = now + BAR_S, bar
                self._show(stream.name, stream.to, [bar])

    def drain(self, name: str) -> Failure | None:
        """Pass on the rest of the output of a process that exited; return its failure."""
        for stream in list(self._streams.get(name, ())):
            while self.read(stream):
                pass
        return self._failures.pop(name, None)

    def has_joined(self, name: str) -> bool:
        """Return whether it is a worker that got parameters since it was started."""
        return name in self._joined

    def is_leaving(self, name: str) -> bool:
        """Return whether it is a worker that leaves because its host is about to go."""
        return name in self._leaving

    def take_fault(self, name: str, shows: bool) -> str:
        """Return what the fault handler of a process that exited wrote; show it if `shows`."""
        report = bytes(self._faults.pop(name, b""))
        if report:
            lines = report.rstrip(b"\n").split(b"\n")
            self._save(name, lines)
            if shows:
                self._show(name, sys.stderr, lines)
        return report.decode(errors="replace")

    def close(self) -> None:
        """Close all pipes and files; later output is lost."""
        for stream in (stream for streams in self._streams.values() for stream in streams):
            if stream.to is not None:
                self._pass_on(stream, stream.to, b"")
            self._selector.unregister(stream.fd)
            os.close(stream.fd)
        self._streams.clear()
        for fd in self._files.values():
            os.close(fd)
        self._files.clear()

    def _read_failure(self, stream: OutputStream, data: bytes) -> None:
        for told, names in ((JOINING, self._joined), (LEAVING, self._leaving)):
            if data.startswith(told) and not stream.rest:
                names.add(stream.name)
                data = data.removeprefix(told)
        stream.rest += data
        if not stream.rest.endswith(END_OF_FAILURE):
            self._faults[stream.name] = stream.rest  # unless the rest of an exception follows
            return
        self._faults.pop(stream.name, None)
        text, code = decode_failure(bytes(stream.rest))
        stream.rest = bytearray()
        lines = text.encode().rstrip(b"\n").split(b"\n")
        self._failures[stream.name] = Failure(text, code, self._first.get(text, ""))
        self._save(stream.name, lines)
        if text not in self._first:
            self._first[text] = stream.name
            self._show(stream.name, sys.stderr, lines)

    def _pass_on(self, stream: OutputStream, to: TextIO, data: bytes) -> None:
        lines = _split(stream, data)
        if not stream.is_quiet or to is sys.stderr:
            self._show(stream.name, to, lines.shown)
        self._save(stream.name, lines.saved)

    def _show(self, name: str, to: TextIO, lines: list[bytes]) -> None:
        for line in lines:
            self._screen.line(f"{name:9} | {line.decode(errors='replace')}", to)

    def _save(self, name: str, lines: list[bytes]) -> None:
        """Append the lines to the process's own file; a full disk doesn't stop the run."""
        if not lines or not self._is_saved or self._folder is None:
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
            self._is_saved = False
            self.say(f"no longer saving the output: cannot write {path}: {error.strerror}")


def _split(stream: OutputStream, data: bytes) -> _SplitOutput:
    """Return the lines that are complete now; at the end of the stream, all that is left."""
    if data and b"\n" not in data and b"\r" not in data:
        # Look at the line only when it ends: output without line breaks arrives in many pieces.
        stream.rest += data
        if len(stream.rest) <= LINE_BYTES_MAX:
            return _SplitOutput([], [])
        data = b"\n"
    text = bytes(stream.rest) + data
    while (up_and_down := _UP + b"\n") in text:
        text = text.replace(up_and_down, b"")
    text = text.replace(b"\r\n", b"\n")
    if not data and (text.strip() or stream.overwritten):
        text += b"\n"
    *complete, unfinished = text.split(b"\n")
    lines = _SplitOutput([], [])
    for line in complete:
        states = _states(line)
        if not (states or stream.overwritten):
            states = [b""]
        newest = states[-1] if states else stream.overwritten
        is_erased = bool(states) and (stream.is_erased or _erases(line))
        is_bar = (b"\r" in line or stream.overwritten) and not is_erased
        if not (is_bar and stream.is_quiet) and (not newest or newest != stream.bar_shown):
            lines.shown.append(newest)
        lines.saved.extend(states)
        stream.overwritten = stream.bar_shown = b""
        stream.is_erased = False
    before, end, after = unfinished.rpartition(b"\r")
    stream.is_erased = _erases(before + b"\r") or (stream.is_erased and not before.strip())
    states = _states(before)
    lines.saved.extend(states)
    stream.overwritten = states[-1] if states else stream.overwritten
    stream.rest = bytearray(end + after)
    return lines


def _erases(line: bytes) -> bool:
    """Return whether the last state but one is a bar that was overwritten with spaces."""
    before = [state for state in line.split(b"\r")[:-1] if state]
    return bool(before) and not before[-1].strip()


def _states(line: bytes) -> list[bytes]:
    """Return the states of a line in order; a bar that disappears is overwritten with spaces."""
    return [state for state in line.replace(_UP, b"").split(b"\r") if state.strip()]
