# SPDX-License-Identifier: BSD-3-Clause
"""What curves tell: several seeds as one, and when a target was reached."""

from collections.abc import Sequence
from itertools import pairwise
from math import isnan, nan
from statistics import fmean
from typing import NamedTuple

import numpy as np

from paceline.lab.experiment import Rows
from paceline.lab.training import Row

__all__ = ["Moment", "crossing", "mean_curve", "reached", "times_to"]


def mean_curve(rows: Rows, x: str, y: str) -> tuple[list[float], list[float]]:
    """Two columns against each other, each the mean over the seeds that came to the end."""
    by_seed = _by_seed(rows)
    whole = max((len(own) for own in by_seed), default=0)
    together = list(zip(*(own for own in by_seed if len(own) == whole), strict=True))
    return (
        [fmean(float(row[x]) for row in at_once) for at_once in together],
        [fmean(float(row[y]) for row in at_once) for at_once in together],
    )


def times_to(rows: Rows, score: str, target: float, *, is_high: bool) -> list[float]:
    """When the score of each seed was as good as the target; NaN: never."""
    return [
        _at([float(row["seconds"]) for row in own], place)
        for own in _by_seed(rows)
        for place in [crossing([float(row[score]) for row in own], target, is_high=is_high)]
    ]


def _by_seed(rows: Rows) -> list[Rows]:
    seeds = dict.fromkeys(row["seed"] for row in rows)
    return [[row for row in rows if row["seed"] == seed] for seed in seeds]


class Moment(NamedTuple):
    """When something happened in a trial; all are NaN where it did not."""

    seconds: float
    updates: float
    epochs: float


def reached(rows: Sequence[Row], accuracy: float) -> Moment:
    """When there was such an accuracy first."""
    place = crossing([row.scores["accuracy"] for row in rows], accuracy, is_high=True)
    seconds, updates, epochs = zip(*(row[:3] for row in rows), strict=True)
    return Moment(_at(seconds, place), _at(updates, place), _at(epochs, place))


def crossing(values: Sequence[float], target: float, *, is_high: bool) -> float:
    """The first place with such a value, in a straight line between two of them; NaN: nowhere.

    `is_high`: more is better.
    """
    sign = 1 if is_high else -1
    wanted, better = sign * target, [sign * value for value in values]
    if better[0] >= wanted:
        return 0.0
    for place, (low, high) in enumerate(pairwise(better)):
        if high >= wanted:
            return place + (wanted - low) / (high - low)
    return nan


def _at(values: Sequence[float], place: float) -> float:
    """What lies at a place between two of the values."""
    return nan if isnan(place) else float(np.interp(place, range(len(values)), values))
