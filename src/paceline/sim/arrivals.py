# SPDX-License-Identifier: BSD-3-Clause
"""Read a table of arrivals: how long each worker took in each update, as CSV.

It has one row per update and one column per worker; a cell is the number of seconds from the start
of the update until the worker's gradient arrived. The first line may be a heading. An empty cell
means that the gradient had not arrived when the last of the others did, as in a run that cancels
late work. Its time is completed as that of a cancelled gradient in a trace.
"""

import csv
from math import isfinite
from pathlib import Path

import numpy as np

from paceline.errors import SpecError
from paceline.sim.recorded_times import UPDATES_MIN, Recording, recording_by_version

__all__ = ["is_arrivals", "read_arrivals"]

Row = list[float | None]


def is_arrivals(path: Path) -> bool:
    """Return whether the file is a table of arrivals, by its name."""
    return path.suffix.lower() == ".csv"


def read_arrivals(path: Path, seed: int) -> Recording:
    """Return the times in the file; raise `SpecError` that names the file, and the line."""
    rows = _rows(path)
    if len(rows) < UPDATES_MIN:
        raise SpecError(
            f"{path} must have at least {UPDATES_MIN} rows of arrivals, got {len(rows)}"
        )
    if len(rows[0]) < 2:
        raise SpecError(f"{path} must have a column for each worker, at least 2, got 1")
    for worker, column in enumerate(zip(*rows, strict=True)):
        if all(time is None for time in column):
            raise SpecError(f"{path} has no time of worker {worker}, column {worker + 1}")
    if not any(time for row in rows for time in row):
        raise SpecError(f"{path} must have times > 0, but all of them are 0")
    return recording_by_version(rows, np.random.default_rng(seed))


def _rows(path: Path) -> list[Row]:
    """Return the cells of all lines but the heading and empty ones; None for an empty cell."""
    try:
        text = path.read_text(encoding="utf-8-sig")  # spreadsheets write a byte order mark
        lines = list(csv.reader(text.splitlines(), strict=True))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise SpecError(f"cannot read {path}: {reason}") from None
    rows: list[Row] = []
    for number, line in enumerate(lines, start=1):
        cells = [cell.strip() for cell in line]
        if not cells or (number == 1 and not any(map(_is_number, cells))):
            continue
        row = [_seconds(cell, f"{path}:{number}") for cell in cells]
        if rows and len(row) != len(rows[0]):
            raise SpecError(
                f"{path}:{number} must have {len(rows[0])} columns, one per worker, as the lines "
                f"before it, got {len(row)}"
            )
        if all(time is None for time in row):
            raise SpecError(f"{path}:{number} must have the time of at least one worker, got none")
        rows.append(row)
    return rows


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True


def _seconds(cell: str, where: str) -> float | None:
    if not cell:
        return None
    if not _is_number(cell) or not isfinite(seconds := float(cell)) or seconds < 0:
        raise SpecError(f"{where} must have seconds >= 0 or empty cells, got {cell!r}")
    return seconds
