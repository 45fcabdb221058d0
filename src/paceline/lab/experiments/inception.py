# SPDX-License-Identifier: BSD-3-Clause
"""Which rule is first, and which is best after as much data? Inception, 25 to 100 workers.

All rules use as much data, on the same machines; one epoch or two, so this is not the end that the
paper trains to. Its mini-batches have 32 images, ours 8, so that a hundred workers make more than a
few updates; its rate falls by 6 % every two epochs, ours to 0 over the second half. The rate of
each rule and number of workers is the best of four, each tried once with half an epoch, around one
in proportion to the gradients of an update, as in the paper; with clipping it is the best of two
with each of two norms. Models are evaluated by a moving average of their weights.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from math import nan
from statistics import fmean

from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from paceline.lab.data import cifar10
from paceline.lab.experiment import Experiment, Lab, Rows, Tables
from paceline.lab.experiments.curves import mean_curve, times_to
from paceline.lab.experiments.rows import curve_rows, end_row
from paceline.lab.experiments.settings import CHEN, FACTORS, finite, picked, seeds_of, spread
from paceline.lab.experiments.tuning import edges, highest, tuned
from paceline.lab.problems.images import Photographs
from paceline.lab.recipe import Recipe
from paceline.lab.trial import Trial, gradients_of

__all__ = ["INCEPTION", "curve"]

BACKUPS = {25: 2, 50: 3, 100: 6}  # the paper has 3 for 50 others, and 6 for 100
RATE = 0.006  # for each gradient of an update
EPOCHS = {25: 1.0, 50: 1.0, 100: 2.0}
TRYING = 0.5


@dataclass(frozen=True)
class Rule:
    """A rule as it is tried."""

    label: str
    policy: Callable[[int], str]
    """For so many workers."""
    tried: Sequence[tuple[float, float | None]] = tuple((factor, None) for factor in FACTORS)
    """Each a factor of the rate, and the norm to which gradients are clipped."""


RULES = {
    rule.label: rule
    for rule in (
        Rule("sync", lambda workers: "sync"),
        Rule("backup", lambda workers: f"backup:{BACKUPS[workers]}"),
        Rule("batchsync", lambda workers: f"batchsync:{workers - BACKUPS[workers]}"),
        Rule("async", lambda workers: "async"),
        Rule("async, clipped", lambda workers: "async", tuple(product((1 / 3, 1.0), (1.0, 10.0)))),
        Rule("softsync", lambda workers: f"softsync:{workers // 5}"),
    )
}
LARGE = ((3.0, None),)


@dataclass(frozen=True)
class Case:
    """What is tried."""

    label: str
    workers: int
    factor: float
    clip_norm: float | None
    seed: int
    epochs: float

    @property
    def policy(self) -> str:
        """The rule, for so many workers."""
        return RULES[self.label].policy(self.workers)

    @property
    def rate(self) -> float:
        """Of the optimizer."""
        return RATE * gradients_of(self.policy, self.workers) * self.factor

    @property
    def about(self) -> dict[str, float | str]:
        """Its columns in tables."""
        return {
            "workers": self.workers,
            "rule": self.label,
            "rate": self.rate,
            "clip_norm": self.clip_norm or "",
            "seed": self.seed,
        }

    def trial(self, lab: Lab) -> Trial:
        """The same as a trial."""
        problem = Photographs(
            batch=8,
            seed=self.seed,
            data=lab.data,
            cache=lab.cache,
            scored=1000 if lab.quick else 5000,
        )
        updates = self.epochs * problem.samples / problem.batch
        updates /= gradients_of(self.policy, self.workers)
        return Trial(
            problem=problem,
            recipe=Recipe(
                self.rate,
                method="rmsprop",
                momentum=0.9,
                fall_from=0.5,
                clip_norm=self.clip_norm,
                ema=max(0.0, 1 - 20 / updates),  # over a twentieth of the run
            ),
            policy=self.policy,
            workers=self.workers,
            latency=CHEN,
            epochs=self.epochs,
            rows=2 if lab.quick else 20,
        )


def measure(lab: Lab) -> Tables:
    """Find the rates, then train with them."""
    sizes = (25,) if lab.quick else (25, 50, 100)
    labels = ("sync", "backup", "async") if lab.quick else tuple(RULES)
    pairs = [(label, workers) for workers, label in product(sizes, labels)]

    def trying(pair: tuple[str, int], choice: tuple[float, float | None], seed: int) -> Case:
        return Case(*pair, *choice, seed, epochs=0.05 if lab.quick else TRYING)

    best, found = tuned(
        lab,
        lab.seeds[:1],
        {pair: LARGE if lab.quick else RULES[pair[0]].tried for pair in pairs},
        lambda *case: trying(*case).trial(lab),
        highest("accuracy"),
    )
    cases = [
        Case(*pair, *best[pair], seed, epochs=0.05 if lab.quick else EPOCHS[pair[1]])
        for pair, seed in product(pairs, lab.seeds)
    ]
    final = dict(zip(cases, lab.outcomes([case.trial(lab) for case in cases]), strict=True))
    return {
        "rates": [
            end_row(trying(*key).about, outcome, accuracy="accuracy")
            for key, outcome in found.items()
        ],
        "final": [
            end_row(case.about, outcome, accuracy="accuracy") for case, outcome in final.items()
        ],
        "curves": [
            row
            for case, outcome in final.items()
            for row in curve_rows(case.about, outcome, accuracy="accuracy")
        ],
    }


def draw(tables: Tables) -> Figure:
    """Accuracy against time, one panel for each number of workers."""
    rows = tables["curves"]
    sizes = sorted({float(row["workers"]) for row in rows})
    figure = Figure(figsize=(4.6 * len(sizes), 4), layout="constrained")
    panels = figure.subplots(1, len(sizes), sharey=True, squeeze=False)[0]
    for axes, workers in zip(panels, sizes, strict=True):
        for number, label in enumerate(dict.fromkeys(str(row["rule"]) for row in rows)):
            style = "--" if "clipped" in label else "-"  # it may lie on its twin
            axes.plot(*curve(tables, workers, label), style, color=f"C{number}", label=label)
        axes.set(xlabel="virtual time (s)", title=f"{workers:g} workers")
        axes.grid(alpha=0.3)
    panels[0].set(ylabel="test accuracy")
    panels[0].yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    panels[-1].legend(frameon=False)
    return figure


def curve(tables: Tables, workers: float, label: str) -> tuple[list[float], list[float]]:
    """Time and accuracy of a rule, the mean over the seeds."""
    return mean_curve(_curves(tables, workers, label), "seconds", "accuracy")


def _curves(tables: Tables, workers: float, label: str) -> Rows:
    return [r for r in tables["curves"] if (r["workers"], r["rule"]) == (workers, label)]


def target(tables: Tables, workers: float) -> float:
    """What `async` reaches at its end with so many workers: all rules can be compared by it."""
    ends = finite(picked(tables["final"], "accuracy", workers=workers, rule="async"))
    return fmean(ends) if ends else nan


def seconds_to_target(tables: Tables, workers: float, label: str) -> list[float]:
    """Of each seed; NaN: never."""
    own = _curves(tables, workers, label)
    return times_to(own, "accuracy", target(tables, workers), is_high=True)


def tell(tables: Tables) -> str:
    """Put it into words."""
    final = tables["final"]
    parts = []
    for workers in sorted({float(row["workers"]) for row in final}):
        labels = dict.fromkeys(str(row["rule"]) for row in final)
        data = max(picked(tables["curves"], "epochs", workers=workers))
        parts.append(
            f"{workers:g} workers, {data:.2g} {'epoch' if round(data, 2) == 1 else 'epochs'}: "
            + "; ".join(_tell_rule(tables, workers, label) for label in labels)
        )
    return (
        f"{seeds_of(final)}, as much data for every rule; in brackets, the seconds until it was as "
        f"good as async is in the end, and its settings. {'. '.join(parts)}."
        f"{edges(tables['rates'], final, 'rule', 'workers')}"
    )


def _tell_rule(tables: Tables, workers: float, label: str) -> str:
    own = [r for r in tables["final"] if (r["workers"], r["rule"]) == (workers, label)]
    accuracy = [100 * float(row["accuracy"]) for row in own]
    seconds = fmean(float(row["seconds"]) for row in own)
    staleness = fmean(float(row["staleness"]) for row in own)
    about = [spread(seconds_to_target(tables, workers, label), 0), f"rate {own[0]['rate']:g}"]
    if own[0]["clip_norm"] != "":
        about.append(f"norm at most {own[0]['clip_norm']:g}")
    if staleness:
        about.append(f"staleness {staleness:.1f}")
    return f"{label} {spread(accuracy, 1)} % after {seconds:.0f} s ({'; '.join(about)})"


INCEPTION = Experiment(
    name="inception",
    question="Which rule is first, and which is best after as much data?",
    expected=(
        "Chen et al., trained to the end: synchronous training with backups is about half a point "
        "better than asynchronous training on as many machines, and there sooner with 106 machines "
        "or more, later with 53. In their first version: without backups, 20 to 40 % longer for as "
        "many gradients than asynchronously; with them, about as long."
    ),
    measure=measure,
    draw=draw,
    tell=tell,
    needs=cifar10.SOURCES,
)
