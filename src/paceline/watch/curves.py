# SPDX-License-Identifier: BSD-3-Clause
"""Curves of the scalars that scripts logged, and when they reached a target."""

import operator
from dataclasses import dataclass
from math import inf
from statistics import median
from typing import NamedTuple

import numpy as np

from paceline.core.events import Fate
from paceline.errors import SpecError
from paceline.spec import parse_number
from paceline.trace.schema import Gradient, Trace, Update
from paceline.watch.segments import start_time, without_lost

__all__ = ["Point", "Target", "curve", "final", "logged", "smoothed"]

LAST = 5  # the final value is the median of this many

_OPERATORS = {">=": operator.ge, "<=": operator.le}


@dataclass(frozen=True)
class Target:
    """A target such as accuracy>=0.95."""

    name: str
    sign: str  # >= or <=
    value: float

    @classmethod
    def parse(cls, text: str) -> "Target":
        """Parse a target; raise SpecError if it is malformed."""
        for sign in _OPERATORS:
            name, found, value = text.partition(sign)
            if found and name.strip():
                return cls(name.strip(), sign, parse_number(value, f"the target of {name.strip()}"))
        raise SpecError(f"a target must look like 'accuracy>=0.95' or 'loss<=0.1', got {text!r}")

    def reached_at(self, trace: Trace) -> float:
        """Return the seconds from the beginning of the run until it was reached; inf: never."""
        points = curve(trace, self.name)
        return next((point.t for point in points if self.is_reached_by(point.value)), inf)

    def is_reached_by(self, value: float) -> bool:
        """Return whether this value meets the target."""
        return bool(_OPERATORS[self.sign](value, self.value))

    def __str__(self) -> str:
        return f"{self.name} {self.sign} {self.value:g}"


class Point(NamedTuple):
    """A logged value."""

    t: float  # seconds since the run began
    samples: int  # in updates so far; each counts once, however many gradients use it
    value: float


def curve(trace: Trace, name: str) -> list[Point]:
    """Return the values logged under this name, averaged over the contributors of each update."""
    trace = without_lost(trace)
    start = start_time(trace)
    points, samples = [], 0
    for record in trace.records:
        if isinstance(record, Gradient) and record.fate is Fate.ACCEPTED:
            samples += record.counted_samples
        elif isinstance(record, Update):
            value = record.scalars.get(name)
            if value is not None:
                points.append(Point(record.t - start, samples, value))
    return points


def smoothed(points: list[Point], share: float) -> list[Point]:
    """Replace each value by the mean over this share of the curve, centred at the point.

    At the start the window is smaller, because values change fast there. A curve with too few
    points for a window of three is returned unchanged.
    """
    half = int(share * len(points) / 2)
    if half == 0:
        return points
    values, window = np.array([point.value for point in points]), np.ones(2 * half + 1)
    counts = np.convolve(np.ones(len(values)), window, mode="same")
    means = np.convolve(values, window, mode="same") / counts
    means[:half] = [values[: 2 * i + 1].mean() for i in range(half)]
    return [p._replace(value=mean) for p, mean in zip(points, means.tolist(), strict=True)]


def final(trace: Trace, name: str) -> float | None:
    """Return the median of the last few logged values; None: there are none."""
    values = [point.value for point in curve(trace, name)]
    return median(values[-LAST:]) if values else None


def logged(trace: Trace) -> set[str]:
    """Return the names of all logged scalars, finite or not."""
    return {name for update in trace.updates() for name in update.scalars}
