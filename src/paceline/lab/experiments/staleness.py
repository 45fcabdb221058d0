# SPDX-License-Identifier: BSD-3-Clause
"""Does staleness hurt? The error of the paper's MNIST CNN against the mean staleness of gradients.

Staleness comes from asynchronous training itself: of W workers each gradient is W-1 updates old, on
average. With the ramp, workers come in one after the other while the first eighth of the data is
used, as the paper lets staleness grow over the first 3 of 25 epochs. Mini-batches are small, so
that one epoch has as many updates as eight of the paper's would have with mini-batches of 32: what
staleness does depends on updates. Every staleness has the best of three rates, with the first seed;
the paper, too, takes smaller ones from a staleness of 20 on.
"""

from itertools import product
from math import nan
from statistics import fmean
from typing import NamedTuple

import numpy as np
from matplotlib.figure import Figure

from paceline.lab.data import mnist
from paceline.lab.experiment import Experiment, Lab, Rows, Tables
from paceline.lab.experiments.settings import CHEN, finite, picked, seeds_of, spread
from paceline.lab.experiments.tuning import edges, highest, tuned
from paceline.lab.problems.images import Digits
from paceline.lab.recipe import Recipe
from paceline.lab.trial import Outcome, Trial
from paceline.latency import parse_latency

__all__ = ["STALENESS"]

RAMP = 3 / 25  # of the data
RATES = (0.03, 0.01, 0.003)
LAYERS, LAYER_WORKERS, CYCLES = 18, 40, 400
WITH, WITHOUT = "with ramp", "without ramp"
PAPER = {0: 0.37, 10: 0.36, 20: 0.47, 50: 0.52, 100: 0.79, 125: 1.35}
"""Error (%) by staleness, with the ramp, read off figure 2 of Chen et al."""
GUESSING = 90.0  # % of wrong answers


class Case(NamedTuple):
    """What is tried."""

    staleness: int
    ramp: bool
    rate: float
    seed: int


def measure(lab: Lab) -> Tables:
    """Train with every staleness, with and without the ramp, at the rate that is best for it."""
    levels = (0, 40) if lab.quick else (0, 10, 20, 50, 100, 125)
    without_ramp = () if lab.quick else (10, 50, 125)
    kinds = [(level, True) for level in levels] + [(level, False) for level in without_ramp]
    best, found = tuned(
        lab,
        lab.seeds[:1],
        dict.fromkeys(kinds, (0.01,) if lab.quick else RATES),
        lambda kind, rate, seed: _trial(lab, *kind, rate, seed),
        highest("accuracy"),
    )
    cases = [Case(*kind, best[kind], seed) for kind, seed in product(kinds, lab.seeds)]
    outcomes = lab.outcomes([_trial(lab, *case) for case in cases])
    return {
        "rates": [
            _row(Case(*kind, rate, seed), outcome) for (kind, rate, seed), outcome in found.items()
        ],
        "error": [_row(case, outcome) for case, outcome in zip(cases, outcomes, strict=True)],
        "layers": _layers(),
    }


def _error(outcome: Outcome) -> float:
    """In percent, at the end; NaN where there is none."""
    return 100 * (1 - outcome.last("accuracy"))


def _row(case: Case, outcome: Outcome) -> dict[str, float | str]:
    return {
        "staleness": case.staleness,
        "ramp": WITH if case.ramp else WITHOUT,
        "rate": case.rate,
        "seed": case.seed,
        "measured_staleness": outcome.staleness,
        "diverged": "yes" if outcome.is_diverged else "no",
        "error_percent": _error(outcome),
    }


def _trial(lab: Lab, level: int, ramp: bool, rate: float, seed: int) -> Trial:
    batch, epochs, width = (32, 0.2, 0.5) if lab.quick else (4, 1.0, 1.0)
    problem = Digits(batch=batch, seed=seed, data=lab.data, width=width)
    updates = epochs * problem.samples / problem.batch
    return Trial(
        problem=problem,
        # The average reaches back over a fifth of the updates, as the paper's 0.9999 does.
        recipe=Recipe(rate, fall_from=0.6, ema=1 - 5 / updates),
        policy="async",
        workers=level + 1,
        latency=CHEN,
        epochs=epochs,
        faults=_ramp(level + 1, updates) if ramp else "",
        rows=1,
    )


def _ramp(workers: int, updates: float) -> str:
    """Faults that let the workers come one after the other, each after as many updates."""
    mean_s = parse_latency(CHEN).mean(0)
    each = RAMP * updates / workers
    faults, time = [], 0.0
    for worker in range(1, workers):
        time += each * mean_s / worker
        faults.append(f"kill {worker} at 0s for {time:.6g}s")
    return "; ".join(faults)


def _layers() -> Rows:
    """Staleness by layer, where each is read when the forward pass comes to it.

    A forward pass takes a third of the time. The gradient of a layer leaves when the backward pass
    has come to it, and is applied at once.
    """
    rng = np.random.default_rng(0)
    times = rng.lognormal(0.0, 0.1, (LAYER_WORKERS, CYCLES))
    ends = np.cumsum(times, axis=1) + rng.random((LAYER_WORKERS, 1))
    begins = ends - times * (1 - 1e-9)  # after the own gradient of before has been applied
    inside = (begins > begins[:, 0].max()) & (ends < ends[:, -1].min())  # while all are at work
    rows: Rows = []
    for layer in range(LAYERS + 1):
        read = begins + times / 3 * layer / (LAYERS + 1)
        left = ends - times * 2 / 3 * layer / (LAYERS + 1)
        ordered = np.sort(left, axis=None)
        stale = np.searchsorted(ordered, left[inside]) - np.searchsorted(ordered, read[inside])
        rows.append(
            {
                "layer": layer,
                "min": int(stale.min()),
                "mean": float(stale.mean()),
                "median": float(np.median(stale)),
                "max": int(stale.max()),
                "sd": float(stale.std()),
            }
        )
    return rows


def _errors(rows: Rows, level: float, ramp: str) -> list[float]:
    return picked(rows, "error_percent", staleness=level, ramp=ramp)


def draw(tables: Tables) -> Figure:
    """Error against staleness; staleness against the layer."""
    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    rows = tables["error"]
    for ramp, style in ((WITH, "o-"), (WITHOUT, "s--")):
        levels = sorted({float(row["staleness"]) for row in rows if row["ramp"] == ramp})
        if levels:
            errors = [finite(_errors(rows, level, ramp)) or [nan] for level in levels]
            means = [fmean(own) for own in errors]
            spans = [
                [m - min(e) for m, e in zip(means, errors, strict=True)],
                [max(e) - m for m, e in zip(means, errors, strict=True)],
            ]
            label = f"{ramp}; bars: all seeds"
            left.errorbar(levels, means, spans, fmt=style, capsize=3, label=label)
    if diverged := picked(rows, "staleness", diverged="yes"):
        left.plot(diverged, [GUESSING] * len(diverged), "kx", label="diverged")
    left.plot(*zip(*PAPER.items(), strict=True), ".:", color="grey", label="the paper's, with ramp")
    left.set(xlabel="mean staleness (updates)", ylabel="test error (%)", yscale="log")
    left.set_title("MNIST CNN, asynchronous")
    left.set_yticks([0.5, 1, 2, 5, 10, 20, 50], ["0.5", "1", "2", "5", "10", "20", "50"])
    left.minorticks_off()
    left.legend(frameon=False)
    layers = tables["layers"]
    right.plot(
        [row["layer"] for row in layers], [row["mean"] for row in layers], "o-", label="mean"
    )
    right.fill_between(
        [float(row["layer"]) for row in layers],
        [float(row["min"]) for row in layers],
        [float(row["max"]) for row in layers],
        alpha=0.2,
        label="least to most",
    )
    right.legend(frameon=False)
    right.set(xlabel="layer (0: bottom)", ylabel="staleness (updates)", ylim=(0, None))
    right.set_xticks(range(0, LAYERS + 1, 3))
    right.set_title(f"{LAYER_WORKERS} workers, read bottom-up, sent top-down")
    return figure


def _level(rows: Rows, level: float, ramp: str) -> str:
    rate = picked(rows, "rate", staleness=level, ramp=ramp)[0]
    return f"{level:g}: {spread(_errors(rows, level, ramp))} (rate {rate:g})"


def tell(tables: Tables) -> str:
    """Put it into words."""
    rows, layers = tables["error"], tables["layers"]
    levels = sorted({float(row["staleness"]) for row in rows if row["ramp"] == WITH})
    errors = "; ".join(_level(rows, level, WITH) for level in levels)
    text = f"Test error (%) by mean staleness, with the ramp, {seeds_of(rows)}: {errors}."
    bare = sorted({float(row["staleness"]) for row in rows if row["ramp"] == WITHOUT})
    if bare:
        without = "; ".join(_level(rows, level, WITHOUT) for level in bare)
        text += f" Without it: {without}."
    text += edges(tables["rates"], rows, "staleness", "ramp")
    bottom, top = layers[0], layers[-1]
    return (
        f"{text} By layer, {LAYER_WORKERS} workers: {float(bottom['mean']):.1f} updates at the "
        f"bottom, {float(top['mean']):.1f} at the top."
    )


STALENESS = Experiment(
    name="staleness",
    question="Does staleness hurt, and how much?",
    expected=(
        "Chen et al., figure 2: 0.37 % test error without staleness, 0.36 % at 10, 0.47 % at 20, "
        "about 0.5 % at 50, 0.8 % at 100, 1.35 % at 125; the ramp matters beyond 15. Bottom layers "
        "are the stalest (table 1: 39 against 14.5 updates at the top, 40 workers)."
    ),
    measure=measure,
    draw=draw,
    tell=tell,
    needs=mnist.SOURCES,
)
