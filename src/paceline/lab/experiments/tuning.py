# SPDX-License-Identifier: BSD-3-Clause
"""Finding the learning rate of each rule: all of some are tried, the best is taken."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from math import inf
from statistics import fmean
from typing import TypeVar

from paceline.lab.experiment import Lab, Rows
from paceline.lab.experiments.settings import picked
from paceline.lab.trial import Outcome, Trial

__all__ = ["Badness", "edges", "highest", "lowest", "tuned"]

Key = TypeVar("Key", bound=Hashable)
Choice = TypeVar("Choice", bound=Hashable)
Badness = Callable[[object, Outcome], tuple[float, ...]]


def tuned(
    lab: Lab,
    seeds: Sequence[int],
    choices: Mapping[Key, Sequence[Choice]],
    trial: Callable[[Key, Choice, int], Trial],
    badness: Callable[[Key, Outcome], tuple[float, ...]],
) -> tuple[dict[Key, Choice], dict[tuple[Key, Choice, int], Outcome]]:
    """The choice that is best for each key, on average over seeds; and what came of all of them."""
    cases = [
        (key, choice, seed) for key, own in choices.items() for choice in own for seed in seeds
    ]
    found = dict(zip(cases, lab.outcomes([trial(*case) for case in cases]), strict=True))

    def mean_badness(key: Key, choice: Choice) -> tuple[float, ...]:
        each = [badness(key, found[key, choice, seed]) for seed in seeds]
        return tuple(map(fmean, zip(*each, strict=True)))

    best = {
        key: min(own, key=lambda choice: mean_badness(key, choice)) for key, own in choices.items()
    }
    return best, found


def highest(score: str) -> Badness:
    """The higher it is in the end, the better."""
    return lambda _, outcome: (inf if outcome.is_diverged else -outcome.last(score),)


def lowest(score: str) -> Badness:
    """The lower it is in the end, the better."""
    return lambda _, outcome: (inf if outcome.is_diverged else outcome.last(score),)


def edges(tried: Rows, final: Rows, *columns: str) -> str:
    """Words for where the best rate is the smallest or the largest of those that were tried.

    There another one may be better. The columns tell apart whom the rates are for.
    """
    places: dict[str, list[str]] = {"smallest": [], "largest": []}
    for key in dict.fromkeys(tuple(row[column] for column in columns) for row in final):
        own = dict(zip(columns, key, strict=True))
        rates, best = picked(tried, "rate", **own), picked(final, "rate", **own)[0]
        if len(rates) > 1 and best in (min(rates), max(rates)):
            place = "smallest" if best == min(rates) else "largest"
            places[place].append(" ".join(_plain(value) for value in key))
    said = [f"the {place} for {', '.join(names)}" for place, names in places.items() if names]
    return f" Of the rates that were tried, the best is {' and '.join(said)}." if said else ""


def _plain(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:g}"
