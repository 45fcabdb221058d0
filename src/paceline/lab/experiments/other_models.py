# SPDX-License-Identifier: BSD-3-Clause
"""Do other models behave the same? Two kinds of language model, a GAN, and a CartPole policy.

All rules use the same amount of data on the same workers, and Adam. The learning rate of each is
the best of four (seven for the GAN) by the mean over all seeds with half of the data. They are
multiples of a rate proportional to the square root of the gradients per update.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from math import sqrt
from statistics import fmean
from typing import TYPE_CHECKING, Literal

from paceline.lab.data import mnist, shakespeare
from paceline.lab.experiment import Experiment, Lab, Tables
from paceline.lab.experiments.curves import mean_curve
from paceline.lab.experiments.settings import CHEN, FACTORS
from paceline.lab.experiments.tables import (
    column,
    curve_rows,
    final_row,
    finite,
    mean_and_sd,
    seed_count,
)
from paceline.lab.experiments.tuning import Penalty, edge_note, prefer_high, prefer_low, tune
from paceline.lab.plotting import new_figure
from paceline.lab.problem import Problem
from paceline.lab.problems.cartpole import CartPole
from paceline.lab.problems.gan import DrawnDigits
from paceline.lab.problems.shakespeare import Shakespeare
from paceline.lab.recipe import Recipe
from paceline.lab.trial import Trial, gradients_per_update
from paceline.watch.figure_style import WIDTH, describe_axes, legend_below, line_style

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["MODELS"]

WORKERS = 16
RULES = ("sync", "backup:1", "softsync:4", "async")


@dataclass(frozen=True)
class LearningTask:
    """A model, what it learns, and how it is trained."""

    problem: Callable[[Lab, int], Problem]  # from a seed
    rate: float  # if all workers contribute to an update
    epochs: float
    score: str
    unit: str
    is_high: bool = False
    """Whether a higher score is better."""
    factors: Sequence[float] = FACTORS
    """Multiples of the rate to try."""

    @property
    def penalty(self) -> Penalty:
        """The criterion for the best rate."""
        return (prefer_high if self.is_high else prefer_low)(self.score)


def _text(model: Literal["lstm", "transformer"], width: int) -> Callable[[Lab, int], Problem]:
    return lambda lab, seed: Shakespeare(
        batch=4, seed=seed, data=lab.data, model=model, width=width, length=32
    )


TASKS = {
    "LSTM": LearningTask(_text("lstm", 64), 0.02, 1.0, "bits", "bits per character"),
    "transformer": LearningTask(_text("transformer", 32), 0.02, 0.7, "bits", "bits per character"),
    "GAN": LearningTask(
        lambda lab, seed: DrawnDigits(batch=16, seed=seed, data=lab.data),
        *(0.003, 2.0, "distance", "Fréchet distance"),
        factors=(0.01, 0.03, *FACTORS, 10.0),  # rules differ widely in their best rate
    ),
    "CartPole": LearningTask(
        lambda lab, seed: CartPole(batch=4, seed=seed),
        *(0.03, 3.0, "return", "mean return, 200 at most", True),
    ),
}


@dataclass(frozen=True)
class ModelCase:
    """One training run."""

    task: str
    policy: str
    factor: float
    seed: int
    share: float  # of the data

    @property
    def rate(self) -> float:
        """The learning rate."""
        gradients = gradients_per_update(self.policy, WORKERS)
        return TASKS[self.task].rate * sqrt(gradients / WORKERS) * self.factor

    @property
    def score(self) -> str:
        """The name of the score."""
        return TASKS[self.task].score

    @property
    def key(self) -> dict[str, float | str]:
        """The columns that identify it in tables."""
        return {"task": self.task, "rule": self.policy, "rate": self.rate, "seed": self.seed}

    def trial(self, lab: Lab) -> Trial:
        """Return the trial."""
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
    """Find the best rates, then train with them."""
    share = 0.1 if lab.quick else 1.0
    policies = ("sync", "async") if lab.quick else RULES
    pairs = list(product(TASKS, policies))

    def trying(pair: tuple[str, str], factor: float, seed: int) -> ModelCase:
        return ModelCase(*pair, factor, seed, share if lab.quick else share / 2)

    best, found = tune(
        lab,
        lab.seeds,
        {pair: (1.0,) if lab.quick else TASKS[pair[0]].factors for pair in pairs},
        lambda *case: trying(*case).trial(lab),
        lambda pair, result: TASKS[pair[0]].penalty(pair, result),
    )
    cases = [ModelCase(*pair, best[pair], seed, share) for pair, seed in product(pairs, lab.seeds)]
    done = dict(zip(cases, lab.run([case.trial(lab) for case in cases]), strict=True))
    return {
        "rates": [
            final_row(case.key, result, score=case.score)
            for key, result in found.items()
            for case in [trying(*key)]
        ],
        "final": [final_row(case.key, result, score=case.score) for case, result in done.items()],
        "curves": [
            row
            for case, result in done.items()
            for row in curve_rows(case.key, result, score=case.score)
        ],
    }


def _rules(tables: Tables) -> list[str]:
    return list(dict.fromkeys(str(row["rule"]) for row in tables["final"]))


def draw(tables: Tables) -> "Figure":
    """Draw the score against time, one panel per task."""
    rows = tables["curves"]
    figure = new_figure(WIDTH, 7, f"Four models, {WORKERS} workers")
    panels = figure.subplots(2, 2).flat
    for axes, (name, task) in zip(panels, TASKS.items(), strict=True):
        for rule in _rules(tables):
            own = [row for row in rows if row["task"] == name and row["rule"] == rule]
            axes.plot(*mean_curve(own, "seconds", "score"), label=rule, **line_style(rule))
        scores = column(rows, "score", task=name)
        if not task.is_high:  # the first scores are far off the scale
            ends = finite(column(tables["final"], "score", task=name))
            least = min(scores)
            axes.set_ylim(0.95 * least, max([least + 0.4 * (max(scores) - least), *ends]))
        direction = "higher" if task.is_high else "lower"
        describe_axes(axes, f"{name}: {direction} is better", "virtual time (s)", task.unit)
    legend_below(figure, axes)
    return figure


def describe(tables: Tables) -> str:
    """Summarize the tables in words."""
    rows = tables["final"]
    parts = []
    for name, task in TASKS.items():
        results = []
        for rule in _rules(tables):
            score = mean_and_sd(column(rows, "score", task=name, rule=rule))
            seconds = fmean(column(rows, "seconds", task=name, rule=rule))
            rate = column(rows, "rate", task=name, rule=rule)[0]
            results.append(f"{rule} {score} after {seconds:.0f} s (rate {rate:.2g})")
        better = "higher is better" if task.is_high else "lower is better"
        parts.append(f"- {name}, {task.unit}, {better}: " + ", ".join(results))
    lines = "\n".join(parts)
    return (
        f"{WORKERS} workers, {seed_count(rows)}, the same data for every rule; the best rate of "
        f"each is in parentheses.{edge_note(tables['rates'], rows, 'task', 'rule')}\n\n{lines}"
    )


MODELS = Experiment(
    name="models",
    question="Do other kinds of models behave the same?",
    expected=(
        "Chen et al. (first version) for a language model: synchronous training tolerates rates a "
        "hundred times larger without diverging. The papers have no numbers for GANs and policy "
        "gradients."
    ),
    measure=measure,
    draw=draw,
    describe=describe,
    needs=(*mnist.SOURCES, *shakespeare.SOURCES),
)
