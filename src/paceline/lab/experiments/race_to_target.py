# SPDX-License-Identifier: BSD-3-Clause
"""Races: how long each rule needs to reach an accuracy, on given workers.

Sixteen workers train the MNIST CNN with Adam at a constant rate. Each rule gets the best of five
rates by the mean over the seeds; they are multiples of a rate proportional to the square root of
the samples in an update. The score is that of a moving average of the weights, because the accuracy
of the weights themselves jumps up and down. If a rule reaches the target between two evaluations,
its time is interpolated linearly.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, isnan, sqrt
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, NamedTuple

from paceline.lab.experiment import Lab, Rows
from paceline.lab.experiments.curves import first_reached
from paceline.lab.experiments.tables import column, finite, mean_and_sd
from paceline.lab.experiments.tuning import tune
from paceline.lab.problems.images import Digits
from paceline.lab.recipe import Recipe
from paceline.lab.trial import Trial, TrialResult, gradients_per_update
from paceline.spec import Late
from paceline.watch.figure_style import describe_bars, draw_seed_bars

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = [
    "BATCH",
    "FACTORS",
    "RATE",
    "WORKERS",
    "Entrant",
    "Race",
    "digits_problem",
    "draw_bars",
    "mean_seconds",
    "race",
    "seconds_text",
]

WORKERS = 16
BATCH = 16
RATE = 0.01  # of an update with such mini-batches from all workers
FACTORS = (0.03, 0.1, 0.3, 1.0, 3.0)
AVERAGED = 1000  # samples that the moving average of the weights spans


@dataclass(frozen=True)
class Entrant:
    """A rule, and the workers that it runs on."""

    policy: str
    latency: str
    late: Late = "cancel"
    batch: int = BATCH

    @property
    def label(self) -> str:
        """The rule's name in tables and figures."""
        return self.policy if self.late == "cancel" else f"{self.policy}, finish"

    @property
    def gradients(self) -> int:
        """Gradients per update."""
        return gradients_per_update(self.policy, WORKERS)

    @property
    def samples(self) -> int:
        """Samples per update."""
        return self.gradients * self.batch

    def rate(self, factor: float) -> float:
        """Return the learning rate for this factor."""
        return RATE * sqrt(self.samples / (WORKERS * BATCH)) * factor

    def trial(self, lab: Lab, factor: float, seed: int) -> Trial:
        """Return a trial that ends at the target, or when the data is used up."""
        return Trial(
            problem=digits_problem(lab.data, seed, self.batch, quick=lab.quick),
            recipe=Recipe(
                self.rate(factor),
                method="adam",
                ema=1 - self.samples / AVERAGED,
            ),
            policy=self.policy,
            workers=WORKERS,
            latency=self.latency,
            epochs=0.4 if lab.quick else 1.0,
            late=self.late,
            rows=12 if lab.quick else 60,
            target=f"accuracy>={target_accuracy(lab)}",
        )


def target_accuracy(lab: Lab) -> float:
    """Return the target of all races."""
    return 0.8 if lab.quick else 0.9


def digits_problem(data: Path, seed: int, batch: int = BATCH, *, quick: bool) -> Digits:
    """Return the problem that all races train."""
    return Digits(batch=batch, seed=seed, data=data, width=0.5, scored=1000 if quick else 2000)


class Race(NamedTuple):
    """When each rule reached the target, for each seed."""

    tried: Rows
    """At every rate."""
    final: Rows
    """At the best rate."""


def race(lab: Lab, entrants: Sequence[Entrant]) -> Race:
    """Train every entrant at every rate, and pick the best rate of each."""
    best, found = tune(
        lab,
        lab.seeds,
        dict.fromkeys(entrants, (0.3,) if lab.quick else FACTORS),
        lambda entrant, factor, seed: entrant.trial(lab, factor, seed),
        lambda _, result: _penalty(result, target_accuracy(lab)),
    )
    rows = {case: _row(lab, *case, result) for case, result in found.items()}
    return Race(
        tried=list(rows.values()),
        final=[row for (entrant, factor, _), row in rows.items() if factor == best[entrant]],
    )


def _penalty(result: TrialResult, target: float) -> tuple[float, float]:
    """Later is worse; of those that never reach the target, a lower final accuracy is worse."""
    seconds = first_reached(result.rows, target).seconds
    return inf if isnan(seconds) else seconds, -result.rows[-1].scores["accuracy"]


def _row(
    lab: Lab, entrant: Entrant, factor: float, seed: int, result: TrialResult
) -> dict[str, float | str]:
    target = target_accuracy(lab)
    return {
        "rule": entrant.label,
        "rate": entrant.rate(factor),
        "seed": seed,
        "target": target,
        **first_reached(result.rows, target)._asdict(),
        "accuracy": result.last("accuracy"),
        "staleness": result.staleness,
        "used": result.used,
        "dropped": result.dropped,
        "cancelled": result.cancelled,
    }


# ----------------------------------------------------------------------------- results of a race


def mean_seconds(rows: Rows, rule: str) -> float:
    """Return the mean time of a rule to the target; NaN if it missed it with one of the seeds."""
    return fmean(column(rows, "seconds", rule=rule))


def seconds_text(rows: Rows) -> str:
    """Say how many seconds each rule needed."""
    rules = dict.fromkeys(str(row["rule"]) for row in rows)
    return ", ".join(
        f"{rule} {mean_and_sd(column(rows, 'seconds', rule=rule), 0)}" for rule in rules
    )


def draw_bars(axes: "Axes", rows: Rows, title: str) -> None:
    """Draw the time of each rule as a bar for the mean, and a dot for each seed."""
    rules = list(dict.fromkeys(str(row["rule"]) for row in rows))
    times = [column(rows, "seconds", rule=rule) for rule in rules]
    reached = [finite(seconds) for seconds in times]
    draw_seed_bars(axes, rules, reached)
    for position, (every, seconds) in enumerate(zip(times, reached, strict=True)):
        if len(seconds) < len(every):
            end = max(seconds, default=0.0)
            axes.text(end, position, "  missed by some seeds", va="center", fontsize="small")
    target = f"{100 * float(rows[0]['target']):g} % accuracy"
    describe_bars(axes, title, f"virtual time to {target} (s)")
