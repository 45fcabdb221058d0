# SPDX-License-Identifier: BSD-3-Clause
"""What an experiment is: a question, tables of what was measured, a figure, and a paragraph.

Measuring takes long and gives tables, kept as CSV. Figure and paragraph are made from the tables
alone, so that they can be made again without measuring.
"""

import csv
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.figure import Figure

from paceline.errors import SpecError
from paceline.files import written_whole
from paceline.lab.bench import Bench, Progress
from paceline.lab.trial import Outcome, Trial

__all__ = ["Experiment", "Lab", "Rows", "Tables", "make_again", "read_tables", "run_experiment"]

Rows = list[dict[str, float | str]]
"""A table: each row has the same columns."""

Tables = dict[str, Rows]


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
    """Only the direction of the effects is wanted, in seconds."""
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


def run_experiment(experiment: Experiment, lab: Lab, out: Path) -> str:
    """Measure, and write tables, figure and paragraph into a folder; return the paragraph."""
    tables = experiment.measure(lab)
    folder = out / experiment.name
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.csv"):  # of another version, which may have had other tables
        old.unlink()
    for name, rows in tables.items():
        _write_rows(folder / f"{name}.csv", rows)
    return make_again(experiment, out)


def make_again(experiment: Experiment, out: Path) -> str:
    """Make the figure and the paragraph from the tables that are there; return the paragraph."""
    folder = out / experiment.name
    tables = read_tables(folder)
    paragraph = "\n\n".join(
        [
            f"**{experiment.question}**",
            f"Expected: {experiment.expected}",
            f"Seen: {experiment.tell(tables)}",
        ]
    )
    # No date and no version inside, so that nothing changes when nothing has changed.
    figure = experiment.draw(tables)
    figure.savefig(folder / "figure.png", dpi=110, metadata={"Software": None})
    with written_whole(folder / "README.md") as partial:
        partial.write_text(f"# {experiment.name}\n\n{paragraph}\n", encoding="utf-8")
    return paragraph


def read_tables(folder: Path) -> Tables:
    """The tables that an experiment has left in its folder."""
    tables = {path.stem: _read_rows(path) for path in sorted(folder.glob("*.csv"))}
    if not tables:
        raise SpecError(
            f"there are no tables in {folder}; measure first: paceline lab run {folder.name}"
        )
    return tables


def _write_rows(path: Path, rows: Rows) -> None:
    with written_whole(path) as partial, partial.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows({name: _text(value) for name, value in row.items()} for row in rows)


def _text(value: float | str) -> str:
    """Six digits are more than anybody's noise."""
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _read_rows(path: Path) -> Rows:
    with path.open(newline="", encoding="utf-8") as file:
        return [{name: _value(text) for name, text in row.items()} for row in csv.DictReader(file)]


def _value(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text
