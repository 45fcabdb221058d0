# SPDX-License-Identifier: BSD-3-Clause
"""What an experiment is: a question, tables of what was measured, a figure, and a paragraph.

Measuring takes long and gives tables, kept as CSV. Figure and paragraph are made from the tables
alone, so that they can be made again without measuring.
"""

import csv
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from matplotlib.figure import Figure

from paceline.errors import SpecError
from paceline.files import written_whole
from paceline.lab.bench import Bench, Progress
from paceline.lab.data.files import Source
from paceline.lab.trial import Outcome, Trial

__all__ = [
    "QUICK",
    "Experiment",
    "Lab",
    "Rows",
    "Tables",
    "make_again",
    "read_tables",
    "run_experiment",
]

Rows = list[dict[str, float | str]]
"""A table: each row has the same columns."""

Tables = dict[str, Rows]

QUICK = (
    "A quick look, with little data, few rates and few seeds: it shows that all of this works, and "
    "is no result."
)


@dataclass(frozen=True)
class Lab:
    """What an experiment has to work with."""

    data: Path
    """Where the data sets are."""
    cache: Path
    """Where what takes long to unpack is kept unpacked."""
    bench: Bench
    seeds: Sequence[int]
    quick: bool
    """Only a quick look is wanted."""
    progress: Progress

    def outcomes(self, trials: Sequence[Trial]) -> list[Outcome]:
        """What came of these, in their order."""
        return self.bench.outcomes(trials, self.progress)


@dataclass(frozen=True)
class Experiment:
    """One experiment."""

    name: str
    question: str
    expected: str
    """What the papers say."""
    measure: Callable[[Lab], Tables]
    draw: Callable[[Tables], Figure]
    tell: Callable[[Tables], str]
    """What was seen, in a paragraph."""
    needs: Sequence[Source] = ()
    """The files that it reads."""


def run_experiment(experiment: Experiment, lab: Lab, out: Path) -> str:
    """Measure, and write tables, figure and paragraph into a folder; return the paragraph."""
    tables = experiment.measure(lab)
    folder = out / experiment.name
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.csv"):  # of another version, which may have had other tables
        old.unlink()
    for name, rows in tables.items():
        _write_rows(folder / f"{name}.csv", rows)
    return _make(experiment, folder, read_tables(folder), quick=lab.quick)


def make_again(experiment: Experiment, out: Path, *, quick: bool = False) -> str:
    """Make the figure and the paragraph from the tables that are there; return the paragraph."""
    folder = out / experiment.name
    tables = read_tables(folder)
    try:
        return _make(experiment, folder, tables, quick=quick)
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:
        raise SpecError(
            f"the tables in {folder} are damaged, or of another version ({error!r}); measure "
            f"again: paceline lab run {experiment.name}"
        ) from error


def _make(experiment: Experiment, folder: Path, tables: Tables, *, quick: bool) -> str:
    seen, figure = experiment.tell(tables), experiment.draw(tables)
    paragraphs = [f"Expected: {experiment.expected}", f"Seen: {seen}"]
    paragraph = "\n\n".join([QUICK, *paragraphs] if quick else paragraphs)
    with _written(folder / "figure.png") as partial:
        # No date and no version inside, so that nothing changes when nothing has changed.
        figure.savefig(partial, dpi=110, format="png", metadata={"Software": None})
    with _written(folder / "README.md") as partial:
        page = f"# {experiment.name}\n\n**{experiment.question}**\n\n{paragraph}\n"
        partial.write_text(page, encoding="utf-8")
    return paragraph


def _written(path: Path) -> AbstractContextManager[Path]:
    """Where to write a file; another process may be at the same experiment."""
    return written_whole(path, alone=False)


def read_tables(folder: Path) -> Tables:
    """The tables that an experiment has left in its folder."""
    tables = {path.stem: _read_rows(path) for path in sorted(folder.glob("*.csv"))}
    if not tables:
        raise SpecError(
            f"there are no tables in {folder}; measure first: paceline lab run {folder.name}"
        )
    return tables


def _write_rows(path: Path, rows: Rows) -> None:
    with _written(path) as partial, partial.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows({name: _text(value) for name, value in row.items()} for row in rows)


def _text(value: float | str) -> str:
    """Six digits are more than anybody's noise."""
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _read_rows(path: Path) -> Rows:
    try:
        with path.open(newline="", encoding="utf-8") as file:
            header, *rows = csv.reader(file)
        return [dict(zip(header, map(_value, row), strict=True)) for row in rows or [[]]]
    except (ValueError, csv.Error) as error:  # no row, or one that does not fit the header
        raise SpecError(
            f"{path} is damaged ({error}); measure again: paceline lab run {path.parent.name}"
        ) from error


def _value(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text
