# SPDX-License-Identifier: BSD-3-Clause
"""End a script that asks for another batch with `next()` after the run has ended.

A `for` loop over a loader of a run that has ended is empty, and the script goes on after it. But a
script that calls `next(iter(loader))` in a loop of its own never expects a loader to be empty. It
would fail with StopIteration, although nothing is wrong, so the launcher treats `LoaderEnded` as
the end of the script.
"""

from collections.abc import Callable, Iterator
from typing import Any, Self

__all__ = ["LoaderEnded", "PassIterator"]


class LoaderEnded(StopIteration):
    """Ends a pass after the end of the run; if the script doesn't catch it, it ends the script."""

    def __str__(self) -> str:
        return (
            "the run has ended, so this worker ends its script, which asked for another batch with "
            "next(); to run the code after your loop, leave the loop when run.finished is true"
        )


class PassIterator:
    """Yields the batches of a pass."""

    def __init__(
        self, values: Iterator[Any], is_over: Callable[[], bool], length: Callable[[], int]
    ) -> None:
        self._values = values
        self._is_over = is_over
        self._length = length

    def __len__(self) -> int:
        """Return the length of the loader, as the iterator of a DataLoader does."""
        return self._length()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        """Return the next batch; raises `LoaderEnded` if there is none because the run is over."""
        try:
            return next(self._values)
        except StopIteration:
            if self._is_over():
                raise LoaderEnded from None
            raise
