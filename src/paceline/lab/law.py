# SPDX-License-Identifier: BSD-3-Clause
"""How many updates a target needs, by the gradients in each: what was counted, as a formula."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize_scalar

__all__ = ["Law"]

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Law:
    """Updates needed: floor x (1 + scale / N), the form that a gradient noise scale has."""

    floor: float
    scale: float  # in gradients

    def updates(self, needed: Floats) -> Floats:
        """For each N."""
        return np.asarray(self.floor * (1 + self.scale / needed))

    @classmethod
    def of(cls, needed: Floats, seeds: Floats, updates: Floats) -> "Law":
        """The law that fits best; a seed may be faster or slower, by the same factor for all N.

        Relative errors count, so all is done in logarithms.
        """

        def by_seed(log_scale: float) -> Floats:
            left = np.log(updates) - np.log1p(np.exp(log_scale) / needed)
            means = {seed: left[seeds == seed].mean() for seed in set(seeds.tolist())}
            return np.array([value - means[s] for value, s in zip(left, seeds, strict=True)])

        found = minimize_scalar(
            lambda log_scale: float(np.sum(by_seed(log_scale) ** 2)),
            bounds=(-5.0, 15.0),
            method="bounded",
        )
        scale = float(np.exp(found.x))
        return cls(float(np.exp(np.mean(np.log(updates) - np.log1p(scale / needed)))), scale)
