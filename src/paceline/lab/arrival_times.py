# SPDX-License-Identifier: BSD-3-Clause
"""When the k-th of n gradients arrives, if all start together, for mixtures of distributions.

Let F(t) be the fraction of compute times up to t. The k-th of n independent gradients has arrived
by t if at least k of them have, which has the probability I(F(t); k, n - k + 1), the regularized
incomplete beta function. Its mean is the integral of what is left to 1. `sim.orderstats` has closed
forms for single distributions; this module handles mixtures, and gives whole distributions.
"""

import numpy as np
from numpy.typing import NDArray

from paceline.errors import SpecError
from paceline.lab import extras
from paceline.latency import Distribution, Exponential, LogNormal, Mixture

__all__ = ["arrival_cdf", "cdf", "mean_arrival"]

Floats = NDArray[np.float64]

STEPS = 2000  # of the numerical integration
TAIL = 1e-6  # probability that the integration leaves out


def cdf(distribution: Distribution, t: Floats) -> Floats:
    """Return the probability that a time is at most t, for each t.

    Raises SpecError unless the distribution is a mixture of lognormal and exponential times.
    """
    t = np.asarray(t, dtype=np.float64)
    match distribution:
        case LogNormal(median, sigma, shift):
            beyond = np.maximum(t - shift, np.finfo(float).tiny)
            special = extras.load("scipy.special")
            return np.asarray(special.ndtr(np.log(beyond / median) / sigma))
        case Exponential(mean_s, shift):
            return np.asarray(-np.expm1(-np.maximum(t - shift, 0) / mean_s))
        case Mixture(weights, parts):
            return np.asarray(np.tensordot(weights, [cdf(part, t) for part in parts], axes=1))
    raise SpecError(
        f"expected a mixture of lognormal and exponential times, got {str(distribution)!r}"
    )


def arrival_cdf(distribution: Distribution, k: int, n: int, t: Floats) -> Floats:
    """Return the probability that the k-th of n has arrived by t, for each t."""
    special = extras.load("scipy.special")
    return np.asarray(special.betainc(k, n - k + 1, cdf(distribution, t)))


def mean_arrival(distribution: Distribution, k: int, n: int) -> float:
    """Return the mean time at which the k-th of n arrives."""
    end = distribution.mean()
    while arrival_cdf(distribution, k, n, np.array([end]))[0] < 1 - TAIL:
        end *= 1.5
    t = np.linspace(0.0, end, STEPS)
    return float(np.trapezoid(1 - arrival_cdf(distribution, k, n, t), t))
