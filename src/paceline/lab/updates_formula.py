# SPDX-License-Identifier: BSD-3-Clause
"""A formula for the updates that training needs to a target, given N gradients per update."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paceline.lab import extras

__all__ = ["UpdatesToTarget"]

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class UpdatesToTarget:
    """Updates = floor x (1 + scale / N), the form that a gradient noise scale implies."""

    floor: float
    scale: float  # in gradients

    def updates(self, needed: Floats) -> Floats:
        """Return the number of updates for each N."""
        return np.asarray(self.floor * (1 + self.scale / needed))

    @classmethod
    def fit(cls, needed: Floats, seeds: Floats, updates: Floats) -> "UpdatesToTarget":
        """Fit the formula to counted updates.

        Each seed may be faster or slower than the others by one factor for all N. The fit works on
        logarithms, because relative errors are what counts.
        """

        def residuals(log_scale: float) -> Floats:
            left = np.log(updates) - np.log1p(np.exp(log_scale) / needed)
            means = {seed: left[seeds == seed].mean() for seed in set(seeds.tolist())}
            return np.array([value - means[s] for value, s in zip(left, seeds, strict=True)])

        found = extras.load("scipy.optimize").minimize_scalar(
            lambda log_scale: float(np.sum(residuals(log_scale) ** 2)),
            bounds=(-5.0, 15.0),
            method="bounded",
        )
        scale = float(np.exp(found.x))
        return cls(float(np.exp(np.mean(np.log(updates) - np.log1p(scale / needed)))), scale)
