# SPDX-License-Identifier: BSD-3-Clause
"""Distributions: moments, tails, and values that are refused."""

from math import exp, gamma, inf, log, sqrt

import numpy as np
import pytest
from hypothesis import given

from latency_examples import distributions
from paceline.errors import SpecError
from paceline.latency import (
    Constant,
    Distribution,
    Exponential,
    Gamma,
    LogNormal,
    Mixture,
    Pareto,
    Sometimes,
    Sum,
    Weibull,
)

# ---- distributions ----

WEIBULL_1, WEIBULL_2 = gamma(1 + 1 / 1.5), gamma(1 + 2 / 1.5)
MIXED = Mixture((0.25, 0.75), (Constant(4), Exponential(1)))

MOMENTS = [
    (Constant(0.05), 0.05, 0.0),
    (Exponential(2), 2, 2),
    (Exponential(2, shift=3), 5, 2),
    (LogNormal(2, 0.5), 2 * exp(0.125), 2 * sqrt((exp(0.25) - 1) * exp(0.25))),
    (LogNormal(2, 0.5, shift=1), 1 + 2 * exp(0.125), 2 * sqrt((exp(0.25) - 1) * exp(0.25))),
    (Gamma(6, 4), 6, 3),
    (Gamma(6, 4, shift=1), 7, 3),
    (Pareto(2, 5), 2.5, 0.5 * sqrt(5 / 3)),
    (Pareto(2, 5, shift=1), 3.5, 0.5 * sqrt(5 / 3)),
    (Weibull(2, 1.5), 2 * WEIBULL_1, 2 * sqrt(WEIBULL_2 - WEIBULL_1**2)),
    (Weibull(2, 1.5, shift=1), 1 + 2 * WEIBULL_1, 2 * sqrt(WEIBULL_2 - WEIBULL_1**2)),
    (Sometimes(0.25, Exponential(2)), 0.5, sqrt(0.25 * 8 - 0.25)),
    (Sometimes(0, Pareto(1, 1)), 0, 0),
    (Sum((Constant(1), Exponential(3), Gamma(8, 4))), 12, 5),
    (MIXED, 1.75, sqrt(0.25 * 16 + 0.75 * 2 - 1.75**2)),
    (Mixture((0, 1), (Pareto(1, 1), Constant(2))), 2, 0),
]


@pytest.mark.parametrize(("distribution", "mean", "deviation"), MOMENTS, ids=str)
def test_mean_and_deviation_match_the_theory(
    distribution: Distribution, mean: float, deviation: float
) -> None:
    n = 200_000
    sample = distribution.sample(np.random.default_rng(7), n)
    assert sample.shape == (n,)
    assert sample.dtype == np.float64
    assert distribution.mean() == pytest.approx(mean, rel=1e-12)
    assert sample.mean() == pytest.approx(mean, abs=4 * deviation / sqrt(n) + 1e-12)
    assert sample.std() == pytest.approx(deviation, rel=0.03, abs=1e-12)


@pytest.mark.parametrize(
    ("distribution", "median"),
    [
        (LogNormal(2, 3, shift=1), 3),
        (Pareto(2, 0.5, shift=1), 9),
        (Weibull(2, 0.5, shift=1), 1 + 2 * log(2) ** 2),
    ],
    ids=str,
)
def test_medians_of_heavy_tails_match_the_theory(distribution: Distribution, median: float) -> None:
    sample = distribution.sample(np.random.default_rng(7), 200_000)
    assert np.median(sample) == pytest.approx(median, rel=0.03)


def test_pareto_is_never_below_its_scale() -> None:
    assert Pareto(2, 5).sample(np.random.default_rng(7), 10_000).min() >= 2


@pytest.mark.parametrize("heavy", [Pareto(1, 1), LogNormal(1, 40), Weibull(1, 0.001)], ids=str)
def test_mean_that_overflows_is_infinite(heavy: Distribution) -> None:
    assert heavy.mean() == inf
    assert Sum((Constant(1), Sometimes(0.1, heavy))).mean() == inf


@given(distributions)
def test_every_draw_is_finite_and_not_negative(distribution: Distribution) -> None:
    sample = distribution.sample(np.random.default_rng(0), 16)
    assert np.isfinite(sample).all()
    assert (sample >= 0).all()
    assert distribution.mean() >= 0


def test_values_are_converted_to_floats() -> None:
    assert repr(Exponential(np.float64(2), shift=1)) == "Exponential(mean_s=2.0, shift=1.0)"
    assert str(Sometimes(np.float64(0.07), Constant(1))) == "7% 1s"


BAD_VALUES = [
    (lambda: Constant(-1), "seconds must be >= 0, got -1.0"),
    (lambda: Constant(1e13), "seconds must be <= 1e+12, got 1"),
    (lambda: Exponential(0), "mean must be > 0, got 0.0"),
    (lambda: Exponential(1, shift=-0.5), "shift must be >= 0, got -0.5"),
    (lambda: Exponential(float("nan")), "mean must be > 0, got nan"),
    (lambda: Exponential(inf), "mean must be <= 1e+12, got inf"),
    (lambda: LogNormal(1, 0), "sigma must be > 0, got 0.0"),
    (lambda: Gamma(1, -2), "shape must be > 0, got -2.0"),
    (lambda: Pareto(1, 0), "alpha must be > 0, got 0.0"),
    (lambda: Weibull(0, 1), "scale must be > 0, got 0.0"),
    (lambda: Sometimes(1.5, Constant(1)), "probability must be between 0 and 1, got 1.5"),
    (lambda: Sometimes(0.5, MIXED), "Mixture must not be nested here, got '25% 4s | 75% exp:1s'"),
    (lambda: Sum((Constant(1),)), "a sum must have two parts or more, got 1"),
    (lambda: Sum((MIXED, MIXED)), "Mixture must not be nested here"),
    (lambda: Mixture((1,), (Constant(1),)), "two parts or more must have a weight >= 0 each"),
    (lambda: Mixture((2, -1), (Constant(1),) * 2), "must have a weight >= 0 each, got (2, -1)"),
    (lambda: Mixture((0.5, 0.4), (Constant(1),) * 2), "weights must add up to 100%, got 90%"),
    (lambda: Mixture((0.5, 0.5), (MIXED, Constant(1))), "Mixture must not be nested here"),
]


@pytest.mark.parametrize(("make", "message"), BAD_VALUES, ids=[text for _, text in BAD_VALUES])
def test_invalid_value_is_refused_and_shown(make, message: str) -> None:
    with pytest.raises(SpecError) as caught:
        make()
    assert message in str(caught.value)
