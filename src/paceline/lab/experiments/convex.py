# SPDX-License-Identifier: BSD-3-Clause
"""Does theory hold? The distance to the optimum of a convex problem, and a bound on it.

K-sync takes the first K of 16 gradients; with a fixed rate η its distance shrinks to a floor. Let F
be L-smooth and c-strongly convex, σ² the variance of the gradient of one row, m the rows of a
gradient, and η <= 1/L. A step along a gradient g without bias changes F on average by at most

    -η |∇F|² + η²L/2 E|g|²  <=  -η/2 |∇F|² + η²L/2 σ²/(Km),    and |∇F|² >= 2c (F - F*), so

    E F(w_J) - F*  <=  φ + (1 - ηc)^J (F(w_0) - F* - φ),    φ = ηLσ²/(2cKm)

which is the bound of Dutta et al. (2018) for K-sync as we recall it. L and c are those of the
problem, σ² is the largest that was seen on the way. There is no such line for `async`: its bound
needs to know how far gradients change while they are under way. That goes with the rate; so where
staleness begins to hurt is looked at with several.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from math import log, nan
from statistics import fmean

import numpy as np
from matplotlib.figure import Figure

from paceline.lab.data import a9a
from paceline.lab.experiment import Experiment, Lab, Rows, Tables
from paceline.lab.experiments.curves import mean_curve, times_to
from paceline.lab.experiments.rows import curve_rows
from paceline.lab.experiments.settings import finite, picked, seeds_of, spread
from paceline.lab.problems.convex import Census
from paceline.lab.recipe import Recipe
from paceline.lab.trial import Trial

__all__ = ["CONVEX", "bound"]

WORKERS = 16
LATENCY = "0.5s + exp:0.5s"
ASYNC = 0  # in place of K, in the tables
L2 = 0.1
NEAR = 0.01  # of F
LABELS = {1: "K = 1", WORKERS: f"K = {WORKERS}", ASYNC: "async"}
"""Those that are tried with several rates."""


@dataclass(frozen=True)
class Setting:
    """How the problem is trained."""

    gradients: tuple[int, ...]  # K
    batch: int  # m
    rate: float  # η
    updates: int  # J
    larger: tuple[float, ...]  # rates, for one gradient in an update, for all, and for stale ones

    @property
    def rates(self) -> tuple[float, ...]:
        """From the smallest on."""
        return (self.rate, *self.larger)


FULL = Setting((1, 2, 4, 8, 16), batch=8, rate=0.02, updates=4000, larger=(0.04, 0.08, 0.16, 0.32))
QUICK = Setting((1, 4, 16), batch=2, rate=0.03, updates=1000, larger=(0.15,))


def bound(gradients: int, updates: float, start: float, known: dict[str, float]) -> float:
    """On the distance to the optimum after so many updates of K-sync, on average."""
    rate, c = known["rate"], known["strong_convexity"]
    floor = rate * known["smoothness"] * known["variance"] / (2 * c * gradients * known["batch"])
    return floor + float((1 - rate * c) ** updates) * (start - floor)


def measure(lab: Lab) -> Tables:
    """Train with every K, and asynchronously, for as many updates; with larger rates as well."""
    setting = QUICK if lab.quick else FULL
    cases = list(product((*setting.gradients, ASYNC), lab.seeds))
    trials = [_trial(lab, setting, *case, setting.rate) for case in cases]
    outcomes = lab.outcomes(trials)
    curves: Rows = [
        row
        for (gradients, seed), outcome in zip(cases, outcomes, strict=True)
        for row in curve_rows({"gradients": gradients, "seed": seed}, outcome, gap="gap")
    ]
    problem = trials[0].problem
    assert isinstance(problem, Census)
    known: dict[str, float | str] = {
        "workers": WORKERS,
        "batch": setting.batch,
        "rate": setting.rate,
        **problem.curvature._asdict(),
        "variance": max(row.scores["variance"] for o in outcomes for row in o.rows),
    }
    return {"curves": curves, "constants": [known], "rates": _with_rates(lab, setting)}


def _with_rates(lab: Lab, setting: Setting) -> Rows:
    """Where it ends and when it is near, at every rate."""
    rows: Rows = []
    cases = list(product((1, WORKERS, ASYNC), lab.seeds, setting.rates))
    outcomes = lab.outcomes([_trial(lab, setting, *case) for case in cases])
    for (gradients, seed, rate), outcome in zip(cases, outcomes, strict=True):
        about = {"gradients": gradients, "seed": seed, "rate": rate}
        curve = curve_rows(about, outcome, gap="gap")
        rows.append(
            {
                **about,
                "floor": nan if outcome.is_diverged else _late(picked(curve, "gap")),
                "near_s": times_to(curve, "gap", NEAR, is_high=False)[0],
            }
        )
    return rows


def _late(gaps: Sequence[float]) -> float:
    """The mean distance over the last half of the updates."""
    return fmean(gaps[len(gaps) // 2 :])


def _trial(lab: Lab, setting: Setting, gradients: int, seed: int, rate: float) -> Trial:
    problem = Census(batch=setting.batch, seed=seed, data=lab.data, l2=L2)
    samples = setting.updates * setting.batch * max(1, gradients)
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
    """Where the distance ends, on average over the seeds."""
    return fmean(_floors(tables, gradients))


def _floors(tables: Tables, gradients: float) -> list[float]:
    """Of each seed."""
    rows = tables["curves"]
    return [
        _late(picked(rows, "gap", gradients=gradients, seed=seed))
        for seed in dict.fromkeys(picked(rows, "seed"))
    ]


def seconds_to_near(tables: Tables, gradients: float) -> list[float]:
    """Until the optimum is near, for each seed."""
    own = [row for row in tables["curves"] if row["gradients"] == gradients]
    return times_to(own, "gap", NEAR, is_high=False)


def worst(tables: Tables, gradients: float) -> float:
    """The largest part of the bound that the mean distance has had, after the beginning."""
    updates, gaps = _curve(tables["curves"], gradients, "updates")
    return max(
        gap / bound(int(gradients), at, gaps[0], _constants(tables))
        for at, gap in zip(updates[1:], gaps[1:], strict=True)
    )


def slope(tables: Tables) -> float:
    """Of the floor against K, both as logarithms: -1 where the floor goes with 1/K."""
    ks = _ks(tables)
    floors = [log(floor(tables, k)) for k in ks]
    return float(np.polyfit([log(k) for k in ks], floors, 1)[0])


def _ks(tables: Tables) -> list[float]:
    return sorted({float(row["gradients"]) for row in tables["curves"]} - {ASYNC})


def _constants(tables: Tables) -> dict[str, float]:
    return {name: float(value) for name, value in tables["constants"][0].items()}


def draw(tables: Tables) -> Figure:
    """The distance against updates and time, where it ends against K and against the rate."""
    figure = Figure(figsize=(17, 4), layout="constrained")
    left, middle, right, last = figure.subplots(1, 4)
    rows, ks = tables["curves"], _ks(tables)
    known = _constants(tables)
    for number, k in enumerate([*ks, ASYNC]):
        label, color = (f"K = {k:g}" if k else "async"), f"C{number}"
        left.plot(*_curve(rows, k, "updates"), color=color)
        seconds, gaps = _curve(rows, k, "seconds")
        middle.plot(seconds[1:], gaps[1:], color=color, label=label)  # time 0 is nowhere here
        if k:
            updates, gaps = _curve(rows, k, "updates")
            bounds = [bound(int(k), at, gaps[0], known) for at in updates]
            left.plot(updates, bounds, color=color, linestyle=":", linewidth=1)
    left.set(xlabel="updates", ylabel="F(w) - F*", yscale="log", title="dotted: the bounds")
    middle.set(xlabel="virtual time (s)", yscale="log", xscale="log")
    middle.set(ylabel="F(w) - F*", title=f"a gradient takes {LATENCY}")
    middle.legend(frameon=False, loc="lower left")
    floors = [floor(tables, k) for k in ks]
    right.plot(ks, floors, "o-", label="floor")
    limits = [bound(int(k), float("inf"), 0.0, known) for k in ks]
    right.plot(ks, limits, "k:", label="its bound")
    right.plot(ks, [floors[0] / k for k in ks], "--", color="grey", label="1/K")
    right.set(xlabel="K", xscale="log", yscale="log", title="where it ends")
    right.set(ylabel="F(w) - F*")
    right.set_xticks(ks, [f"{k:g}" for k in ks])
    right.minorticks_off()
    right.legend(frameon=False)
    rates = _rates(tables)
    for k, label in LABELS.items():
        ends = [finite(picked(tables["rates"], "floor", gradients=k, rate=r)) for r in rates]
        last.plot(rates, [fmean(own) if own else nan for own in ends], "o-", label=label)
    last.set(xlabel="rate", xscale="log", yscale="log", title="where it ends with other rates")
    last.set(ylabel="F(w) - F*")
    last.set_xticks(rates, [f"{rate:g}" for rate in rates])
    last.minorticks_off()
    last.legend(frameon=False)
    for axes in (left, middle, right, last):
        axes.grid(alpha=0.3)
    return figure


def _rates(tables: Tables) -> list[float]:
    return sorted(set(picked(tables["rates"], "rate")))


def _rate_words(tables: Tables) -> str:
    """Where it ends, and when it is near, at every rate."""
    parts = []
    for rate in _rates(tables):
        described = []
        for k, label in LABELS.items():
            floors, seconds = (
                picked(tables["rates"], column, gradients=k, rate=rate)
                for column in ("floor", "near_s")
            )
            floor_words = spread([1e3 * value for value in floors])
            described.append(f"{label} {floor_words} ({spread(seconds, 0)})")
        parts.append(f"{rate:g}: {', '.join(described)}")
    return "; ".join(parts)


def tell(tables: Tables) -> str:
    """Put it into words."""
    known, ks = _constants(tables), _ks(tables)
    seeds = seeds_of(tables["curves"])
    labels = {k: f"K = {k:g}" for k in ks} | {ASYNC: "async"}
    floors = ", ".join(
        f"{label}: {spread([1e3 * value for value in _floors(tables, k)])}"
        for k, label in labels.items()
    )
    times = ", ".join(
        f"{label}: {spread(seconds_to_near(tables, k), 0)}" for k, label in labels.items()
    )
    highest = max(worst(tables, k) for k in ks)
    is_held = "below" if highest <= 1 else "partly above"
    return (
        f"{seeds}. Floors of F - F*, in thousandths: {floors}. With K they go as "
        f"K^{slope(tables):.2f}. Seconds until F - F* is {NEAR:g}: {times}. The mean curves lie "
        f"{is_held} their bounds, at {highest:.0%} of them or less (L = {known['smoothness']:.3g}, "
        f"c = {known['strong_convexity']:g}, σ² = {known['variance']:.3g}, "
        f"m = {known['batch']:g}, η = {known['rate']:g}). Floors, and in brackets the seconds "
        f"until F - F* is {NEAR:g}, with rate {_rate_words(tables)}."
    )


CONVEX = Experiment(
    name="convex",
    question="Does the theory of K-sync hold on a convex problem?",
    expected=(
        "Dutta et al., as recalled and derived again: with a fixed rate, K-sync goes at a rate "
        "that does not depend on K to a floor that goes with 1/K, and stays below a bound with "
        "known constants; asynchronous training goes down sooner in time, to a higher floor."
    ),
    measure=measure,
    draw=draw,
    tell=tell,
    needs=a9a.SOURCES,
)
