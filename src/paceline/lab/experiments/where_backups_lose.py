# SPDX-License-Identifier: BSD-3-Clause
"""Where do backups lose? Three cases, each against full synchronous training and a remedy.

Slow majority: twelve of sixteen workers take three times as long. Dropping a few still means
waiting for slow workers, and dropping all twelve gives up three quarters of the machines. A milder
variant takes one and a half times as long, also with mini-batches so small that every gradient
counts. Private data: only four slow workers hold two of the digits. Too many backups: all workers
are equally fast, so there is nothing to gain beyond the stragglers.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from statistics import fmean
from typing import TYPE_CHECKING

from paceline.core.events import Fate
from paceline.lab.data import mnist
from paceline.lab.experiment import Experiment, Lab, Rows, Tables
from paceline.lab.experiments.race_to_target import (
    BATCH,
    FACTORS,
    WORKERS,
    Entrant,
    draw_bars,
    race,
    seconds_text,
)
from paceline.lab.experiments.settings import CHEN
from paceline.lab.experiments.tables import column, mean_and_sd, seed_count
from paceline.lab.experiments.tuning import edge_note, prefer_high, tune
from paceline.lab.plotting import new_figure
from paceline.lab.problems.reserved_digits import ReservedDigits
from paceline.lab.recipe import Recipe
from paceline.lab.trial import Trial
from paceline.sim.cluster import Cluster
from paceline.sim.simulate import simulate
from paceline.spec import RunSpec
from paceline.trace.schema import Gradient
from paceline.watch.figure_style import (
    LEGEND,
    WIDTH,
    describe_bars,
    legend_below,
    rule_colour,
    split_style,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["LOSING"]

MAJORITY = f"{CHEN}; workers 0-11 x3"
MAJORITY_RULES = ("sync", "backup:4", "backup:12", "batchsync:24", "async")
MAJORITY_RULES_QUICK = ("sync", "backup:4", "backup:12")
MILD = f"{CHEN}; workers 0-11 x1.5"
MILD_RULES = ("sync", "backup:4", "backup:12")
MILD_RULES_QUICK = ("sync", "backup:12")
SMALL_BATCH = 2
LARGE_RULES = ("sync", "backup:1", "backup:4", "backup:8", "backup:14")
LARGE_RULES_QUICK = ("sync", "backup:14")

SLOW = (0, 1, 2, 3)
SLOW_OWNERS = f"{CHEN}; workers 0-3 x2"
RESERVED = (8, 9)


@dataclass(frozen=True)
class PrivateData:
    """A rule on workers of which the slow ones hold private data, unless it is shared."""

    policy: str
    is_shared: bool = False

    @property
    def label(self) -> str:
        """The rule's name in tables and figures."""
        return f"{self.policy}, all data everywhere" if self.is_shared else self.policy

    def trial(self, lab: Lab, factor: float, seed: int) -> Trial:
        """Return the trial; the factor means the same as in a race."""
        problem = ReservedDigits(
            batch=BATCH,
            seed=seed,
            data=lab.data,
            width=0.5,
            scored=1000 if lab.quick else 10_000,
            reserved=RESERVED,
            owners=tuple(range(WORKERS)) if self.is_shared else SLOW,
            workers=WORKERS,
        )
        rate = Entrant(self.policy, SLOW_OWNERS).rate(factor)
        return Trial(
            problem=problem,
            recipe=Recipe(rate, method="adam", fall_from=0.5),
            policy=self.policy,
            workers=WORKERS,
            latency=SLOW_OWNERS,
            epochs=0.25 if lab.quick else 0.5,
            rows=1,
        )


PRIVATE_DATA = (
    PrivateData("sync"),
    PrivateData("backup:2"),
    PrivateData("backup:4"),
    PrivateData("backup:4", is_shared=True),
    PrivateData("batchsync:12"),
    PrivateData("softsync:4"),
    PrivateData("async"),
)
PRIVATE_DATA_QUICK = PRIVATE_DATA[0], PRIVATE_DATA[2], PRIVATE_DATA[3]


def measure(lab: Lab) -> Tables:
    """Train all cases, and count what happens to dropped mini-batches."""
    races = {
        name: race(
            lab,
            [Entrant(rule, latency, batch=batch) for rule in (quick if lab.quick else full)],
        )
        for name, latency, batch, full, quick in (
            ("majority", MAJORITY, BATCH, MAJORITY_RULES, MAJORITY_RULES_QUICK),
            ("mild", MILD, BATCH, MILD_RULES, MILD_RULES_QUICK),
            ("small", MILD, SMALL_BATCH, MILD_RULES, MILD_RULES_QUICK),
            ("large", CHEN, BATCH, LARGE_RULES, LARGE_RULES_QUICK),
        )
    }
    return {
        **{name: own.final for name, own in races.items()},
        **{f"{name}_tried": own.tried for name, own in races.items()},
        "own_data": _own_data(lab, PRIVATE_DATA_QUICK if lab.quick else PRIVATE_DATA),
        "requeue": _requeue(200 if lab.quick else 2000),
    }


def _own_data(lab: Lab, rules: tuple[PrivateData, ...]) -> Rows:
    """Train each rule at the rate that is best with the first seed."""
    best, _ = tune(
        lab,
        lab.seeds[:1],
        dict.fromkeys(rules, (0.3,) if lab.quick else FACTORS),
        lambda rule, factor, seed: rule.trial(lab, factor, seed),
        prefer_high("accuracy"),
    )
    cases = list(product(rules, lab.seeds))
    trials = [rule.trial(lab, best[rule], seed) for rule, seed in cases]
    return [
        {
            "rule": rule.label,
            "rate": trial.recipe.rate_max,
            "seed": seed,
            "seconds": result.seconds,
            **{name: result.last(name) for name in ("accuracy", "reserved", "others")},
        }
        for (rule, seed), trial, result in zip(cases, trials, lab.run(trials), strict=True)
    ]


def _requeue(steps: int) -> Rows:
    """Count what happens to dropped mini-batches, with equal and with four slow workers."""
    rows: Rows = []
    for machines, latency, rule in (
        ("alike", CHEN, "backup:1"),
        ("4 slow", SLOW_OWNERS, "backup:4"),
    ):
        spec = RunSpec(workers=WORKERS, steps=steps)
        trace = simulate(rule, Cluster.parse(latency, batch=BATCH), spec)
        for is_slow in (True, False):
            own = [g for g in trace.gradients() if (g.worker in SLOW) == is_slow]
            used = sum(g.fate is Fate.ACCEPTED for g in own)
            rows.append(
                {
                    "machines": machines,
                    "rule": rule,
                    "workers": "0-3" if is_slow else "others",
                    "computed": len(own),
                    "used": used,
                    "forgotten_without": 1 - used / len(own),
                    "tries_with": _most_tries(own),
                }
            )
    return rows


def _most_tries(gradients: Sequence[Gradient]) -> int:
    """Return how often a mini-batch is computed at most, if it is assigned until it counts."""
    tries: Counter[int] = Counter()
    most = 0
    for gradient in gradients:
        tries[gradient.worker] += 1
        most = max(most, tries[gradient.worker])
        if gradient.fate is Fate.ACCEPTED:
            tries[gradient.worker] = 0
    return most


def draw(tables: Tables) -> "Figure":
    """Draw four races, and the accuracy on the reserved digits."""
    figure = new_figure(WIDTH, 10, f"Where backup workers lose, {WORKERS} workers")
    panels = figure.subplot_mosaic([["majority", "mild"], ["small", "large"], ["own", "own"]])
    titles = {
        "majority": "12 of 16 workers 3 times slower",
        "mild": "12 of 16 workers 1.5 times slower",
        "small": f"The same, {SMALL_BATCH} images per gradient",
        "large": "All workers are equally fast",
    }
    for name, title in titles.items():
        draw_bars(panels[name], tables[name], title)
    _draw_own_data(panels["own"], tables["own_data"])
    legend_below(figure, panels["large"], panels["own"])
    return figure


def _draw_own_data(axes: "Axes", rows: Rows) -> None:
    rules = list(dict.fromkeys(str(row["rule"]) for row in rows))
    for part, (name, label) in enumerate((("others", "other digits"), ("reserved", "8 and 9"))):
        for row, rule in enumerate(rules):
            value = 100 * fmean(column(rows, name, rule=rule))
            style = split_style(rule_colour(rule), 1 - part)
            axes.barh(row - 0.2 + 0.4 * part, value, height=0.36, **style)
        axes.barh(-1, 0, label=label, **split_style(LEGEND, 1 - part))
    axes.set_yticks(range(len(rules)), [rule.replace(", ", ",\n") for rule in rules])
    axes.set_ylim(len(rules) - 0.4, -0.6)
    title = "Only four slow workers hold the digits 8 and 9"
    describe_bars(axes, title, "accuracy on test images (%)")
    axes.set_xlim(0, 100)


def describe(tables: Tables) -> str:
    """Summarize the tables in words."""
    owned = tables["own_data"]
    accuracies = []
    for rule in dict.fromkeys(str(row["rule"]) for row in owned):
        reserved, others = (
            mean_and_sd([100 * value for value in column(owned, name, rule=rule)], 1)
            for name in ("reserved", "others")
        )
        seconds = fmean(column(owned, "seconds", rule=rule))
        accuracies.append(
            f"- {rule}: {reserved} % on 8 and 9, {others} % on the others ({seconds:.0f} s)"
        )
    races = "\n".join(
        f"- {words}: {seconds_text(tables[name])}."
        f"{edge_note(tables[f'{name}_tried'], tables[name], 'rule')}"
        for name, words in (
            ("majority", "12 of 16 workers take three times as long"),
            ("mild", "12 of 16 workers take one and a half times as long"),
            ("small", f"the same with {SMALL_BATCH} images in a mini-batch"),
            ("large", "all workers are equally fast"),
        )
    )
    lines = "\n".join(accuracies)
    return (
        f"{seed_count(owned)}. Seconds to {float(tables['large'][0]['target']):.0%} accuracy:\n\n"
        f"{races}\n\nAccuracy if only four slow workers have the digits 8 and 9:\n\n{lines}\n\n"
        f"{_describe_requeue(tables['requeue'])}"
    )


def _describe_requeue(rows: Rows) -> str:
    def value(name: str, machines: str, workers: str) -> float:
        return column(rows, name, machines=machines, workers=workers)[0]

    return (
        "Dropped mini-batches, counted in a simulation: with backup:1 and equally fast workers, "
        f"{value('forgotten_without', 'alike', 'others'):.1%} of the mini-batches would be lost if "
        "they weren't assigned again; because they are, each counts after at most "
        f"{value('tries_with', 'alike', 'others'):.0f} tries. With backup:4, the four slow workers "
        f"computed the same mini-batch up to {value('tries_with', '4 slow', '0-3'):.0f} times, and "
        f"{value('used', '4 slow', '0-3'):.0f} of their "
        f"{value('computed', '4 slow', '0-3'):.0f} gradients counted."
    )


LOSING = Experiment(
    name="losing",
    question="Where do backup workers lose?",
    expected=(
        "If most workers are slow, a few backups gain nothing. Enough backups to leave out M of W "
        "workers that are s times as slow waste most of the work: if every gradient counts the "
        "same, that pays only if s is above W/(W-M), here 4. Data that only slow workers hold is "
        "not learnt (Tyurin and Richtárik: if workers have different data, the slowest can't be "
        "left out). A b larger than the number of stragglers wastes work."
    ),
    measure=measure,
    draw=draw,
    describe=describe,
    needs=mnist.SOURCES,
)
