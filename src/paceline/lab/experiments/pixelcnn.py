# SPDX-License-Identifier: BSD-3-Clause
"""Does asynchronous training beat one machine, for a model that staleness hurts? A PixelCNN.

Every rule gets the same virtual time, and as much data as it can use in it. The images are the
middle 16x16 pixels of CIFAR-10, and the model is small. The learning rate is constant; that of each
rule is the best of five, each tried once for a quarter of the time. All rules try the same five.
The evaluated model is a moving average of the weights.
"""

from dataclasses import dataclass, replace
from itertools import product
from statistics import fmean
from typing import TYPE_CHECKING, Any

from paceline.lab.data import cifar10
from paceline.lab.experiment import Experiment, Lab, Rows, Tables
from paceline.lab.experiments.curves import mean_curve, times_to
from paceline.lab.experiments.settings import CHEN
from paceline.lab.experiments.tables import (
    column,
    curve_rows,
    final_row,
    mean_and_sd,
    seed_count,
)
from paceline.lab.experiments.tuning import edge_note, prefer_low, tune
from paceline.lab.plotting import new_figure
from paceline.lab.problems.pixelcnn import Pixels
from paceline.lab.recipe import Recipe
from paceline.lab.trial import Trial, gradients_per_update
from paceline.sim.cluster import Cluster
from paceline.sim.simulate import simulate
from paceline.spec import RunSpec
from paceline.trace.schema import Update
from paceline.watch.figure_style import WIDTH, describe_axes, legend_below, line_style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["PIXELCNN"]

BATCH = 4
RATES = (3e-5, 1e-4, 3e-4, 1e-3, 3e-3)
SECONDS, TRYING = 1500.0, 375.0
CHANCE_BITS = 8.0  # of a model that guesses


@dataclass(frozen=True)
class PixelCnnRule:
    """A rule, and its number of workers."""

    label: str
    policy: str
    workers: int

    @property
    def name(self) -> str:
        """Its name in figures."""
        return "1 machine" if self.workers == 1 else f"{self.policy}, {self.workers} workers"

    @property
    def line(self) -> dict[str, Any]:
        """The look of its line."""
        if self.workers == 1:
            return {"color": "black"}
        return line_style(self.policy, member=self.workers // 8)


RULES = {
    rule.label: rule
    for rule in (
        PixelCnnRule("serial", "sync", 1),
        PixelCnnRule("7+1", "backup:1", 8),
        PixelCnnRule("15+1", "backup:1", 16),
        PixelCnnRule("async 8", "async", 8),
        PixelCnnRule("async 16", "async", 16),
    )
}


@dataclass(frozen=True)
class PixelCnnCase:
    """One training run."""

    label: str
    rate: float
    seed: int
    seconds: float
    """Virtual time to train for."""

    @property
    def key(self) -> dict[str, float | str]:
        """The columns that identify it in tables."""
        return {"rule": self.label, "rate": self.rate, "seed": self.seed}

    def trial(self, lab: Lab) -> Trial:
        """Return the trial."""
        rule = RULES[self.label]
        problem = Pixels(batch=BATCH, seed=self.seed, data=lab.data, cache=lab.cache)
        if lab.quick:
            problem = replace(problem, side=8, width=8, layers=2, scored=100)
        updates = updates_within(self.seconds, rule, self.seed)
        samples = BATCH * gradients_per_update(rule.policy, rule.workers)
        return Trial(
            problem=problem,
            recipe=Recipe(
                self.rate,
                method="rmsprop",
                momentum=0.9,
                smoothing=0.95,
                eps=1e-8,
                ema=max(0.0, 1 - 20 / updates),  # spans a twentieth of the run
            ),
            policy=rule.policy,
            workers=rule.workers,
            latency=CHEN,
            # Half an update less, because a fraction of an update is rounded up.
            epochs=(updates - 0.5) * samples / problem.samples,
            rows=5 if lab.quick else 30,
        )


def updates_within(seconds: float, rule: PixelCnnRule, seed: int) -> int:
    """Return how many updates the rule makes in this virtual time, with this seed."""
    spec = RunSpec(workers=rule.workers, steps=None, seed=seed)
    trace = simulate(rule.policy, Cluster.parse(CHEN, batch=BATCH), spec, until=seconds)
    return sum(isinstance(record, Update) for record in trace.records)


def measure(lab: Lab) -> Tables:
    """Find the best rates, then train with them."""
    labels = ("serial", "7+1", "async 8") if lab.quick else tuple(RULES)
    rates = (0.003,) if lab.quick else RATES
    seconds = 130.0 if lab.quick else SECONDS
    trying = seconds if lab.quick else TRYING  # there is only one rate
    best, found = tune(
        lab,
        lab.seeds[:1],
        dict.fromkeys(labels, rates),
        lambda label, rate, seed: PixelCnnCase(label, rate, seed, trying).trial(lab),
        prefer_low("bits"),
    )
    cases = [
        PixelCnnCase(label, best[label], seed, seconds)
        for label, seed in product(labels, lab.seeds)
    ]
    final = dict(zip(cases, lab.run([case.trial(lab) for case in cases]), strict=True))
    return {
        "rates": [
            final_row(PixelCnnCase(*key, trying).key, result, bits="bits")
            for key, result in found.items()
        ],
        "final": [final_row(case.key, result, bits="bits") for case, result in final.items()],
        "curves": [
            row
            for case, result in final.items()
            for row in curve_rows(case.key, result, bits="bits")
        ],
    }


def seconds_to_serial(tables: Tables, label: str) -> list[float]:
    """Return when each seed reaches the mean final score of serial training; NaN if never."""
    _, bits = _curve(tables, "serial")
    return times_to(_curves(tables, label), "bits", bits[-1], is_high=False)


def _curve(tables: Tables, label: str) -> tuple[list[float], list[float]]:
    """Return the time and bits of a rule, averaged over the seeds."""
    return mean_curve(_curves(tables, label), "seconds", "bits")


def _curves(tables: Tables, label: str) -> Rows:
    return [row for row in tables["curves"] if row["rule"] == label]


def draw(tables: Tables) -> "Figure":
    """Draw bits against time, and bits against the rates that were tried."""
    figure = new_figure(WIDTH, 4.6, "PixelCNN: all rules train for the same time")
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    labels = list(dict.fromkeys(str(row["rule"]) for row in tables["final"]))
    _draw_curves(left, tables, labels)
    for label in labels:
        rates = column(tables["rates"], "rate", rule=label)
        bits = column(tables["rates"], "bits", rule=label)
        right.plot(
            rates, bits, **({"marker": "o", "markersize": 4} | RULES[label].line | {"markevery": 1})
        )
    tried = max(column(tables["rates"], "seconds"))
    title = f"Each rate after {tried:.0f} s"
    describe_axes(right, title, "learning rate (gap: diverged)", "bits per dimension")
    right.set_xscale("log")
    legend_below(figure, left, columns=3)
    return figure


def _draw_curves(axes: "Axes", tables: Tables, labels: list[str]) -> None:
    rows = tables["curves"]
    for label in labels:
        line = RULES[label].line
        for seed in dict.fromkeys(row["seed"] for row in rows):
            seconds = column(rows, "seconds", rule=label, seed=seed)
            bits = column(rows, "bits", rule=label, seed=seed)
            axes.plot(seconds, bits, color=line["color"], alpha=0.25, linewidth=0.8)
        rate = column(tables["final"], "rate", rule=label)[0]
        name = f"{RULES[label].name}, rate {rate:g}"
        axes.plot(*_curve(tables, label), label=name, **line)
    best = min(column(rows, "bits"))
    title = "Each rule at its best rate (thin: one seed)"
    describe_axes(axes, title, "virtual time (s)", "bits per dimension, test images")
    axes.set_ylim(best - 0.1, CHANCE_BITS)


def describe(tables: Tables) -> str:
    """Summarize the tables in words."""
    final = tables["final"]
    labels = list(dict.fromkeys(str(row["rule"]) for row in final))
    rates = sorted(set(column(tables["rates"], "rate")))
    end = fmean(column(final, "seconds", rule="serial"))
    results = []
    for label in labels:
        bits = mean_and_sd(column(final, "bits", rule=label))
        rate = column(final, "rate", rule=label)[0]
        to_serial = mean_and_sd(seconds_to_serial(tables, label), 0)
        results.append(f"- {label}: {bits} (rate {rate:g}; {to_serial})")
    serial_rate = column(final, "rate", rule="serial")[0]
    same = ", ".join(
        f"{label} {column(tables['rates'], 'bits', rule=label, rate=serial_rate)[0]:.2f}"
        for label in labels
    )
    tried = max(column(tables["rates"], "seconds"))
    lines, tried_rates = "\n".join(results), ", ".join(f"{rate:g}" for rate in rates)
    return (
        f"{seed_count(final)}; each rule tried the rates {tried_rates}. "
        f"Bits per dimension after {end:.0f} s of virtual time; in parentheses, the best rate and "
        f"the seconds until the rule is as good as serial training is in the end:\n\n{lines}\n\n"
        f"All with serial's rate of {serial_rate:g}, after {tried:.0f} s, one seed: {same}."
        f"{edge_note(tables['rates'], final, 'rule')}"
    )


PIXELCNN = Experiment(
    name="pixelcnn",
    question="Does asynchronous training beat one machine, for a model that staleness hurts?",
    expected=(
        "Chen et al., PixelCNN on CIFAR-10, RMSProp with momentum, 4 images per gradient: "
        "asynchronous training with 8 machines is worse than one machine, and with 16 it is worse "
        "still. 7+1 and 15+1 synchronous machines reach the final score of one machine in a "
        "quarter to a third of its time (the numbers differ between the paper's versions)."
    ),
    measure=measure,
    draw=draw,
    describe=describe,
    needs=cifar10.SOURCES,
)
