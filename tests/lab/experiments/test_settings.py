# SPDX-License-Identifier: BSD-3-Clause
"""Settings that experiments share."""

import pytest

from paceline.lab.experiments.settings import CHEN, FACTORS
from paceline.latency import parse_latency


def test_shared_latency_has_the_mean_of_the_paper():
    assert parse_latency(CHEN).mean(0) == pytest.approx(1.617, abs=0.01)


def test_factors_ascend_and_include_one():
    assert list(FACTORS) == sorted(FACTORS)
    assert 1.0 in FACTORS
