# SPDX-License-Identifier: BSD-3-Clause
"""How a pass over a loader ends, for scripts that call `next()` in a loop of their own.

A `for` loop over a loader of a run that has ended is empty, and the script goes on after it. But a
script that calls `next(iter(loader))` never expects a loader to be empty. It would fail with
StopIteration, although nothing is wrong, so the launcher treats `LoaderEnded` as the end of the
script.

A script that calls `next()` as often as its loader has batches doesn't expect a pass to end before
that. But an epoch ends when all workers together have used its samples, and this worker may have
had fewer than its share. So its pass goes on in the next epoch. A script that has its own answer
to StopIteration gets it when the epoch ends.
"""

import ast
import linecache
import sys
from collections.abc import Callable, Iterator
from itertools import islice
from types import FrameType
from typing import Any, Self

__all__ = ["LoaderEnded", "PassEnded", "PassIterator"]


class LoaderEnded(StopIteration):
    """Ends a pass after the end of the run; if the script doesn't catch it, it ends the script."""

    def __str__(self) -> str:
        return (
            "the run has ended, so this worker ends its script, which asked for another batch with "
            "next(); to run the code after your loop, leave the loop when run.finished is true"
        )


class PassEnded(StopIteration):
    """Ends a training pass; if the script doesn't expect that, it says what to do."""

    def __str__(self) -> str:
        return (
            "the epoch has ended, and other workers have computed on more of its batches than this "
            "one; loop over the loader with `for`, or begin a new pass with iter(loader) when "
            "next() raises StopIteration"
        )


class PassIterator:
    """Yields the batches of a pass."""

    def __init__(
        self,
        begin: Callable[[], Iterator[Any]],
        end: Callable[[], StopIteration],
        length: Callable[[], int],
        plain_length: Callable[[], int],
    ) -> None:
        """`begin` begins a pass or goes on with it; `end` returns the exception to end it with.

        `length` is what the script sees, `plain_length` what it would see without Paceline.
        """
        self._begin = begin
        self._values = begin()
        self._end = end
        self._length = length
        self._plain_length = plain_length
        self._count = 0  # batches so far

    def __len__(self) -> int:
        """Return the length of the loader, as the iterator of a DataLoader does."""
        return self._length()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        """Return the next batch; raises StopIteration if there is none."""
        while True:
            try:
                value = next(self._values)
            except StopIteration:
                # Not in a variable: the exception would keep this frame, and so the loader, alive.
                if not self._goes_on(sys._getframe(1)):
                    raise self._end() from None
                self._values = self._begin()
            else:
                self._count += 1
                return value

    def _goes_on(self, caller: FrameType) -> bool:
        """Return whether to go on in the next epoch, because the caller expects another batch."""
        if self._count >= self._plain_length() or isinstance(self._end(), LoaderEnded):
            return False
        return _expects_a_batch(caller)


def _expects_a_batch(frame: FrameType) -> bool:
    """Return whether this code calls `next(iterator)` and has no answer to StopIteration."""
    source = _source_of_call(frame)
    try:
        call = ast.parse(source, mode="eval").body
    except SyntaxError:
        return False
    match call:
        case ast.Call(func=ast.Name(id="next"), args=[_]):
            return "StopIteration" not in frame.f_code.co_names
        case _:
            return False


def _source_of_call(frame: FrameType) -> str:
    """Return the source of the expression that is being evaluated; "" if there is none."""
    code = frame.f_code
    line, last_line, begin, end = next(islice(code.co_positions(), frame.f_lasti // 2, None))
    if line is None or last_line is None:
        return ""
    # Positions are in bytes.
    lines = [text.encode() for text in linecache.getlines(code.co_filename)[line - 1 : last_line]]
    if not lines:
        return ""
    lines[-1] = lines[-1][:end]
    lines[0] = lines[0][begin:]
    return b"".join(lines).decode()
