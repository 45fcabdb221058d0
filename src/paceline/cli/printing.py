# SPDX-License-Identifier: BSD-3-Clause
"""How the verbs print: JSON, tables, and a progress bar for what takes long."""

import sys
from io import StringIO
from time import monotonic
from types import TracebackType
from typing import TextIO

import msgspec
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from paceline.watch.words import human_bytes, human_seconds, percent, three_digits

__all__ = [
    "DelayedProgressBar",
    "human_bytes",
    "human_seconds",
    "percent",
    "print_json",
    "print_table",
    "table_text",
    "three_digits",
]

SHOW_AFTER_S = 2.0


def print_json(value: object) -> None:
    """Print a value as one JSON document."""
    sys.stdout.write(msgspec.json.format(msgspec.json.encode(value), indent=2).decode() + "\n")


def print_table(title: str, columns: list[str], rows: list[list[str]]) -> None:
    """Print a table; the first column is aligned left, the others right."""
    _show_table(title, columns, rows, sys.stdout)


def table_text(title: str, columns: list[str], rows: list[list[str]]) -> str:
    """Return the same table as text."""
    text = StringIO()
    _show_table(title, columns, rows, text)
    return text.getvalue()


def _show_table(title: str, columns: list[str], rows: list[list[str]], to: TextIO) -> None:
    table = Table(box=None, pad_edge=False, padding=(0, 1), header_style="bold")
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i == 0 else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    # Use the full width: a wrapped table is more useful than one with truncated numbers.
    width = Console(width=1000).measure(table).maximum
    Console(width=width, file=to).print(title, table, "", sep="\n", soft_wrap=True)


class DelayedProgressBar:
    """A progress bar on the terminal that appears only after two seconds."""

    def __init__(self, title: str = "") -> None:
        self._title = title
        self._began = monotonic()
        self._console = Console(stderr=True)
        self._progress: Progress | None = None

    def __enter__(self) -> "DelayedProgressBar":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._progress is not None:
            self._progress.stop()

    def show_part(self, title: str, number: int, of: int, done: float) -> None:
        """Show which share of this part is done; parts are numbered from 0."""
        self._title = title
        self.show((number + done) / of)

    def show(self, done: float) -> None:
        """Show which share of the work is done."""
        if self._progress is None:
            if not self._console.is_terminal or monotonic() - self._began < SHOW_AFTER_S:
                return
            columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
            self._progress = Progress(*columns, console=self._console, transient=True)
            self._progress.add_task(self._title, total=1.0)
            self._progress.start()
        task = self._progress.task_ids[0]
        self._progress.update(task, description=self._title, completed=done)
