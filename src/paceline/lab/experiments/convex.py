# SPDX-License-Identifier: BSD-3-Clause
"""Does the theory hold? The distance to the optimum of a convex problem, and a bound on it.

K-sync uses the first K of 16 gradients. With a fixed rate η, its distance from the optimum shrinks
to a floor. Let F be L-smooth and c-strongly convex, σ² the variance of the gradient of one row, m
the rows per gradient, and η <= 1/L. A step along an unbiased gradient g changes F on average by at
most

    -η |∇F|² + η²L/2 E|g|²  <=  -η/2 |∇F|² + η²L/2 σ²/(Km),    and |∇F|² >= 2c (F - F*), so

    E F(w_J) - F*  <=  φ + (1 - ηc)^J (F(w_0) - F* - φ),    φ = ηLσ²/(2cKm)

This is the bound of Dutta et al. (2018) for K-sync, as we recall it. L and c are those of the
problem; σ² is the largest variance seen during training. There is no such bound here for `async`:
it would need to know how much gradients change while they are under way, which depends on the rate.
So the experiment trains with several rates to find where staleness begins to hurt.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from math import log, nan
from statistics import fmean
from typing import TYPE_CHECKING, Any

import numpy as np

from paceline.lab.data import a9a
from paceline.lab.experiment import Experiment, Lab, Rows, Tables
from paceline.lab.experiments.curves import mean_curve, times_to
from paceline.lab.experiments.tables import column, curve_rows, finite, mean_and_sd, seed_count
from paceline.lab.plotting import new_figure
from paceline.lab.problems.logistic import Census
from paceline.lab.recipe import Recipe
from paceline.lab.trial import Trial
from paceline.watch.figure_style import (
    GREY,
    SERIES,
    WIDTH,
    describe_axes,
    legend_below,
    line_style,
    plain_log,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["CONVEX", "bound"]

WORKERS = 16
LATENCY = "0.5s + exp:0.5s"
ASYNC = 0  # stands for K in the tables
L2 = 0.1
NEAR = 0.01  # the distance F - F* that counts as near the optimum
LABELS = {1: "K = 1", WORKERS: f"K = {WORKERS}", ASYNC: "async"}
"""The rules to try with several rates."""


@dataclass(frozen=True)
class ConvexSettings:
    """How the problem is trained."""

    gradients: tuple[int, ...]  # K
    batch: int  # m
    rate: float  # η
    updates: int  # J
    larger: tuple[float, ...]  # further rates, for the rules in LABELS

    @property
    def rates(self) -> tuple[float, ...]:
        """All rates, from the smallest."""
        return (self.rate, *self.larger)


FULL = ConvexSettings(
    (1, 2, 4, 8, 16), batch=8, rate=0.02, updates=4000, larger=(0.04, 0.08, 0.16, 0.32)
)
QUICK = ConvexSettings((1, 4, 16), batch=2, rate=0.03, updates=1000, larger=(0.15,))


def bound(gradients: int, updates: float, start: float, known: dict[str, float]) -> float:
    """Return the bound on the mean distance to the optimum after this many updates of K-sync."""
    rate, c = known["rate"], known["strong_convexity"]
    floor = rate * known["smoothness"] * known["variance"] / (2 * c * gradients * known["batch"])
    return floor + float((1 - rate * c) ** updates) * (start - floor)


def measure(lab: Lab) -> Tables:
    """Train with every K, and asynchronously, for the same updates; then vary the rate."""
    settings = QUICK if lab.quick else FULL
    cases = list(product((*settings.gradients, ASYNC), lab.seeds))
    trials = [_trial(lab, settings, *case, settings.rate) for case in cases]
    results = lab.run(trials)
    curves: Rows = [
        row
        for (gradients, seed), result in zip(cases, results, strict=True)
        for row in curve_rows({"gradients": gradients, "seed": seed}, result, gap="gap")
    ]
    problem = trials[0].problem
    assert isinstance(problem, Census)
    known: dict[str, float | str] = {
        "workers": WORKERS,
        "batch": settings.batch,
        "rate": settings.rate,
        **problem.curvature._asdict(),
        "variance": max(row.scores["variance"] for r in results for row in r.rows),
    }
    return {"curves": curves, "constants": [known], "rates": _vary_rate(lab, settings)}


def _vary_rate(lab: Lab, settings: ConvexSettings) -> Rows:
    """Return the floor, and when training comes near the optimum, at every rate."""
    rows: Rows = []
    cases = list(product((1, WORKERS, ASYNC), lab.seeds, settings.rates))
    results = lab.run([_trial(lab, settings, *case) for case in cases])
    for (gradients, seed, rate), result in zip(cases, results, strict=True):
        key = {"gradients": gradients, "seed": seed, "rate": rate}
        curve = curve_rows(key, result, gap="gap")
        rows.append(
            {
                **key,
                "floor": nan if result.is_diverged else _late_mean(column(curve, "gap")),
                "near_s": times_to(curve, "gap", NEAR, is_high=False)[0],
            }
        )
    return rows


def _late_mean(gaps: Sequence[float]) -> float:
    """Return the mean distance over the last half of the updates."""
    return fmean(gaps[len(gaps) // 2 :])


def _trial(lab: Lab, settings: ConvexSettings, gradients: int, seed: int, rate: float) -> Trial:
    problem = Census(batch=settings.batch, seed=seed, data=lab.data, l2=L2)
    samples = settings.updates * settings.batch * max(1, gradients)
    return Trial(
        problem=problem,
        recipe=Recipe(rate),
        policy=f"backup:{WORKERS - gradients}" if gradients else "async",
        workers=WORKERS,
        latency=LATENCY,
        epochs=samples / problem.samples,
        rows=20 if lab.quick else 40,
    )


def _curve(rows: Rows, gradients: float, against: str) -> tuple[list[float], list[float]]:
    return mean_curve([row for row in rows if row["gradients"] == gradients], against, "gap")


def floor(tables: Tables, gradients: float) -> float:
    """Return the mean distance over the second half of training, averaged over the seeds."""
    return fmean(_floors(tables, gradients))


def _floors(tables: Tables, gradients: float) -> list[float]:
    """Return the floor of each seed."""
    rows = tables["curves"]
    return [
        _late_mean(column(rows, "gap", gradients=gradients, seed=seed))
        for seed in dict.fromkeys(column(rows, "seed"))
    ]


def seconds_to_near(tables: Tables, gradients: float) -> list[float]:
    """Return the time until training is near the optimum, for each seed."""
    own = [row for row in tables["curves"] if row["gradients"] == gradients]
    return times_to(own, "gap", NEAR, is_high=False)


def worst_ratio(tables: Tables, gradients: float) -> float:
    """Return the largest ratio of the mean distance to its bound, after the start."""
    updates, gaps = _curve(tables["curves"], gradients, "updates")
    return max(
        gap / bound(int(gradients), at, gaps[0], _constants(tables))
        for at, gap in zip(updates[1:], gaps[1:], strict=True)
    )


def slope(tables: Tables) -> float:
    """Return the slope of log floor against log K: -1 if the floor is proportional to 1/K."""
    ks = _ks(tables)
    floors = [log(floor(tables, k)) for k in ks]
    return float(np.polyfit([log(k) for k in ks], floors, 1)[0])


def _ks(tables: Tables) -> list[float]:
    return sorted({float(row["gradients"]) for row in tables["curves"]} - {ASYNC})


def _constants(tables: Tables) -> dict[str, float]:
    return {name: float(value) for name, value in tables["constants"][0].items()}


def draw(tables: Tables) -> "Figure":
    """Draw the distance against updates and time, and the floor against K and the rate."""
    title = "Logistic regression: distance to the optimum, F(w) - F*"
    figure = new_figure(WIDTH, 8, title)
    (left, right), (lower_left, lower_right) = figure.subplots(2, 2)
    _draw_distances(left, right, tables)
    _draw_floors(lower_left, tables)
    _draw_rates(lower_right, tables)
    legend_below(figure, right, left, lower_left)
    return figure


def _look(k: float, tables: Tables) -> dict[str, Any]:
    """Return label and colour for updates of K gradients; K = 0 stands for `async`."""
    if not k:
        return {"label": "async", **line_style("async")}
    return {"label": f"K = {k:g}", "color": SERIES[_ks(tables).index(k) % len(SERIES)]}


def _draw_distances(left: "Axes", right: "Axes", tables: Tables) -> None:
    rows, ks, known = tables["curves"], _ks(tables), _constants(tables)
    for k in [*ks, ASYNC]:
        look = _look(k, tables)
        updates, gaps = _curve(rows, k, "updates")
        left.plot(updates, gaps, **look)
        if k:
            bounds = [bound(int(k), at, gaps[0], known) for at in updates]
            left.plot(updates, bounds, color=look["color"], linestyle=":", linewidth=1)
        seconds, gaps = _curve(rows, k, "seconds")
        right.plot(seconds[1:], gaps[1:], **look)  # a log axis has no time 0
    left.plot([], [], ":", color=GREY, linewidth=1, label="upper bound")
    describe_axes(left, "K gradients per update", "updates", "distance to the optimum")
    left.set_yscale("log")
    describe_axes(right, f"A gradient takes {LATENCY}", "virtual time (s)")
    right.set_yscale("log")
    plain_log(right, "x")


def _draw_floors(axes: "Axes", tables: Tables) -> None:
    ks, known = _ks(tables), _constants(tables)
    floors = [floor(tables, k) for k in ks]
    axes.plot(ks, floors, "o-", color="black", label="where it settles")
    limits = [bound(int(k), float("inf"), 0.0, known) for k in ks]
    axes.plot(ks, limits, ":", color=GREY, linewidth=1)
    axes.plot(ks, [floors[0] / k for k in ks], "--", color=GREY, label="proportional to 1/K")
    title = "Where the distance settles, by K"
    describe_axes(axes, title, "K, gradients per update", "distance to the optimum")
    axes.set(xscale="log", yscale="log")
    axes.set_xticks(ks, [f"{k:g}" for k in ks])
    axes.minorticks_off()


def _draw_rates(axes: "Axes", tables: Tables) -> None:
    rates = _rates(tables)
    for k in LABELS:
        ends = [finite(column(tables["rates"], "floor", gradients=k, rate=r)) for r in rates]
        means = [fmean(own) if own else nan for own in ends]
        axes.plot(rates, means, marker="o", **_look(k, tables))
    describe_axes(axes, "Where the distance settles, by learning rate", "learning rate")
    axes.set(xscale="log", yscale="log")
    axes.set_xticks(rates, [f"{rate:g}" for rate in rates])
    axes.minorticks_off()


def _rates(tables: Tables) -> list[float]:
    return sorted(set(column(tables["rates"], "rate")))


def _rate_lines(tables: Tables) -> str:
    """Say for every rate where training ends, and when it comes near the optimum."""
    lines = []
    for rate in _rates(tables):
        parts = []
        for k, label in LABELS.items():
            floors, seconds = (
                column(tables["rates"], name, gradients=k, rate=rate)
                for name in ("floor", "near_s")
            )
            floor_text = mean_and_sd([1e3 * value for value in floors])
            parts.append(f"{label} {floor_text} ({mean_and_sd(seconds, 0)})")
        lines.append(f"- rate {rate:g}: {', '.join(parts)}")
    return "\n".join(lines)


def describe(tables: Tables) -> str:
    """Summarize the tables in words."""
    known, ks = _constants(tables), _ks(tables)
    labels = {k: f"K = {k:g}" for k in ks} | {ASYNC: "async"}
    floors = ", ".join(
        f"{label}: {mean_and_sd([1e3 * value for value in _floors(tables, k)])}"
        for k, label in labels.items()
    )
    times = ", ".join(
        f"{label}: {mean_and_sd(seconds_to_near(tables, k), 0)}" for k, label in labels.items()
    )
    highest = max(worst_ratio(tables, k) for k in ks)
    position = "below" if highest <= 1 else "partly above"
    return (
        f"{seed_count(tables['curves'])}. Floors of F - F*, times 1000: {floors}. Those "
        f"of K-sync are proportional to K^{slope(tables):.2f}. Seconds until F - F* is {NEAR:g}: "
        f"{times}. The mean curves are {position} their bounds, at {highest:.0%} of them or less "
        f"(L = {known['smoothness']:.3g}, c = {known['strong_convexity']:g}, "
        f"σ² = {known['variance']:.3g}, m = {known['batch']:g}, η = {known['rate']:g}).\n\n"
        f"Floors at several rates, times 1000, with the seconds until F - F* is {NEAR:g} in "
        f"parentheses:\n\n{_rate_lines(tables)}"
    )


CONVEX = Experiment(
    name="convex",
    question="Does the theory of K-sync hold on a convex problem?",
    expected=(
        "Dutta et al., as we recall them and derived again: with a fixed rate, K-sync approaches a "
        "floor proportional to 1/K at a speed that doesn't depend on K, and stays below a bound "
        "with known constants. Asynchronous training comes down sooner, to a higher floor."
    ),
    measure=measure,
    draw=draw,
    describe=describe,
    needs=a9a.SOURCES,
)
