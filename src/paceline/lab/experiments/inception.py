# SPDX-License-Identifier: BSD-3-Clause
"""Which rule is fastest, and which is best after the same data? Inception, 25 to 100 workers.

All rules use the same amount of data on the same workers. They train for one or two epochs, not to
convergence as in the paper. The paper's mini-batches have 32 images; ours have 8, so that a hundred
workers make more than a few updates. Its rate falls by 6 % every two epochs; ours falls to 0 over
the second half. The rate of each rule and number of workers is the best of four, each tried once
with half an epoch. They are multiples of a rate proportional to the gradients per update, as in the
paper. With clipping, it is the best of two rates with each of two norms. The evaluated model is a
moving average of the weights.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from math import nan
from statistics import fmean
from typing import TYPE_CHECKING

from paceline.lab.data import cifar10
from paceline.lab.experiment import Experiment, Lab, Rows, Tables
from paceline.lab.experiments.curves import mean_curve, times_to
from paceline.lab.experiments.settings import CHEN, FACTORS
from paceline.lab.experiments.tables import (
    column,
    curve_rows,
    final_row,
    finite,
    mean_and_sd,
    seed_count,
)
from paceline.lab.experiments.tuning import edge_note, prefer_high, tune
from paceline.lab.plotting import new_figure, show_percent
from paceline.lab.problems.images import Photographs
from paceline.lab.recipe import Recipe
from paceline.lab.trial import Trial, gradients_per_update
from paceline.watch.figure_style import WIDTH, describe_axes, legend_below, line_style

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["INCEPTION", "curve"]

BACKUPS = {25: 2, 50: 3, 100: 6}  # the paper has 3 besides 50 others, and 6 besides 100
RATE = 0.006  # per gradient of an update
EPOCHS = {25: 1.0, 50: 1.0, 100: 2.0}
TRYING = 0.5


@dataclass(frozen=True)
class InceptionRule:
    """A rule, and what to try it with."""

    label: str
    policy: Callable[[int], str]
    """The policy for a number of workers."""
    tried: Sequence[tuple[float, float | None]] = tuple((factor, None) for factor in FACTORS)
    """Pairs of a multiple of the rate and a norm to clip gradients to."""


RULES = {
    rule.label: rule
    for rule in (
        InceptionRule("sync", lambda workers: "sync"),
        InceptionRule("backup", lambda workers: f"backup:{BACKUPS[workers]}"),
        InceptionRule("batchsync", lambda workers: f"batchsync:{workers - BACKUPS[workers]}"),
        InceptionRule("async", lambda workers: "async"),
        InceptionRule(
            "async, clipped", lambda workers: "async", tuple(product((1 / 3, 1.0), (1.0, 10.0)))
        ),
        InceptionRule("softsync", lambda workers: f"softsync:{workers // 5}"),
    )
}
LARGE = ((3.0, None),)


@dataclass(frozen=True)
class InceptionCase:
    """One training run."""

    label: str
    workers: int
    factor: float
    clip_norm: float | None
    seed: int
    epochs: float

    @property
    def policy(self) -> str:
        """The policy string for this number of workers."""
        return RULES[self.label].policy(self.workers)

    @property
    def rate(self) -> float:
        """The learning rate."""
        return RATE * gradients_per_update(self.policy, self.workers) * self.factor

    @property
    def key(self) -> dict[str, float | str]:
        """The columns that identify it in tables."""
        return {
            "workers": self.workers,
            "rule": self.label,
            "rate": self.rate,
            "clip_norm": self.clip_norm or "",
            "seed": self.seed,
        }

    def trial(self, lab: Lab) -> Trial:
        """Return the trial."""
        problem = Photographs(
            batch=8,
            seed=self.seed,
            data=lab.data,
            cache=lab.cache,
            scored=1000 if lab.quick else 5000,
        )
        updates = self.epochs * problem.samples / problem.batch
        updates /= gradients_per_update(self.policy, self.workers)
        return Trial(
            problem=problem,
            recipe=Recipe(
                self.rate,
                method="rmsprop",
                momentum=0.9,
                fall_from=0.5,
                clip_norm=self.clip_norm,
                ema=max(0.0, 1 - 20 / updates),  # spans a twentieth of the run
            ),
            policy=self.policy,
            workers=self.workers,
            latency=CHEN,
            epochs=self.epochs,
            rows=2 if lab.quick else 20,
        )


def measure(lab: Lab) -> Tables:
    """Find the best rates, then train with them."""
    sizes = (25,) if lab.quick else (25, 50, 100)
    labels = ("sync", "backup", "async") if lab.quick else tuple(RULES)
    pairs = [(label, workers) for workers, label in product(sizes, labels)]

    def trying(
        pair: tuple[str, int], choice: tuple[float, float | None], seed: int
    ) -> InceptionCase:
        return InceptionCase(*pair, *choice, seed, epochs=0.05 if lab.quick else TRYING)

    best, found = tune(
        lab,
        lab.seeds[:1],
        {pair: LARGE if lab.quick else RULES[pair[0]].tried for pair in pairs},
        lambda *case: trying(*case).trial(lab),
        prefer_high("accuracy"),
    )
    cases = [
        InceptionCase(*pair, *best[pair], seed, epochs=0.05 if lab.quick else EPOCHS[pair[1]])
        for pair, seed in product(pairs, lab.seeds)
    ]
    final = dict(zip(cases, lab.run([case.trial(lab) for case in cases]), strict=True))
    return {
        "rates": [
            final_row(trying(*case).key, result, accuracy="accuracy")
            for case, result in found.items()
        ],
        "final": [
            final_row(case.key, result, accuracy="accuracy") for case, result in final.items()
        ],
        "curves": [
            row
            for case, result in final.items()
            for row in curve_rows(case.key, result, accuracy="accuracy")
        ],
    }


def draw(tables: Tables) -> "Figure":
    """Draw accuracy against time, one panel per number of workers."""
    rows = tables["curves"]
    sizes = sorted({float(row["workers"]) for row in rows})
    title = "Inception on CIFAR-10: every rule trains on the same amount of data"
    figure = new_figure(WIDTH, 4.2, title)
    panels = figure.subplots(1, len(sizes), sharey=True, squeeze=False)[0]
    for axes, workers in zip(panels, sizes, strict=True):
        for label in dict.fromkeys(str(row["rule"]) for row in rows):
            style = line_style(label)
            if "clipped" in label:  # it may coincide with async
                style["linestyle"] = "--"
            axes.plot(*curve(tables, workers, label), label=label, **style)
        describe_axes(axes, f"{workers:g} workers", "virtual time (s)")
    panels[0].set(ylabel="accuracy on test images")
    show_percent(panels[0])
    legend_below(figure, panels[0], columns=6)
    return figure


def curve(tables: Tables, workers: float, label: str) -> tuple[list[float], list[float]]:
    """Return the time and accuracy of a rule, averaged over the seeds."""
    return mean_curve(_curves(tables, workers, label), "seconds", "accuracy")


def _curves(tables: Tables, workers: float, label: str) -> Rows:
    return [r for r in tables["curves"] if (r["workers"], r["rule"]) == (workers, label)]


def target(tables: Tables, workers: float) -> float:
    """Return the final accuracy of `async` with this many workers, as a target for all rules."""
    ends = finite(column(tables["final"], "accuracy", workers=workers, rule="async"))
    return fmean(ends) if ends else nan


def seconds_to_target(tables: Tables, workers: float, label: str) -> list[float]:
    """Return when each seed reaches the target; NaN if never."""
    own = _curves(tables, workers, label)
    return times_to(own, "accuracy", target(tables, workers), is_high=True)


def describe(tables: Tables) -> str:
    """Summarize the tables in words."""
    final = tables["final"]
    parts = []
    for workers in sorted({float(row["workers"]) for row in final}):
        labels = dict.fromkeys(str(row["rule"]) for row in final)
        data = max(column(tables["curves"], "epochs", workers=workers))
        epochs = f"{data:.2g} {'epoch' if round(data, 2) == 1 else 'epochs'}"
        rules = "\n".join(f"- {_describe_rule(tables, workers, label)}" for label in labels)
        parts.append(f"{workers:g} workers, {epochs}:\n\n{rules}")
    intro = (
        f"{seed_count(final)}, the same data for every rule. Parentheses hold the seconds until "
        "the rule is as good as async is in the end, and the settings of the rule."
        f"{edge_note(tables['rates'], final, 'rule', 'workers')}"
    )
    return "\n\n".join([intro, *parts])


def _describe_rule(tables: Tables, workers: float, label: str) -> str:
    own = [r for r in tables["final"] if (r["workers"], r["rule"]) == (workers, label)]
    accuracy = [100 * float(row["accuracy"]) for row in own]
    seconds = fmean(float(row["seconds"]) for row in own)
    staleness = fmean(float(row["staleness"]) for row in own)
    details = [
        mean_and_sd(seconds_to_target(tables, workers, label), 0),
        f"rate {own[0]['rate']:g}",
    ]
    if own[0]["clip_norm"] != "":
        details.append(f"norm at most {own[0]['clip_norm']:g}")
    if staleness:
        details.append(f"staleness {staleness:.1f}")
    return f"{label} {mean_and_sd(accuracy, 1)} % after {seconds:.0f} s ({'; '.join(details)})"


INCEPTION = Experiment(
    name="inception",
    question="Which rule is fastest, and which is best after the same amount of data?",
    expected=(
        "Chen et al., trained to convergence: synchronous training with backups ends about half a "
        "point better than asynchronous training on the same number of machines; it gets there "
        "sooner with 106 machines or more, and later with 53. In their first version, compared by "
        "the time for the same number of gradients: without backups, synchronous training takes 20 "
        "to 40 % longer than asynchronous training; with backups, about as long."
    ),
    measure=measure,
    draw=draw,
    describe=describe,
    needs=cifar10.SOURCES,
)
