# SPDX-License-Identifier: BSD-3-Clause
"""How a pass over a loader ends, for scripts that call `next()` in a loop of their own.

A `for` loop over a loader of a run that has ended is empty, and the script goes on after it. But a
script that calls `next(iter(loader))` never expects a loader to be empty. It would fail with
StopIteration, although nothing is wrong, so the launcher treats `LoaderEnded` as the end of the
script. A script that calls `next()` as often as its loader has batches may fail when an epoch ends,
and is told why.
"""

from collections.abc import Callable, Iterator
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
        values: Iterator[Any],
        end: Callable[[], StopIteration],
        length: Callable[[], int],
    ) -> None:
        """`end` returns the exception to raise after the last batch."""
        self._values = values
        self._end = end
        self._length = length

    def __len__(self) -> int:
        """Return the length of the loader, as the iterator of a DataLoader does."""
        return self._length()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        """Return the next batch; raises StopIteration if there is none."""
        try:
            return next(self._values)
        except StopIteration:
            raise self._end() from None
