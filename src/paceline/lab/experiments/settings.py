# SPDX-License-Identifier: BSD-3-Clause
"""What several experiments share: the machines, and words for what was seen."""

from collections.abc import Sequence
from math import isfinite
from statistics import fmean, stdev

from paceline.lab.experiment import Rows

__all__ = ["CHEN", "FACTORS", "finite", "picked", "seeds_of", "spread"]

CHEN = "98.83% lognormal:1.603s,0.042 | 0.97% lognormal:2.66s,0.094 | 0.2% exp:1.81s,shift=1.603s"
"""Machines whose gradients arrive as those that Chen et al. measured; fitted by `stragglers`."""

FACTORS = (0.1, 1 / 3, 1.0, 3.0)
"""Of a learning rate: those that are tried, for every rule the same."""


def spread(values: Sequence[float], digits: int = 2) -> str:
    """The mean, and the standard deviation where there are several, of those that came to one."""
    known = finite(values)
    if not known:
        return f"none of {len(values)}"
    text = f"{fmean(known):.{digits}f}"
    if len(known) > 1:
        text += f" ± {stdev(known):.{digits}f}"
    return text if len(known) == len(values) else f"{text} (only {len(known)} of {len(values)})"


def seeds_of(rows: Rows) -> str:
    """How many there are, in words."""
    count = len({row["seed"] for row in rows})
    return f"{count} seed" if count == 1 else f"{count} seeds"


def finite(values: Sequence[float]) -> list[float]:
    """Without those of trainings that diverged, or never came to a target."""
    return [value for value in values if isfinite(value)]


def picked(rows: Rows, column: str, **wanted: float | str) -> list[float]:
    """The numbers in a column of the rows in which the others have these values."""
    return [
        float(row[column])
        for row in rows
        if all(row[name] == value for name, value in wanted.items())
    ]
