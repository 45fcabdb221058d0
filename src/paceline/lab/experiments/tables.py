# SPDX-License-Identifier: BSD-3-Clause
"""Build table rows from trial results, select columns, and summarize them in words."""

from collections.abc import Mapping, Sequence
from math import isfinite
from statistics import fmean, stdev

from paceline.lab.experiment import Rows
from paceline.lab.trial import TrialResult

__all__ = ["column", "curve_rows", "final_row", "finite", "mean_and_sd", "seed_count"]

Key = Mapping[str, float | str]
"""The columns that tell the trials of a table apart."""


def final_row(key: Key, result: TrialResult, **scores: str) -> dict[str, float | str]:
    """Return a row with the final state of a trial; `scores` maps columns to scores."""
    return {
        **key,
        "updates": result.updates,
        "seconds": result.seconds,
        "staleness": result.staleness,
        **{name: result.last(score) for name, score in scores.items()},
    }


def curve_rows(key: Key, result: TrialResult, **scores: str) -> Rows:
    """Return one row per evaluation of a trial; `scores` maps columns to scores."""
    return [
        {
            **key,
            "updates": row.update,
            "seconds": row.time,
            "epochs": row.epochs,
            **{name: row.scores[score] for name, score in scores.items()},
        }
        for row in result.rows
    ]


def column(rows: Rows, name: str, **where: float | str) -> list[float]:
    """Return the numbers in a column, from the rows whose other columns have these values."""
    return [
        float(row[name]) for row in rows if all(row[key] == value for key, value in where.items())
    ]


def finite(values: Sequence[float]) -> list[float]:
    """Drop the values of trainings that diverged or never reached a target."""
    return [value for value in values if isfinite(value)]


def mean_and_sd(values: Sequence[float], digits: int = 2) -> str:
    """Format the mean of the finite values, and their standard deviation if there are several."""
    known = finite(values)
    if not known:
        return f"none of {len(values)}"
    text = f"{fmean(known):.{digits}f}"
    if len(known) > 1:
        text += f" ± {stdev(known):.{digits}f}"
    return text if len(known) == len(values) else f"{text} (only {len(known)} of {len(values)})"


def seed_count(rows: Rows) -> str:
    """Return the number of seeds in words."""
    count = len({row["seed"] for row in rows})
    return f"{count} seed" if count == 1 else f"{count} seeds"
