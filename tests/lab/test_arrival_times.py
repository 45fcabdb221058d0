# SPDX-License-Identifier: BSD-3-Clause
"""Arrival times of mixtures match closed forms and random draws."""

import numpy as np
import pytest

from paceline.errors import SpecError
from paceline.lab.arrival_times import arrival_cdf, cdf, mean_arrival
from paceline.latency import parse_latency
from paceline.sim.orderstats import expected_order_statistic

MIXTURE = "90% lognormal:1s,0.1 | 7% lognormal:2s,0.2,shift=0.5s | 3% exp:1s,shift=1s"


def base(text):
    return parse_latency(text).base


@pytest.mark.parametrize("text", ["lognormal:2s,0.3", "exp:1s", "exp:1s,shift=2s"])
@pytest.mark.parametrize("k", [1, 5, 10])
def test_means_match_the_closed_forms(text, k):
    expected = expected_order_statistic(base(text), k, 10)
    assert mean_arrival(base(text), k, 10) == pytest.approx(expected, rel=1e-4)


def test_mixture_of_equal_parts_is_that_part():
    halves = base("50% exp:1s | 50% exp:1s")
    assert mean_arrival(halves, 3, 4) == pytest.approx(mean_arrival(base("exp:1s"), 3, 4))


def test_probabilities_and_means_match_random_draws():
    mixture = base(MIXTURE)
    drawn = np.sort(mixture.sample(np.random.default_rng(0), 200_000).reshape(-1, 20), axis=1)
    for t in (0.9, 1.1, 1.8, 3.0):
        assert cdf(mixture, t) == pytest.approx((drawn <= t).mean(), abs=0.005)
        for k in (1, 18, 20):
            assert arrival_cdf(mixture, k, 20, t) == pytest.approx(
                (drawn[:, k - 1] <= t).mean(), abs=0.02
            )
    for k in (1, 18, 20):
        assert mean_arrival(mixture, k, 20) == pytest.approx(drawn[:, k - 1].mean(), rel=0.01)


def test_nothing_arrives_before_the_shift():
    assert cdf(base("exp:1s,shift=2s"), [0.0, 2.0]).tolist() == [0, 0]
    assert cdf(base("lognormal:1s,0.1,shift=2s"), [0.0, 2.0]).tolist() == [0, 0]


def test_other_distributions_are_refused():
    with pytest.raises(SpecError, match="expected a mixture of lognormal and exponential times"):
        cdf(base("1s + exp:1s"), 1.0)
