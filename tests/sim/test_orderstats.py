# SPDX-License-Identifier: BSD-3-Clause
"""The formulas of docs/theory.md, compared with the simulator and the planner.

A simulated mean agrees with a formula if it is within five of its own standard errors. The seeds
are fixed, so a test that passes once always passes.
"""

import subprocess
import sys
from functools import cache
from itertools import pairwise
from math import ceil, exp, inf, log

import numpy as np
import pytest
from numpy.typing import ArrayLike
from scipy.special import lambertw, ndtri

from paceline.core.events import Fate
from paceline.errors import SpecError
from paceline.latency import (
    Constant,
    Distribution,
    Exponential,
    Gamma,
    Latency,
    LogNormal,
    Pareto,
    Weibull,
    parse_latency,
)
from paceline.sim.cluster import Cluster
from paceline.sim.convergence import every_gradient_counts, noise_scale
from paceline.sim.fast import draw_times, version_durations
from paceline.sim.orderstats import (
    expected_finish_time,
    expected_order_statistic,
    finish_bounds,
)
from paceline.sim.planner import plan
from paceline.sim.simulate import simulate
from paceline.spec import RunSpec
from paceline.trace.schema import Trace

DISTRIBUTIONS = [
    Constant(2.0),
    Exponential(0.2),
    Exponential(0.2, shift=0.8),
    LogNormal(0.9, 0.4),
    LogNormal(0.9, 1.5, shift=0.1),
    Gamma(1.0, 4.0),
    Gamma(1.0, 0.3, shift=0.5),
    Pareto(0.6, 2.5),
    Pareto(0.9, 10.0, shift=0.1),
    Weibull(1.1, 1.5),
    Weibull(0.8, 0.7, shift=0.2),
]
every_distribution = pytest.mark.parametrize("distribution", DISTRIBUTIONS, ids=str)


@cache
def expected(distribution: Distribution, n: int) -> tuple[float, ...]:
    """Return the expected arrival times of n gradients, first to last."""
    return tuple(expected_order_statistic(distribution, k, n) for k in range(1, n + 1))


def assert_agrees(sample: ArrayLike, value: float, batches: int | None = None) -> None:
    """Assert that the mean is within five standard errors; use block means for dependent values."""
    values = np.asarray(sample, dtype=float)
    if batches is not None:
        values = np.array([part.mean() for part in np.array_split(values, batches)])
    error = values.std(ddof=1) / len(values) ** 0.5
    assert error < 0.02 * value, "too few draws to tell anything"
    assert abs(values.mean() - value) <= 5 * error


def run(policy: str, latency: str, workers: int = 8, **spec: object) -> Trace:
    settings = {"steps": 800, "seed": 7} | spec
    return simulate(policy, Cluster.parse(latency), RunSpec(workers=workers, **settings))


def step_times(trace: Trace) -> np.ndarray:
    return np.diff([0.0, *(update.t for update in trace.updates())])


# --------------------------------------------------------------------------- laws of the formulas


@every_distribution
def test_later_arrival_is_later(distribution: Distribution) -> None:
    values = expected(distribution, 20)
    if isinstance(distribution, Constant):
        assert set(values) == {distribution.seconds}
    else:
        assert all(a < b for a, b in pairwise(values))


@every_distribution
def test_more_workers_make_the_kth_arrival_earlier(distribution: Distribution) -> None:
    values = [expected_order_statistic(distribution, 5, n) for n in (5, 6, 10, 100, 10_000)]
    assert values == sorted(values, reverse=True)


@every_distribution
@pytest.mark.parametrize("n", [1, 2, 20])
def test_order_statistics_sum_to_n_means(distribution: Distribution, n: int) -> None:
    assert sum(expected(distribution, n)) == pytest.approx(n * distribution.mean(), rel=1e-10)


@every_distribution
def test_order_statistics_obey_the_triangle_rule(distribution: Distribution) -> None:
    """(n-k) E[X_(k:n)] + k E[X_(k+1:n)] = n E[X_(k:n-1)], for any distribution."""
    n = 20
    smaller, larger = expected(distribution, n - 1), expected(distribution, n)
    for k in range(1, n):
        left = (n - k) * larger[k - 1] + k * larger[k]
        assert left == pytest.approx(n * smaller[k - 1], rel=1e-10)


def test_first_of_n_exponentials_has_mean_over_n() -> None:
    value = expected_order_statistic(Exponential(0.2, shift=0.8), 1, 8)
    assert value == pytest.approx(0.8 + 0.2 / 8)


@pytest.mark.parametrize(("k", "n"), [(1, 8), (7, 8), (8, 8), (60, 100), (10_000, 10_000)])
def test_all_formulas_agree_where_distributions_coincide(k: int, n: int) -> None:
    """Gamma and Weibull of shape 1 are exponential, and so is the logarithm of a Pareto."""
    value = expected_order_statistic(Exponential(1.0), k, n)
    assert expected_order_statistic(Gamma(1.0, 1.0), k, n) == pytest.approx(value, rel=1e-10)
    assert expected_order_statistic(Weibull(1.0, 1.0), k, n) == pytest.approx(value, rel=1e-10)
    nearly = expected_order_statistic(Pareto(1.0, 1e6), k, n)
    assert log(nearly) * 1e6 == pytest.approx(value, rel=1e-4)


@pytest.mark.parametrize("k", [1, 2, 5, 10, 15, 20, 25, 40])
def test_alternating_sum_of_weibull_is_not_used_when_it_cancels(k: int) -> None:
    """Shape 1/2 is the square of an exponential time: its mean, squared, and its variance."""
    orders = range(40 - k + 1, 41)
    value = sum(1 / i for i in orders) ** 2 + sum(1 / i**2 for i in orders)
    assert expected_order_statistic(Weibull(1.0, 0.5), k, 40) == pytest.approx(value, rel=1e-10)


def test_expectation_that_does_not_exist_is_inf() -> None:
    """With a Pareto tail the mean exists only with more than 1/alpha - 1 backups."""
    assert expected_order_statistic(Pareto(1.0, 0.4), 8, 8) == inf
    assert expected_order_statistic(Pareto(1.0, 0.4), 7, 8) == inf
    assert expected_order_statistic(Pareto(1.0, 0.4), 6, 8) < inf


def test_far_tails_are_integrated_and_overflow_is_inf() -> None:
    assert expected_order_statistic(LogNormal(1.0, 10.0), 1, 1) == pytest.approx(exp(50.0))
    assert expected_order_statistic(LogNormal(1.0, 100.0), 8, 8) == inf
    assert expected_order_statistic(Weibull(1.0, 0.001), 8, 8) == inf


@pytest.mark.parametrize("text", ["50ms + 5% exp:500ms", "95% 50ms | 5% exp:1s", "5% exp:1s"])
def test_distribution_without_a_formula_is_refused(text: str) -> None:
    with pytest.raises(SpecError, match="simulate"):
        expected_order_statistic(parse_latency(text).base, 1, 8)


@pytest.mark.parametrize(("k", "n"), [(0, 8), (9, 8), (1, 0)])
def test_k_must_be_one_of_n(k: int, n: int) -> None:
    with pytest.raises(SpecError, match=f"between 1 and n = {n}, got {k}"):
        expected_order_statistic(Exponential(1.0), k, n)


# ------------------------------------------------------------------------- against the simulator


@pytest.mark.parametrize("distribution", DISTRIBUTIONS[1:], ids=str)
def test_simulated_updates_take_the_expected_order_statistic(distribution: Distribution) -> None:
    # The last arrivals of a heavy tail have no variance, hence no standard error.
    workers, needed = 12, np.array([1, 4, 9, 11])
    times = draw_times(Latency(distribution), workers, 3000, seed=1)
    lasted = version_durations(times, needed, "cancel")
    for n, sample in zip(needed.tolist(), lasted.T, strict=True):
        assert_agrees(sample, expected_order_statistic(distribution, n, workers))


@pytest.mark.parametrize("b", [0, 2])
def test_full_trace_has_the_same_step_times(b: int) -> None:
    lasted = step_times(run(f"backup:{b}", "exp:200ms,shift=800ms"))
    assert_agrees(lasted, expected_order_statistic(Exponential(0.2, shift=0.8), 8 - b, 8))


# --------------------------------------------------------------------- late work that is finished


@pytest.mark.parametrize(("needed", "workers"), [(1, 8), (4, 8), (7, 8), (15, 20)])
def test_finishing_late_exponential_work_has_a_formula(needed: int, workers: int) -> None:
    times = draw_times(Latency(Exponential(1.0)), workers, 3000, seed=2)
    lasted = version_durations(times, np.array([needed]), "finish")[1:, 0]
    assert_agrees(lasted, expected_finish_time(Exponential(1.0), needed, workers))


def test_full_trace_that_finishes_late_work_agrees() -> None:
    lasted = step_times(run("backup:3", "exp:1s", late="finish"))[1:]
    assert_agrees(lasted, expected_finish_time(Exponential(1.0), 5, 8))


@pytest.mark.parametrize("workers", [1, 8])
def test_without_backups_nothing_is_late(workers: int) -> None:
    exact = expected_order_statistic(Exponential(0.3), workers, workers)
    assert expected_finish_time(Exponential(0.3), workers, workers) == pytest.approx(exact)


@pytest.mark.parametrize("needed", range(1, 9))
def test_finishing_is_between_its_bounds(needed: int) -> None:
    low, high = finish_bounds(Exponential(1.0), needed, 8)
    exact = expected_finish_time(Exponential(1.0), needed, 8)
    assert low * (1 - 1e-12) <= exact <= high * (1 + 1e-12)


@pytest.mark.parametrize("distribution", DISTRIBUTIONS[1:], ids=str)
def test_finishing_late_work_of_any_kind_is_between_the_bounds(distribution: Distribution) -> None:
    workers, needed = 10, np.array([2, 5, 8])
    times = draw_times(Latency(distribution), workers, 2000, seed=3)
    means = version_durations(times, needed, "finish").mean(axis=0)
    for n, mean in zip(needed.tolist(), means.tolist(), strict=True):
        low, high = finish_bounds(distribution, n, workers)
        assert low < mean < high


def test_finishing_with_memory_has_no_formula() -> None:
    with pytest.raises(SpecError, match=r"memoryless.*finish_bounds"):
        expected_finish_time(Exponential(1.0, shift=0.1), 7, 8)
    with pytest.raises(SpecError, match="between 1 and workers = 8, got 9"):
        expected_finish_time(Exponential(1.0), 9, 8)


# -------------------------------------------------------------------------- rules without barrier


@pytest.mark.parametrize("k", [3, 8])
def test_first_k_batches_of_exponential_times_take_k_means_over_workers(k: int) -> None:
    assert_agrees(step_times(run(f"batchsync:{k}", "exp:1s", steps=900)), k / 8)


@pytest.mark.parametrize(
    ("latency", "cv2"), [("gamma:1s,4", 0.25), ("exp:200ms,shift=800ms", 0.04)]
)
def test_first_k_batches_lose_work_in_progress(latency: str, cv2: float) -> None:
    """k·m/W plus, for W - 1 workers, a part that depends on the spread; for k >= 2 W."""
    lasted = step_times(run("batchsync:24", latency, steps=200))
    assert_agrees(lasted, 24 / 8 + 7 / 8 * (1 - cv2) / 2)


@pytest.mark.parametrize("latency", ["exp:1s", "gamma:1s,4", "lognormal:1s,0.5"])
def test_asynchronous_throughput_is_workers_over_mean(latency: str) -> None:
    mean = parse_latency(latency).mean(0)
    assert_agrees(step_times(run("async", latency, steps=8000)), mean / 8, batches=40)


@pytest.mark.parametrize("latency", ["exp:1s", "50ms", "1s + exp:10ms; workers 0-2 x3"])
@pytest.mark.parametrize(("policy", "c"), [("async", 1), ("softsync:3", 3), ("softsync:8", 8)])
def test_mean_staleness_is_w_minus_one_over_c(policy: str, c: int, latency: str) -> None:
    """Each update makes the W - 1 gradients in progress one update older. That is all the staleness
    there is, for any times and for equal or unequal workers."""
    updates, workers = 600, 8
    trace = run(policy, latency, steps=updates)
    assert sum(g.staleness for g in trace.gradients()) == (workers - 1) * updates
    accepted = [g.staleness for g in trace.gradients() if g.fate is Fate.ACCEPTED]
    assert np.mean(accepted) == pytest.approx((workers - 1) / c, rel=0.03)


def test_slow_worker_is_proportionally_staler() -> None:
    """If worker i has rate r_i and all have rate R, its gradients are R/r_i - 1 updates old."""
    trace = run("async", "1s + exp:10ms; worker 0 x3", steps=6000)
    rate = 7 + 1 / 3
    for worker, own_rate in ((0, 1 / 3), (1, 1.0)):
        mine = [g.staleness for g in trace.gradients() if g.worker == worker]
        assert np.mean(mine) == pytest.approx(rate / own_rate - 1, rel=0.02)


# ------------------------------------------------------------------------------ time to the target


def best_backups(distribution: Distribution, workers: int) -> int:
    """Return the b with the smallest E[T_N] / N according to the formulas."""
    needed = np.arange(1, workers + 1)
    return workers - 1 - int(np.argmin(np.array(expected(distribution, workers)) / needed))


@pytest.mark.parametrize("ratio", [0.5, 1.0, 3.0, 10.0])
@pytest.mark.parametrize("workers", [8, 40, 200])
def test_best_b_for_shifted_exponential_is_a_fixed_share(ratio: float, workers: int) -> None:
    """b/W = 1/y, where y - log y = 1 + shift/mean, to within one backup."""
    share = -1 / lambertw(-exp(-1 - ratio), -1).real
    b = best_backups(Exponential(0.1, shift=0.1 * ratio), workers)
    assert abs(b - share * workers) <= 1


@pytest.mark.parametrize("alpha", [1.5, 2.5, 6.0, 30.0])
@pytest.mark.parametrize("workers", [8, 40, 200])
def test_best_b_for_pareto_is_in_closed_form(alpha: float, workers: int) -> None:
    b = max(0, ceil((workers - alpha) / (1 + alpha)))
    assert best_backups(Pareto(1.0, alpha), workers) == b


@pytest.mark.parametrize("workers", [2, 8, 40])
def test_one_backup_pays_if_the_last_gap_is_more_than_a_share(workers: int) -> None:
    """For the shifted exponential: if shift/mean < W - H_W."""
    limit = workers - sum(1 / i for i in range(1, workers + 1))
    assert best_backups(Exponential(1.0, shift=limit + 0.01), workers) == 0
    assert best_backups(Exponential(1.0, shift=limit - 0.01), workers) > 0


@every_distribution
@pytest.mark.parametrize("beta", [0.5, 8.0, 300.0])
def test_dropping_one_more_pays_by_the_gap_rule(distribution: Distribution, beta: float) -> None:
    """If (T_N - T_(N-1)) / T_N > (1/N) · beta / (N - 1 + beta), with a noise of beta batches."""
    workers = 20
    times = np.array(expected(distribution, workers))
    updates = noise_scale(beta * 32, 32, workers, 1000).updates(np.arange(1.0, workers + 1))
    for n in range(2, workers + 1):
        gap = (times[n - 1] - times[n - 2]) / times[n - 1]
        pays = times[n - 2] * updates[n - 2] < times[n - 1] * updates[n - 1]
        assert pays == (gap > beta / (n - 1 + beta) / n)


def test_best_share_is_where_a_line_from_the_origin_touches_the_quantile_function() -> None:
    workers, distribution = 200, LogNormal(1.0, 0.5)
    share = np.linspace(0.5, 0.999, 2000)
    quantile = np.exp(0.5 * ndtri(share))
    touching = share[np.argmin(quantile / share)]
    assert best_backups(distribution, workers) == pytest.approx((1 - touching) * workers, abs=1)


@pytest.mark.parametrize(
    "distribution",
    [Exponential(0.1, shift=0.1), Exponential(0.1, shift=0.5), Pareto(1.0, 2.5), LogNormal(1, 0.5)],
    ids=str,
)
@pytest.mark.parametrize("workers", [12])
def test_planner_agrees_with_the_formulas(distribution: Distribution, workers: int) -> None:
    made = plan(
        Cluster(Latency(distribution)),
        RunSpec(workers=workers, seed=5),
        every_gradient_counts(workers, 1000.0),
    )
    best = best_backups(distribution, workers)
    low, high = made.flat
    assert low <= best <= high
    exact = expected_order_statistic(distribution, workers - best, workers)
    seconds = exact * 1000 * workers / (workers - best)
    assert made.best.seconds == pytest.approx(seconds, rel=0.02)


# -------------------------------------------------------------------------- the optional package


def test_formula_that_needs_scipy_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "scipy.special", None)
    with pytest.raises(SpecError, match=r"needs scipy.*: pip install 'paceline\[lab\]'$"):
        expected_order_statistic(Gamma(1.0, 4.0), 2, 3)
    assert expected_order_statistic(Exponential(1.0), 1, 4) == 0.25


def test_simulator_and_planner_run_without_scipy() -> None:
    program = (
        "import sys; sys.modules['scipy'] = None\n"
        "from paceline.cli import main\n"
        "sys.argv = ['paceline', 'plan', '--workers', '4', '--latency', 'exp:1s']\nmain()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
