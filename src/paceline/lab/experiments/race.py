# SPDX-License-Identifier: BSD-3-Clause
"""Races: which rule is first to reach an accuracy, on given machines.

Sixteen workers train the MNIST CNN with Adam at a fixed rate. Each rule has the best of five,
on average over the seeds: parts of one that goes with the root of the samples of an update. What
is looked at is a moving average of the weights, because theirs alone jumps up and down. Where the
target was reached between two looks, a straight line says when.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, isnan, sqrt
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from matplotlib.axes import Axes

from paceline.lab.experiment import Lab, Rows
from paceline.lab.experiments.curves import reached
from paceline.lab.experiments.settings import picked, spread
from paceline.lab.experiments.tuning import tuned
from paceline.lab.problems.images import Digits
from paceline.lab.recipe import Recipe
from paceline.lab.trial import Outcome, Trial, gradients_of
from paceline.spec import Late

__all__ = [
    "BATCH",
    "FACTORS",
    "RATE",
    "WORKERS",
    "Entrant",
    "Race",
    "bars",
    "digits",
    "mean_seconds",
    "outcome_words",
    "race",
]

WORKERS = 16
BATCH = 16
RATE = 0.01  # of an update of all workers with such mini-batches
FACTORS = (0.03, 0.1, 0.3, 1.0, 3.0)
AVERAGED = 1000  # samples that the moving average of the weights reaches back over


@dataclass(frozen=True)
class Entrant:
    """A rule on machines."""

    policy: str
    latency: str
    late: Late = "cancel"
    batch: int = BATCH

    @property
    def label(self) -> str:
        """Its name in tables and figures."""
        return self.policy if self.late == "cancel" else f"{self.policy}, finish"

    @property
    def gradients(self) -> int:
        """Of an update."""
        return gradients_of(self.policy, WORKERS)

    @property
    def samples(self) -> int:
        """Of an update."""
        return self.gradients * self.batch

    def rate(self, factor: float) -> float:
        """Of the optimizer."""
        return RATE * sqrt(self.samples / (WORKERS * BATCH)) * factor

    def trial(self, lab: Lab, factor: float, seed: int) -> Trial:
        """Trained until it is there, or has used all of the data."""
        return Trial(
            problem=digits(lab.data, seed, self.batch, quick=lab.quick),
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
            target=f"accuracy>={accuracy_wanted(lab)}",
        )


def accuracy_wanted(lab: Lab) -> float:
    """The target of all races."""
    return 0.8 if lab.quick else 0.9


def digits(data: Path, seed: int, batch: int = BATCH, *, quick: bool) -> Digits:
    """What is trained."""
    return Digits(batch=batch, seed=seed, data=data, width=0.5, scored=1000 if quick else 2000)


class Race(NamedTuple):
    """When each was there."""

    tried: Rows
    """At every rate."""
    final: Rows
    """At the best one."""


def race(lab: Lab, entrants: Sequence[Entrant]) -> Race:
    """Let them run."""
    best, found = tuned(
        lab,
        lab.seeds,
        dict.fromkeys(entrants, (0.3,) if lab.quick else FACTORS),
        lambda entrant, factor, seed: entrant.trial(lab, factor, seed),
        lambda _, outcome: _badness(outcome, accuracy_wanted(lab)),
    )
    rows = {case: _row(lab, *case, outcome) for case, outcome in found.items()}
    return Race(
        tried=list(rows.values()),
        final=[row for (entrant, factor, _), row in rows.items() if factor == best[entrant]],
    )


def _badness(outcome: Outcome, wanted: float) -> tuple[float, float]:
    """Later is worse; among those who never get there, whoever is farther away."""
    seconds = reached(outcome.rows, wanted).seconds
    return inf if isnan(seconds) else seconds, -outcome.rows[-1].scores["accuracy"]


def _row(
    lab: Lab, entrant: Entrant, factor: float, seed: int, outcome: Outcome
) -> dict[str, float | str]:
    wanted = accuracy_wanted(lab)
    return {
        "rule": entrant.label,
        "rate": entrant.rate(factor),
        "seed": seed,
        "target": wanted,
        **reached(outcome.rows, wanted)._asdict(),
        "accuracy": outcome.last("accuracy"),
        "staleness": outcome.staleness,
        "used": outcome.used,
        "dropped": outcome.dropped,
        "cancelled": outcome.cancelled,
    }


# ---------------------------------------------------------------------------- what was seen of it


def mean_seconds(rows: Rows, rule: str) -> float:
    """Until a rule was there; NaN: with one of the seeds it never was."""
    return fmean(picked(rows, "seconds", rule=rule))


def outcome_words(rows: Rows) -> str:
    """How many seconds each took."""
    rules = dict.fromkeys(str(row["rule"]) for row in rows)
    return ", ".join(f"{rule} {spread(picked(rows, 'seconds', rule=rule), 0)}" for rule in rules)


def bars(axes: Axes, rows: Rows) -> None:
    """The time of each rule, a bar from the mean, a dot for each seed."""
    rules = list(dict.fromkeys(str(row["rule"]) for row in rows))[::-1]
    for place, rule in enumerate(rules):
        seconds = [s for s in picked(rows, "seconds", rule=rule) if not isnan(s)]
        if seconds:
            axes.barh(place, fmean(seconds), color="C0", alpha=0.5)
            axes.plot(seconds, [place] * len(seconds), "k.", markersize=4)
        if len(seconds) < len(picked(rows, "seconds", rule=rule)):
            axes.text(max(seconds, default=0.0), place, " not always there", va="center")
    axes.set_yticks(range(len(rules)), rules)
    target = f"{float(rows[0]['target']):.0%} right"
    axes.set(xlabel=f"virtual time (s) to {target} (dots: seeds)", xlim=(0, None))
    axes.grid(alpha=0.3, axis="x")
