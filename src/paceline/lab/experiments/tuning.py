# SPDX-License-Identifier: BSD-3-Clause
"""Find the learning rate of each rule: try several, and take the best."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from math import inf
from statistics import fmean
from typing import TypeVar

from paceline.lab.experiment import Lab, Rows
from paceline.lab.experiments.tables import column
from paceline.lab.trial import Trial, TrialResult

__all__ = ["Penalty", "edge_note", "prefer_high", "prefer_low", "tune"]

Key = TypeVar("Key", bound=Hashable)
Choice = TypeVar("Choice", bound=Hashable)
Penalty = Callable[[object, TrialResult], tuple[float, ...]]
"""A tuple that is smaller for better results."""


def tune(
    lab: Lab,
    seeds: Sequence[int],
    choices: Mapping[Key, Sequence[Choice]],
    trial: Callable[[Key, Choice, int], Trial],
    penalty: Callable[[Key, TrialResult], tuple[float, ...]],
) -> tuple[dict[Key, Choice], dict[tuple[Key, Choice, int], TrialResult]]:
    """Return the best choice of each key by its mean penalty over the seeds, and all results."""
    cases = [
        (key, choice, seed) for key, own in choices.items() for choice in own for seed in seeds
    ]
    found = dict(zip(cases, lab.run([trial(*case) for case in cases]), strict=True))

    def mean_penalty(key: Key, choice: Choice) -> tuple[float, ...]:
        each = [penalty(key, found[key, choice, seed]) for seed in seeds]
        return tuple(map(fmean, zip(*each, strict=True)))

    best = {
        key: min(own, key=lambda choice: mean_penalty(key, choice)) for key, own in choices.items()
    }
    return best, found


def prefer_high(score: str) -> Penalty:
    """Return a penalty under which a higher final score is better."""
    return lambda _, result: (inf if result.is_diverged else -result.last(score),)


def prefer_low(score: str) -> Penalty:
    """Return a penalty under which a lower final score is better."""
    return lambda _, result: (inf if result.is_diverged else result.last(score),)


def edge_note(tried: Rows, final: Rows, *columns: str) -> str:
    """Say where the best rate is the smallest or largest one tried, so another may be better.

    `columns` identify the rules, or the cases, that were tuned separately. Returns an empty string
    if there are none.
    """
    names: dict[str, list[str]] = {"smallest": [], "largest": []}
    for key in dict.fromkeys(tuple(row[name] for name in columns) for row in final):
        where = dict(zip(columns, key, strict=True))
        rates, best = column(tried, "rate", **where), column(final, "rate", **where)[0]
        if len(rates) > 1 and best in (min(rates), max(rates)):
            edge = "smallest" if best == min(rates) else "largest"
            names[edge].append(" ".join(_format(value) for value in key))
    return "".join(
        f" The best rate is the {edge} one tried for: {'; '.join(own)}."
        for edge, own in names.items()
        if own
    )


def _format(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:g}"
