# SPDX-License-Identifier: BSD-3-Clause
"""What scripts logged, against time; and when it has reached a target."""

import operator
from dataclasses import dataclass
from math import inf
from statistics import median
from typing import NamedTuple

from paceline.core.events import Fate
from paceline.errors import SpecError
from paceline.spec import parse_number
from paceline.trace.schema import Gradient, Trace, Update
from paceline.watch.summary import began, without_lost

__all__ = ["Point", "Target", "curve", "final", "logged"]

LAST = 5  # logged values that the final one is the median of

_OPERATORS = {">=": operator.ge, "<=": operator.le}


@dataclass(frozen=True)
class Target:
    """What is to be reached, such as accuracy>=0.95."""

    name: str
    sign: str  # >= or <=
    value: float

    @classmethod
    def parse(cls, text: str) -> "Target":
        """Read such a string; raises SpecError."""
        for sign in _OPERATORS:
            name, found, value = text.partition(sign)
            if found and name.strip():
                return cls(name.strip(), sign, parse_number(value, f"the target of {name.strip()}"))
        raise SpecError(f"a target must be such as 'accuracy>=0.95' or 'loss<=0.1', got {text!r}")

    def reached_at(self, trace: Trace) -> float:
        """Seconds from the beginning of the run until it was first reached; inf: never."""
        points = curve(trace, self.name)
        return next((point.t for point in points if self.is_reached_by(point.value)), inf)

    def is_reached_by(self, value: float) -> bool:
        """Whether this is as good as was asked for, or better."""
        return bool(_OPERATORS[self.sign](value, self.value))

    def __str__(self) -> str:
        return f"{self.name} {self.sign} {self.value:g}"


class Point(NamedTuple):
    """Something logged, and when."""

    t: float  # seconds from the beginning of the run
    samples: int  # that had come into updates
    value: float


def curve(trace: Trace, name: str) -> list[Point]:
    """What was logged under this name, averaged over the contributors of each update."""
    trace = without_lost(trace)
    began_at = began(trace)
    points, samples = [], 0
    for record in trace.records:
        if isinstance(record, Gradient) and record.fate is Fate.ACCEPTED:
            samples += record.samples
        elif isinstance(record, Update):
            value = record.scalars.get(name)
            if value is not None:
                points.append(Point(record.t - began_at, samples, value))
    return points


def final(trace: Trace, name: str) -> float | None:
    """What was logged last, as the median of the last few; None: nothing was."""
    values = [point.value for point in curve(trace, name)]
    return median(values[-LAST:]) if values else None


def logged(trace: Trace) -> set[str]:
    """The names under which anything was logged, finite or not."""
    return {name for update in trace.updates() for name in update.scalars}
