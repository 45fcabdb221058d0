# SPDX-License-Identifier: BSD-3-Clause
"""The quick `convex` experiment shows each effect, and the bound has the right limits."""

import pytest

from paceline.lab.experiment import run_experiment
from paceline.lab.experiments.convex import (
    ASYNC,
    CONVEX,
    bound,
    seconds_to_near,
    slope,
    worst_ratio,
)
from paceline.lab.experiments.tables import column


@pytest.mark.usefixtures("a9a")
def test_gap_stays_below_its_bound_falls_with_k_and_grows_with_staleness(quick, tmp_path):
    tables = CONVEX.measure(quick)
    assert max(worst_ratio(tables, k) for k in (1, 4, 16)) < 1
    assert -1.3 < slope(tables) < -0.7
    (fresh,), (stale,) = (
        column(tables["rates"], "floor", gradients=k, rate=0.15) for k in (1, ASYNC)
    )
    assert fresh < 0.3 * stale
    first, last = (seconds_to_near(tables, k)[0] for k in (ASYNC, 16))
    assert first < 0.2 * last
    assert "below their bounds" in run_experiment(CONVEX, quick, tmp_path)


def test_bound_starts_at_the_gap_and_ends_at_a_floor_proportional_to_one_over_k():
    known = {
        "rate": 0.1,
        "strong_convexity": 0.2,
        "smoothness": 2.0,
        "variance": 3.0,
        "batch": 5,
    }
    assert bound(1, 0, 0.7, known) == pytest.approx(0.7)
    ends = [bound(k, 1e6, 0.7, known) for k in (1, 4)]
    assert ends == pytest.approx([0.1 * 2 * 3 / (2 * 0.2 * 5), 0.1 * 2 * 3 / (2 * 0.2 * 4 * 5)])
