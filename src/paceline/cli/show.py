# SPDX-License-Identifier: BSD-3-Clause
"""How the verbs print: units, tables, and progress that appears only when something takes long."""

import sys
from time import monotonic
from types import TracebackType

import msgspec
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

__all__ = [
    "Patience",
    "human_bytes",
    "human_seconds",
    "percent",
    "print_json",
    "print_table",
    "three_digits",
]

PATIENCE_S = 2.0

_SMALL_UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"))
_LARGE_UNITS = ((86_400.0, "d"), (3600.0, "h"), (60.0, "min"))


def three_digits(value: float) -> str:
    """1.74, 51.2, 236, 6,100: never a power of ten."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def human_seconds(seconds: float) -> str:
    """Three digits and a unit: 51.2 ms, 1.74 s, 2.5 h."""
    for size, unit in _LARGE_UNITS:
        if seconds >= 2 * size:
            return f"{three_digits(seconds / size)} {unit}"
    for size, unit in _SMALL_UNITS:
        if seconds >= size:
            return f"{three_digits(seconds / size)} {unit}"
    return f"{three_digits(seconds / 1e-6)} us"


def human_bytes(size: float) -> str:
    """Three digits and a unit: 12.5 MB."""
    for scale, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "KB")):
        if size >= scale:
            return f"{three_digits(size / scale)} {unit}"
    return f"{three_digits(size)} B"


def percent(share: float) -> str:
    """A share as a percentage; a small one is not called nothing."""
    return f"{100 * share:.1f} %" if 0 < share < 0.1 else f"{100 * share:.0f} %"


def print_json(value: object) -> None:
    """One JSON document on standard output."""
    sys.stdout.write(msgspec.json.format(msgspec.json.encode(value), indent=2).decode() + "\n")


def print_table(title: str, columns: list[str], rows: list[list[str]]) -> None:
    """A table, the first column to the left and the others to the right."""
    table = Table(box=None, pad_edge=False, padding=(0, 1), header_style="bold")
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i == 0 else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    # As wide as it is: a terminal that wraps a table shows more than one that cuts its numbers.
    wide = Console(width=1000)
    Console(width=wide.measure(table).maximum).print(title, table, "", sep="\n", soft_wrap=True)


class Patience:
    """Progress on a terminal, shown only once something has taken two seconds."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._began = monotonic()
        self._console = Console(stderr=True)
        self._progress: Progress | None = None

    def __enter__(self) -> "Patience":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._progress is not None:
            self._progress.stop()

    def show(self, done: float) -> None:
        """Tell the share that is done."""
        if self._progress is None:
            if not self._console.is_terminal or monotonic() - self._began < PATIENCE_S:
                return
            columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
            self._progress = Progress(*columns, console=self._console, transient=True)
            self._progress.add_task(self._what, total=1.0)
            self._progress.start()
        self._progress.update(self._progress.task_ids[0], completed=done)
