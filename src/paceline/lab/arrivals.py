# SPDX-License-Identifier: BSD-3-Clause
"""When the k-th of n gradients arrives that are begun together, for times of any mixture.

With F(t) the share of times up to t, the k-th of n independent ones is there by t with the
probability that k or more are: the regularized incomplete beta function I(F(t); k, n - k + 1). Its
mean is an integral over what is left to 1. `sim.orderstats` has formulas for single distributions,
where there are any; this room knows mixtures, and the whole distribution.
"""

import numpy as np
from numpy.typing import NDArray
from scipy import special

from paceline.errors import SpecError
from paceline.latency import Distribution, Exponential, LogNormal, Mixture

__all__ = ["arrived", "mean_arrival", "share"]

Floats = NDArray[np.float64]

STEPS = 2000  # of the integration
REACH = 1e-6  # less is not looked for any more


def share(distribution: Distribution, t: Floats) -> Floats:
    """How many of the times are at most `t`, of each t; raises SpecError for other kinds."""
    t = np.asarray(t, dtype=np.float64)
    match distribution:
        case LogNormal(median, sigma, shift):
            beyond = np.maximum(t - shift, np.finfo(float).tiny)
            return np.asarray(special.ndtr(np.log(beyond / median) / sigma))
        case Exponential(mean_s, shift):
            return np.asarray(-np.expm1(-np.maximum(t - shift, 0) / mean_s))
        case Mixture(weights, parts):
            shares = [share(part, t) for part in parts]
            return np.asarray(np.tensordot(weights, shares, axes=1))
    raise SpecError(f"{str(distribution)!r} must be a mixture of lognormal and exponential times")


def arrived(distribution: Distribution, k: int, n: int, t: Floats) -> Floats:
    """With which probability the k-th of n is there by `t`, for each t."""
    return np.asarray(special.betainc(k, n - k + 1, share(distribution, t)))


def mean_arrival(distribution: Distribution, k: int, n: int) -> float:
    """When the k-th of n is there, on average."""
    end = distribution.mean()
    while arrived(distribution, k, n, np.array([end]))[0] < 1 - REACH:
        end *= 1.5
    t = np.linspace(0.0, end, STEPS)
    return float(np.trapezoid(1 - arrived(distribution, k, n, t), t))
