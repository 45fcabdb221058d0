# SPDX-License-Identifier: BSD-3-Clause
"""Expected arrival times in closed form: the k-th of n gradients that start together.

If late work is cancelled, an update under `backup` takes the N-th of W arrivals. This module gives
its expectation without a simulation; docs/theory.md derives every formula. The planner doesn't use
it: the tests compare the simulator with it. Most formulas need SciPy, which is imported on use.

With X = Q(U) and U uniform, the k-th smallest of n draws is Q of the k-th smallest of n uniform
draws, which is Beta(k, n - k + 1). Constant, exponential and Pareto times give finite sums, Weibull
a finite sum that cancels unless k is small; the others are integrated. Unlike
`Distribution.sample`, these formulas don't cut times off at 30,000 years.
"""

from collections.abc import Callable
from functools import partial
from importlib import import_module
from math import comb, exp, fsum, inf, isfinite, log, sqrt
from sys import float_info
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.errors import SpecError
from paceline.latency import (
    Constant,
    Distribution,
    Exponential,
    Gamma,
    LogNormal,
    Pareto,
    Weibull,
)

__all__ = ["expected_finish_time", "expected_order_statistic", "finish_bounds"]

Floats = NDArray[np.float64]

ACCURACY = 1e-11  # relative error up to which the alternating sum is used
LOG_MAX = log(float_info.max)
NEGLIGIBLE = 40.0  # a logarithm this much smaller is below the rounding error of the sum
REACH = 48.0  # in widths of the Beta density; its tails are at most exp(-REACH) there
STEPS = 32  # integration steps per width
TERMS_MAX = 20  # with more terms the alternating sum always cancels


def expected_order_statistic(distribution: Distribution, k: int, n: int) -> float:
    """Return the expected k-th smallest of n independent draws; inf if it doesn't exist.

    Raises SpecError for sums, mixtures and other distributions without a formula.
    """
    if not 1 <= k <= n:
        raise SpecError(f"k must be between 1 and n = {n}, got {k}")
    match distribution:
        case Constant(seconds):
            return seconds
        case Exponential(mean_s, shift):
            return shift + mean_s * fsum(1 / i for i in range(n - k + 1, n + 1))
        case Pareto(scale, alpha, shift):
            return shift + scale * _pareto(1 / alpha, k, n)
        case Weibull(scale, shape, shift):
            return shift + scale * _weibull(1 / shape, k, n)
        case LogNormal(median, sigma, shift):
            return shift + median * _integrate(partial(_log_normal_quantile, sigma), k, n)
        case Gamma(mean_s, shape, shift):
            return shift + mean_s * _integrate(partial(_log_gamma_quantile, shape), k, n)
    raise SpecError(
        f"{str(distribution)!r} has no formula for its order statistics; simulate it, "
        "with `paceline plan` or sim.fast.version_durations"
    )


# --------------------------------------------------------------------- late work that is finished


def finish_bounds(distribution: Distribution, needed: int, workers: int) -> tuple[float, float]:
    """Return bounds of the mean update time when late work is finished and then dropped.

    They hold for independent times with the same distribution. The lower bound is the N-th of W
    fresh draws, as with cancelling. The upper bound is the last of N fresh draws: the N workers
    that made the previous update are certainly free.
    """
    low = expected_order_statistic(distribution, needed, workers)
    return low, expected_order_statistic(distribution, needed, needed)


def expected_finish_time(distribution: Exponential, needed: int, workers: int) -> float:
    """Return the mean time of an update, after the first, when late work is finished.

    This is exact, but only for exponential times without a shift: they are memoryless, so the rest
    of late work takes as long as new work, and every version starts in the same state.
    """
    if not 1 <= needed <= workers:
        raise SpecError(f"needed must be between 1 and workers = {workers}, got {needed}")
    if distribution.shift:
        raise SpecError(
            f"only exponential times without shift are memoryless, got {str(distribution)!r}; "
            "use finish_bounds or simulate"
        )
    # `left[j]` is the expected time to the N-th arrival, in means, with j workers still on old
    # work, when `busy` workers in total have not arrived; one of them finishes next. With b busy
    # workers the version is closed.
    backups = workers - needed
    left = [0.0] * (backups + 1)
    for busy in range(backups + 1, workers + 1):
        before, left = left, []
        for late in range(backups + 1):
            arrival = (busy - late) * before[late]
            caught_up = late * left[late - 1] if late else 0.0
            left.append((1 + arrival + caught_up) / busy)
    return distribution.mean_s * left[backups]


# ------------------------------------------------------------------------------ without the scale


def _pareto(a: float, k: int, n: int) -> float:
    """For (1 - u) ** -a: the product of i / (i - a) over the n - k + 1 <= i <= n."""
    later = n - k + 1
    if later <= a:
        return inf
    return _exp(-fsum(np.log1p(-a / np.arange(later, n + 1)).tolist()))


def _weibull(a: float, k: int, n: int) -> float:
    """For (-log(1 - u)) ** a: the smallest of m draws has mean Gamma(1 + a) / m ** a. The k-th
    smallest is an alternating sum of these, used only if it is accurate enough."""
    if k <= TERMS_MAX:
        later = n - k + 1
        terms = [(-1) ** i * comb(k - 1, i) * float(later + i) ** -(1 + a) for i in range(k)]
        total, error = fsum(terms), 4 * float_info.epsilon * fsum(map(abs, terms))
        value = later * comb(n, k - 1) * float(_special().gamma(1 + a)) * total
        if isfinite(value) and error <= ACCURACY * total and total > 0:
            return value
    return _integrate(lambda t: a * np.log(_minus_log_sf(t)), k, n)


def _exp(logarithm: float) -> float:
    """Return exp(logarithm), or inf if a float can't hold it."""
    return exp(logarithm) if logarithm <= LOG_MAX else inf


# -------------------------------------------------------------------------------------- integrals


def _integrate(log_quantile: Callable[[Floats], Floats], k: int, n: int) -> float:
    """Return E[Q(U)] for U ~ Beta(k, n - k + 1), by the trapezoidal rule over t = logit U.

    In t the density is u**k (1 - u)**(n - k + 1) / B, smooth with exponential tails on both sides,
    so the rule converges geometrically. Dividing by the sum of the density makes B unnecessary.
    """
    special = _special()
    later = n - k + 1
    centre, width, reach = log(k / later), sqrt(1 / k + 1 / later), REACH
    while True:
        t = centre + width * np.arange(-REACH, reach, 1 / STEPS)
        with np.errstate(divide="ignore"):  # a quantile may underflow to 0
            weight = -k * np.logaddexp(0, -t) - later * np.logaddexp(0, t)
            value = weight + log_quantile(t)
        logarithm = float(special.logsumexp(value) - special.logsumexp(weight))
        if logarithm > LOG_MAX or value[-1] < value.max() - NEGLIGIBLE:
            return _exp(logarithm)
        reach *= 2  # the quantile grows nearly as fast as the density falls


def _minus_log_sf(t: Floats) -> Floats:
    """Return -log(1 - u)."""
    return np.asarray(np.logaddexp(0, t))


def _log_normal_quantile(sigma: float, t: Floats) -> Floats:
    return np.asarray(-sigma * _special().ndtri_exp(-_minus_log_sf(t)))


def _log_gamma_quantile(shape: float, t: Floats) -> Floats:
    """Use the nearer tail of the gamma distribution with mean 1, which keeps the precision."""
    special = _special()
    lower = special.gammaincinv(shape, special.expit(np.minimum(t, 0)))
    upper = special.gammainccinv(shape, special.expit(-np.maximum(t, 0)))
    return np.asarray(np.log(np.where(t < 0, lower, upper) / shape))


def _special() -> Any:
    """Import SciPy's special functions on use: no other part of the simulator needs SciPy."""
    try:
        return import_module("scipy.special")
    except ModuleNotFoundError:
        raise SpecError(
            "this formula needs scipy, which is not installed; "
            "install it with: pip install 'paceline[lab]'"
        ) from None
