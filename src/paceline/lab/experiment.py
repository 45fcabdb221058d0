# SPDX-License-Identifier: BSD-3-Clause
"""An experiment: a question, tables of measurements, a figure, and a paragraph.

Measuring takes long and produces tables, which are stored as CSV files. Figure and paragraph are
made from the tables alone, so they can be made again without measuring.
"""

import csv
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.errors import SpecError
from paceline.files import DiskFile, atomic_write
from paceline.lab import extras
from paceline.lab.data.download import Source
from paceline.lab.trial import Trial, TrialResult
from paceline.lab.trial_pool import TrialPool, TrialProgress
from paceline.watch.figure_style import DPI

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = [
    "QUICK_NOTICE",
    "Experiment",
    "Lab",
    "Rows",
    "Tables",
    "read_tables",
    "rebuild_report",
    "run_experiment",
]

Rows = list[dict[str, float | str]]
"""A table: a list of rows with the same columns."""

Tables = dict[str, Rows]

QUICK_NOTICE = (
    "This is a quick run with little data, few learning rates and few seeds. It shows that "
    "everything works; it is not a result."
)


@dataclass(frozen=True)
class Lab:
    """What an experiment works with."""

    data: Path
    """Folder of the data sets."""
    cache: Path
    """Folder for unpacked data sets that take long to unpack."""
    pool: TrialPool
    seeds: Sequence[int]
    quick: bool
    """Whether to run the small version, which only shows that everything works."""
    progress: TrialProgress

    def run(self, trials: Sequence[Trial]) -> list[TrialResult]:
        """Return the results of these trials, in order."""
        return self.pool.run(trials, self.progress)


@dataclass(frozen=True)
class Experiment:
    """One experiment."""

    name: str
    question: str
    expected: str
    """What the papers say."""
    measure: Callable[[Lab], Tables]
    draw: Callable[[Tables], "Figure"]
    describe: Callable[[Tables], str]
    """Says in one paragraph what was measured."""
    needs: Sequence[Source] = ()
    """The data files that it reads."""


def run_experiment(experiment: Experiment, lab: Lab, out: Path) -> str:
    """Measure, write tables, figure and paragraph to a folder, and return the paragraph."""
    extras.check_installed()  # the figure comes last, after hours of training
    tables = experiment.measure(lab)
    folder = out / experiment.name
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.csv"):  # another version may have had other tables
        old.unlink()
    for name, rows in tables.items():
        _write_rows(folder / f"{name}.csv", rows)
    return _write_report(experiment, folder, read_tables(folder), quick=lab.quick)


def rebuild_report(experiment: Experiment, out: Path, *, quick: bool = False) -> str:
    """Write figure and paragraph again from the stored tables, and return the paragraph."""
    folder = out / experiment.name
    tables = read_tables(folder)
    extras.check_installed()
    try:
        return _write_report(experiment, folder, tables, quick=quick)
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:
        raise SpecError(
            f"the tables in {folder} are damaged or from another version ({error!r}); measure "
            f"again: paceline lab run {experiment.name}"
        ) from error


def _write_report(experiment: Experiment, folder: Path, tables: Tables, *, quick: bool) -> str:
    measured, figure = experiment.describe(tables), experiment.draw(tables)
    paragraphs = [f"Expected: {experiment.expected}", f"Measured: {measured}"]
    paragraph = "\n\n".join([QUICK_NOTICE, *paragraphs] if quick else paragraphs)
    with _written(folder / "figure.png") as file:
        # Without a version string in the file, the same tables always give the same bytes.
        figure.savefig(file, dpi=DPI, format="png", metadata={"Software": None})
    with _written(folder / "README.md") as file:
        page = f"# {experiment.name}\n\n**{experiment.question}**\n\n{paragraph}\n"
        file.write(page.encode())
    return paragraph


def _written(path: Path) -> AbstractContextManager[DiskFile]:
    """Write a file atomically; another process may be running the same experiment."""
    return atomic_write(path, alone=False)


def read_tables(folder: Path) -> Tables:
    """Return the tables that an experiment left in its folder."""
    tables = {path.stem: _read_rows(path) for path in sorted(folder.glob("*.csv"))}
    if not tables:
        raise SpecError(
            f"there are no tables in {folder}; create them with: paceline lab run {folder.name}"
        )
    return tables


def _write_rows(path: Path, rows: Rows) -> None:
    table = StringIO()
    writer = csv.DictWriter(table, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: _format(value) for name, value in row.items()} for row in rows)
    with _written(path) as file:
        file.write(table.getvalue().encode())


def _format(value: float | str) -> str:
    """Six digits are finer than the noise of any measurement here."""
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _read_rows(path: Path) -> Rows:
    try:
        with path.open(newline="", encoding="utf-8") as file:
            header, *rows = csv.reader(file)
        return [dict(zip(header, map(_parse, row), strict=True)) for row in rows or [[]]]
    except (ValueError, csv.Error) as error:  # no rows, or one that doesn't fit the header
        raise SpecError(
            f"{path} is damaged ({error}); measure again: paceline lab run {path.parent.name}"
        ) from error


def _parse(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text
