# SPDX-License-Identifier: BSD-3-Clause
"""What curves tell: several seeds as one, and when a target was reached."""

from collections.abc import Sequence
from itertools import pairwise
from math import nan
from statistics import fmean
from typing import NamedTuple

from paceline.lab.experiment import Rows
from paceline.lab.train import Row

__all__ = ["Moment", "mean_curve", "reached", "when"]


def mean_curve(rows: Rows, x: str, y: str) -> tuple[list[float], list[float]]:
    """Two columns against each other, each the mean over the seeds, from first row to last."""
    by_seed = [
        [(float(row[x]), float(row[y])) for row in rows if row["seed"] == seed]
        for seed in dict.fromkeys(row["seed"] for row in rows)
    ]
    together = list(zip(*by_seed, strict=False))  # one that diverged ends sooner
    return (
        [fmean(point[0] for point in points) for points in together],
        [fmean(point[1] for point in points) for points in together],
    )


def when(curve: tuple[list[float], list[float]], target: float, *, is_high: bool) -> float:
    """Where a curve first is as good as the target; NaN: nowhere. `is_high`: more is better."""
    for x, y in zip(*curve, strict=True):
        if (y >= target) if is_high else (y <= target):
            return x
    return nan


class Moment(NamedTuple):
    """When something happened in a trial; all are NaN where it did not."""

    seconds: float
    updates: float
    epochs: float


def reached(rows: Sequence[Row], accuracy: float) -> Moment:
    """When there was such an accuracy first, in a straight line between two rows."""
    for before, after in pairwise(rows):
        low, high = before.scores["accuracy"], after.scores["accuracy"]
        if low < accuracy <= high:
            part = (accuracy - low) / (high - low)
            ends = zip(before[:3], after[:3], strict=True)
            return Moment(*(float(begin + part * (end - begin)) for begin, end in ends))
    return Moment(nan, nan, nan)
