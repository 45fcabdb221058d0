# SPDX-License-Identifier: BSD-3-Clause
"""Learning curves: average them over seeds, and find when they reach a target."""

from collections.abc import Sequence
from itertools import pairwise
from math import isnan, nan
from statistics import fmean
from typing import NamedTuple

import numpy as np

from paceline.lab.experiment import Rows
from paceline.lab.training import Row

__all__ = ["CurvePoint", "crossing", "first_reached", "mean_curve", "times_to"]


def mean_curve(rows: Rows, x: str, y: str) -> tuple[list[float], list[float]]:
    """Return two columns, each averaged over the seeds whose training ran to the end."""
    by_seed = _by_seed(rows)
    length = max((len(own) for own in by_seed), default=0)
    evaluations = list(zip(*(own for own in by_seed if len(own) == length), strict=True))
    return (
        [fmean(float(row[x]) for row in evaluation) for evaluation in evaluations],
        [fmean(float(row[y]) for row in evaluation) for evaluation in evaluations],
    )


def times_to(rows: Rows, score: str, target: float, *, is_high: bool) -> list[float]:
    """Return when the score of each seed first reached the target, in seconds; NaN if never."""
    return [
        _interpolate([float(row["seconds"]) for row in own], index)
        for own in _by_seed(rows)
        for index in [crossing([float(row[score]) for row in own], target, is_high=is_high)]
    ]


def _by_seed(rows: Rows) -> list[Rows]:
    seeds = dict.fromkeys(row["seed"] for row in rows)
    return [[row for row in rows if row["seed"] == seed] for seed in seeds]


class CurvePoint(NamedTuple):
    """When a trial reached a target; all values are NaN if it never did."""

    seconds: float
    updates: float
    epochs: float


def first_reached(rows: Sequence[Row], accuracy: float) -> CurvePoint:
    """Return when a trial first had this accuracy."""
    index = crossing([row.scores["accuracy"] for row in rows], accuracy, is_high=True)
    seconds, updates, epochs = zip(*(row[:3] for row in rows), strict=True)
    return CurvePoint(
        _interpolate(seconds, index), _interpolate(updates, index), _interpolate(epochs, index)
    )


def crossing(values: Sequence[float], target: float, *, is_high: bool) -> float:
    """Return the fractional index at which the values first reach the target; NaN if never.

    Between two values the curve is a straight line. `is_high`: higher values are better.
    """
    sign = 1 if is_high else -1
    wanted, better = sign * target, [sign * value for value in values]
    if better[0] >= wanted:
        return 0.0
    for index, (low, high) in enumerate(pairwise(better)):
        if high >= wanted:
            return index + (wanted - low) / (high - low)
    return nan


def _interpolate(values: Sequence[float], index: float) -> float:
    """Return the value at a fractional index; NaN for NaN."""
    return nan if isnan(index) else float(np.interp(index, range(len(values)), values))
