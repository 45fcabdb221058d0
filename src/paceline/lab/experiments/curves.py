# SPDX-License-Identifier: BSD-3-Clause
"""Curves of several seeds, as one."""

from math import nan
from statistics import fmean

from paceline.lab.experiment import Rows

__all__ = ["mean_curve", "when"]


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
