# SPDX-License-Identifier: BSD-3-Clause
"""Is it the same for other models? A language model of two kinds, a GAN, and a policy that plays.

All rules use as much data, on the same machines, and Adam. The learning rate of each is the best of
four, for the GAN of seven, on average over all seeds with half of the data: around one that goes
with the square root of the gradients of an update.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from math import sqrt
from statistics import fmean
from typing import Literal

from matplotlib.figure import Figure

from paceline.lab.data import mnist, text
from paceline.lab.experiment import Experiment, Lab, Tables
from paceline.lab.experiments.curves import mean_curve
from paceline.lab.experiments.rows import curve_rows, end_row
from paceline.lab.experiments.settings import CHEN, FACTORS, finite, picked, seeds_of, spread
from paceline.lab.experiments.tuning import Badness, edges, highest, lowest, tuned
from paceline.lab.problem import Problem
from paceline.lab.problems.cartpole import CartPole
from paceline.lab.problems.gan import DrawnDigits
from paceline.lab.problems.text import Shakespeare
from paceline.lab.recipe import Recipe
from paceline.lab.trial import Trial, gradients_of

__all__ = ["MODELS"]

WORKERS = 16
RULES = ("sync", "backup:1", "softsync:4", "async")


@dataclass(frozen=True)
class Task:
    """A model, and what it learns."""

    problem: Callable[[Lab, int], Problem]  # for a seed
    rate: float  # of an update of all workers
    epochs: float
    score: str
    unit: str
    is_high: bool = False
    """Whether more is better."""
    factors: Sequence[float] = FACTORS
    """Of the rate, that are tried."""

    @property
    def badness(self) -> Badness:
        """By which rates are chosen."""
        return (highest if self.is_high else lowest)(self.score)


def _text(model: Literal["lstm", "transformer"], width: int) -> Callable[[Lab, int], Problem]:
    return lambda lab, seed: Shakespeare(
        batch=4, seed=seed, data=lab.data, model=model, width=width, length=32
    )


TASKS = {
    "LSTM": Task(_text("lstm", 64), 0.02, 1.0, "bits", "bits per character"),
    "transformer": Task(_text("transformer", 32), 0.02, 0.7, "bits", "bits per character"),
    "GAN": Task(
        lambda lab, seed: DrawnDigits(batch=16, seed=seed, data=lab.data),
        *(0.003, 2.0, "distance", "Fréchet distance"),
        factors=(0.01, 0.03, *FACTORS, 10.0),  # each rule likes another
    ),
    "CartPole": Task(
        lambda lab, seed: CartPole(batch=4, seed=seed),
        *(0.03, 3.0, "return", "mean return, 200 at most", True),
    ),
}


@dataclass(frozen=True)
class Case:
    """What is tried."""

    task: str
    policy: str
    factor: float
    seed: int
    share: float  # of the data

    @property
    def rate(self) -> float:
        """Of the optimizer."""
        gradients = gradients_of(self.policy, WORKERS)
        return TASKS[self.task].rate * sqrt(gradients / WORKERS) * self.factor

    @property
    def score(self) -> str:
        """What it is judged by."""
        return TASKS[self.task].score

    @property
    def about(self) -> dict[str, float | str]:
        """Its columns in tables."""
        return {"task": self.task, "rule": self.policy, "rate": self.rate, "seed": self.seed}

    def trial(self, lab: Lab) -> Trial:
        """The same as a trial."""
        task = TASKS[self.task]
        return Trial(
            problem=task.problem(lab, self.seed),
            recipe=Recipe(self.rate, method="adam", fall_from=0.5),
            policy=self.policy,
            workers=WORKERS,
            latency=CHEN,
            epochs=task.epochs * self.share,
            rows=2 if lab.quick else 12,
        )


def measure(lab: Lab) -> Tables:
    """Find the rates, then train with them."""
    share = 0.1 if lab.quick else 1.0
    policies = ("sync", "async") if lab.quick else RULES
    pairs = list(product(TASKS, policies))

    def trying(pair: tuple[str, str], factor: float, seed: int) -> Case:
        return Case(*pair, factor, seed, share if lab.quick else share / 2)

    best, found = tuned(
        lab,
        lab.seeds,
        {pair: (1.0,) if lab.quick else TASKS[pair[0]].factors for pair in pairs},
        lambda *case: trying(*case).trial(lab),
        lambda pair, outcome: TASKS[pair[0]].badness(pair, outcome),
    )
    cases = [Case(*pair, best[pair], seed, share) for pair, seed in product(pairs, lab.seeds)]
    done = dict(zip(cases, lab.outcomes([case.trial(lab) for case in cases]), strict=True))
    return {
        "rates": [
            end_row(case.about, outcome, score=case.score)
            for key, outcome in found.items()
            for case in [trying(*key)]
        ],
        "final": [end_row(case.about, outcome, score=case.score) for case, outcome in done.items()],
        "curves": [
            row
            for case, outcome in done.items()
            for row in curve_rows(case.about, outcome, score=case.score)
        ],
    }


def _rules(tables: Tables) -> list[str]:
    return list(dict.fromkeys(str(row["rule"]) for row in tables["final"]))


def draw(tables: Tables) -> Figure:
    """The score against time, one panel for each task."""
    rows = tables["curves"]
    figure = Figure(figsize=(4 * len(TASKS), 4), layout="constrained")
    panels = figure.subplots(1, len(TASKS), squeeze=False)[0]
    for axes, (name, task) in zip(panels, TASKS.items(), strict=True):
        for number, rule in enumerate(_rules(tables)):
            own = [row for row in rows if row["task"] == name and row["rule"] == rule]
            axes.plot(*mean_curve(own, "seconds", "score"), f"C{number}.-", label=rule)
        scores = picked(rows, "score", task=name)
        if not task.is_high:  # the beginning is far away
            ends = finite(picked(tables["final"], "score", task=name))
            least = min(scores)
            axes.set_ylim(0.95 * least, max([least + 0.4 * (max(scores) - least), *ends]))
        axes.set(xlabel="virtual time (s)", ylabel=task.unit, title=name)
        axes.grid(alpha=0.3)
    panels[-1].legend(frameon=False)
    return figure


def tell(tables: Tables) -> str:
    """Put it into words."""
    rows = tables["final"]
    parts = []
    for name, task in TASKS.items():
        described = []
        for rule in _rules(tables):
            score = spread(picked(rows, "score", task=name, rule=rule))
            seconds = fmean(picked(rows, "seconds", task=name, rule=rule))
            rate = picked(rows, "rate", task=name, rule=rule)[0]
            described.append(f"{rule} {score} after {seconds:.0f} s (rate {rate:.2g})")
        better = "more is better" if task.is_high else "less is better"
        parts.append(f"{name}, {task.unit}, {better}: " + ", ".join(described))
    return (
        f"{WORKERS} workers, {seeds_of(rows)}, as much data for every rule, its best rate in "
        f"brackets. {'. '.join(parts)}.{edges(tables['rates'], rows, 'task', 'rule')}"
    )


MODELS = Experiment(
    name="models",
    question="Is it the same for other kinds of models?",
    expected=(
        "Chen et al. (first version) for a language model: synchronous training takes rates a "
        "hundred times larger without explosions. For GANs and policy gradients there is no "
        "number in the papers."
    ),
    measure=measure,
    draw=draw,
    tell=tell,
    needs=(*mnist.SOURCES, *text.SOURCES),
)
