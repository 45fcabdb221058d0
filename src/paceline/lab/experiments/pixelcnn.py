# SPDX-License-Identifier: BSD-3-Clause
"""Is asynchronous training better than one machine, for a model that staleness hurts? A PixelCNN.

Every rule has the same virtual time, and as much data as it can use in it. The images are the
middle 16x16 of CIFAR-10's, the model a small one. The learning rate of each rule is the best of
five, the same five for all, each tried once for a quarter of the time; it does not fall. Models are
evaluated by a moving average of their weights.
"""

from dataclasses import dataclass, replace
from itertools import product
from statistics import fmean

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from paceline.lab.data import cifar10
from paceline.lab.experiment import Experiment, Lab, Rows, Tables
from paceline.lab.experiments.curves import mean_curve, times_to
from paceline.lab.experiments.rows import curve_rows, end_row
from paceline.lab.experiments.settings import CHEN, picked, seeds_of, spread
from paceline.lab.experiments.tuning import edges, lowest, tuned
from paceline.lab.problems.pixels import Pixels
from paceline.lab.recipe import Recipe
from paceline.lab.trial import Trial, gradients_of
from paceline.sim.cluster import Cluster
from paceline.sim.simulate import simulate
from paceline.spec import RunSpec
from paceline.trace.schema import Update

__all__ = ["PIXELCNN"]

BATCH = 4
RATES = (3e-5, 1e-4, 3e-4, 1e-3, 3e-3)
SECONDS, TRYING = 1500.0, 375.0
GUESSING = 8.0  # bits, of whoever knows nothing


@dataclass(frozen=True)
class Rule:
    """A rule as it is tried."""

    label: str
    policy: str
    workers: int


RULES = {
    rule.label: rule
    for rule in (
        Rule("serial", "sync", 1),
        Rule("7+1", "backup:1", 8),
        Rule("15+1", "backup:1", 16),
        Rule("async 8", "async", 8),
        Rule("async 16", "async", 16),
    )
}


@dataclass(frozen=True)
class Case:
    """What is tried."""

    label: str
    rate: float
    seed: int
    seconds: float
    """Of virtual time."""

    @property
    def about(self) -> dict[str, float | str]:
        """Its columns in tables."""
        return {"rule": self.label, "rate": self.rate, "seed": self.seed}

    def trial(self, lab: Lab) -> Trial:
        """The same as a trial."""
        rule = RULES[self.label]
        problem = Pixels(batch=BATCH, seed=self.seed, data=lab.data, cache=lab.cache)
        if lab.quick:
            problem = replace(problem, side=8, width=8, layers=2, scored=100)
        updates = updates_within(self.seconds, rule, self.seed)
        samples = BATCH * gradients_of(rule.policy, rule.workers)
        return Trial(
            problem=problem,
            recipe=Recipe(
                self.rate,
                method="rmsprop",
                momentum=0.9,
                smoothing=0.95,
                eps=1e-8,
                ema=max(0.0, 1 - 20 / updates),  # over a twentieth of the run
            ),
            policy=rule.policy,
            workers=rule.workers,
            latency=CHEN,
            # Half an update less than wanted, since a part of one is rounded up.
            epochs=(updates - 0.5) * samples / problem.samples,
            rows=5 if lab.quick else 30,
        )


def updates_within(seconds: float, rule: Rule, seed: int) -> int:
    """How many the rule makes in so much virtual time, with the luck of this seed."""
    spec = RunSpec(workers=rule.workers, steps=None, seed=seed)
    trace = simulate(rule.policy, Cluster.parse(CHEN, batch=BATCH), spec, until=seconds)
    return sum(isinstance(record, Update) for record in trace.records)


def measure(lab: Lab) -> Tables:
    """Find the rates, then train with them."""
    labels = ("serial", "7+1", "async 8") if lab.quick else tuple(RULES)
    rates = (0.003,) if lab.quick else RATES
    seconds = 130.0 if lab.quick else SECONDS
    trying = seconds if lab.quick else TRYING  # there is nothing to choose from
    best, found = tuned(
        lab,
        lab.seeds[:1],
        dict.fromkeys(labels, rates),
        lambda label, rate, seed: Case(label, rate, seed, trying).trial(lab),
        lowest("bits"),
    )
    cases = [Case(label, best[label], seed, seconds) for label, seed in product(labels, lab.seeds)]
    final = dict(zip(cases, lab.outcomes([case.trial(lab) for case in cases]), strict=True))
    return {
        "rates": [
            end_row(Case(*key, trying).about, outcome, bits="bits")
            for key, outcome in found.items()
        ],
        "final": [end_row(case.about, outcome, bits="bits") for case, outcome in final.items()],
        "curves": [
            row
            for case, outcome in final.items()
            for row in curve_rows(case.about, outcome, bits="bits")
        ],
    }


def seconds_to_serial(tables: Tables, label: str) -> list[float]:
    """Until a rule is where serial training ends on average, for each seed; NaN: never."""
    _, bits = _curve(tables, "serial")
    return times_to(_curves(tables, label), "bits", bits[-1], is_high=False)


def _curve(tables: Tables, label: str) -> tuple[list[float], list[float]]:
    """Time and bits of a rule, the mean over the seeds."""
    return mean_curve(_curves(tables, label), "seconds", "bits")


def _curves(tables: Tables, label: str) -> Rows:
    return [row for row in tables["curves"] if row["rule"] == label]


def draw(tables: Tables) -> Figure:
    """Bits against time; bits against the rate, as they were tried."""
    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    labels = list(dict.fromkeys(str(row["rule"]) for row in tables["final"]))
    _draw_curves(left, tables, labels)
    for number, label in enumerate(labels):
        rates = picked(tables["rates"], "rate", rule=label)
        bits = picked(tables["rates"], "bits", rule=label)
        right.plot(rates, bits, "o-", color=f"C{number}", label=label)
    tried = max(picked(tables["rates"], "seconds"))
    right.set(xscale="log", xlabel="learning rate", title=f"each rate, after {tried:.0f} s")
    right.set(ylabel="bits per dimension (nothing: diverged)")
    right.grid(alpha=0.3)
    return figure


def _draw_curves(axes: Axes, tables: Tables, labels: list[str]) -> None:
    rows = tables["curves"]
    for number, label in enumerate(labels):
        for seed in dict.fromkeys(row["seed"] for row in rows):
            seconds = picked(rows, "seconds", rule=label, seed=seed)
            bits = picked(rows, "bits", rule=label, seed=seed)
            axes.plot(seconds, bits, color=f"C{number}", alpha=0.25, linewidth=0.8)
        rate = picked(tables["final"], "rate", rule=label)[0]
        axes.plot(*_curve(tables, label), color=f"C{number}", label=f"{label}, rate {rate:g}")
    best = min(picked(rows, "bits"))
    axes.set(xlabel="virtual time (s)", ylabel="bits per dimension, test images")
    axes.set(ylim=(best - 0.1, GUESSING), title="at the best rate of each")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)


def tell(tables: Tables) -> str:
    """Put it into words."""
    final = tables["final"]
    labels = list(dict.fromkeys(str(row["rule"]) for row in final))
    rates = sorted(set(picked(tables["rates"], "rate")))
    end = fmean(picked(final, "seconds", rule="serial"))
    described = []
    for label in labels:
        bits = spread(picked(final, "bits", rule=label))
        rate = picked(final, "rate", rule=label)[0]
        there = spread(seconds_to_serial(tables, label), 0)
        described.append(f"{label} {bits} (rate {rate:g}; {there})")
    serial_rate = picked(final, "rate", rule="serial")[0]
    same = ", ".join(
        f"{label} {picked(tables['rates'], 'bits', rule=label, rate=serial_rate)[0]:.2f}"
        for label in labels
    )
    tried = max(picked(tables["rates"], "seconds"))
    return (
        f"{seeds_of(final)}, rates {', '.join(f'{rate:g}' for rate in rates)} tried for each. Bits "
        f"per dimension after {end:.0f} s of virtual time, and in brackets the best rate and the "
        f"seconds until it was where serial ends: {'; '.join(described)}. All with serial's "
        f"rate of {serial_rate:g}, after {tried:.0f} s, one seed: {same}."
        f"{edges(tables['rates'], final, 'rule')}"
    )


PIXELCNN = Experiment(
    name="pixelcnn",
    question="Is asynchronous training better than one machine, for a model that staleness hurts?",
    expected=(
        "Chen et al., PixelCNN on CIFAR-10, RMSProp with momentum, 4 images a gradient: "
        "asynchronous training with 8 machines is worse than one machine, with 16 worse still; "
        "7+1 and 15+1 synchronous machines come to what one machine reaches in the end in a "
        "quarter to a third of its time (the paper's versions differ in the figures)."
    ),
    measure=measure,
    draw=draw,
    tell=tell,
    needs=cifar10.SOURCES,
)
