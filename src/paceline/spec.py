# SPDX-License-Identifier: BSD-3-Clause
"""A frozen, validated description of a run, and the small grammar of command-line strings.

The simulator, the runtime and the command line all use `RunSpec`. The strings that users type
("backup:2", "exp:mean=20ms") have the form `name:value,key=value`. This module splits them and
parses numbers, durations and sizes; it doesn't know what the names mean.
"""

from dataclasses import dataclass
from math import isfinite
from typing import Literal, NewType

from paceline.errors import SpecError

__all__ = [
    "Late",
    "RunSpec",
    "Seconds",
    "parse_bytes",
    "parse_number",
    "parse_seconds",
    "split_call",
]

Late = Literal["cancel", "finish"]

Seconds = NewType("Seconds", float)
"""The type of a policy setting that is a duration: its string may have a unit."""

_SECONDS_PER = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_BYTES_PER = {"KB": 1e3, "MB": 1e6, "GB": 1e9, "KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30}


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSpec:
    """What a shell and its policy must know about a run; it doesn't change during the run."""

    workers: int
    """W: the number of workers the run is started for. Those that join beyond W are backups."""

    steps: int | None = None
    """The run ends after this many updates; None: when it is asked to stop."""

    samples: int | None = None
    """The run ends with the update that brings it to this many accepted samples, if not sooner."""

    min_workers: int = 1
    """The run pauses while fewer workers than this are alive."""

    late: Late = "cancel"
    """Whether late work is cancelled at once, or finished and then dropped as in Chen et al."""

    seed: int = 0
    """The seed of all random numbers."""

    def __post_init__(self) -> None:
        if self.workers < 1:
            raise SpecError(f"workers must be >= 1, got {self.workers}")
        if self.steps is not None and self.steps < 1:
            raise SpecError(f"steps must be >= 1, got {self.steps}")
        if self.samples is not None and self.samples < 1:
            raise SpecError(f"samples must be >= 1, got {self.samples}")
        if not 1 <= self.min_workers <= self.workers:
            raise SpecError(
                f"min_workers must be between 1 and workers={self.workers}, got {self.min_workers}"
            )
        if self.late not in ("cancel", "finish"):
            raise SpecError(f"late must be 'cancel' or 'finish', got {self.late!r}")
        if self.seed < 0:
            raise SpecError(f"seed must be >= 0, got {self.seed}")


def split_call(text: str) -> tuple[str, list[str], dict[str, str]]:
    """Split "name:value,key=value" into the name, the plain values and the named values."""
    name, _, rest = text.strip().partition(":")
    values: list[str] = []
    named: dict[str, str] = {}
    for part in rest.split(",") if rest.strip() else []:
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if equals:
            if key in named:
                raise SpecError(f"{text!r} gives {key} twice")
            named[key] = value
        elif named:
            raise SpecError(f"{text!r} has the plain value {key!r} after a named one; name it too")
        else:
            values.append(key)
    return name.strip(), values, named


def parse_number(text: str, what: str) -> float:
    """Parse a finite number; `what` names it in the error."""
    try:
        value = float(text)
    except ValueError:
        raise SpecError(f"{what} must be a number, got {text!r}") from None
    if not isfinite(value):
        raise SpecError(f"{what} must be a finite number, got {text!r}")
    return value


def parse_seconds(text: str, what: str) -> float:
    """Parse a duration >= 0 such as "50ms", "1.4s", "2m", "1h" or plain seconds."""
    return _parse_with_unit(text, what, _SECONDS_PER, "a duration such as 50ms or 1.4s")


def parse_bytes(text: str, what: str) -> float:
    """Parse a size >= 0 such as "100MB", "1.5GiB" or plain bytes."""
    return _parse_with_unit(text, what, _BYTES_PER, "a size such as 100MB or 1.5GiB")


def _parse_with_unit(text: str, what: str, units: dict[str, float], form: str) -> float:
    number, scale = text.strip(), 1.0
    for unit in sorted(units, key=len, reverse=True):
        if number.endswith(unit):
            number, scale = number.removesuffix(unit), units[unit]
            break
    try:
        value = parse_number(number, what) * scale
    except SpecError:
        raise SpecError(f"{what} must be {form}, got {text!r}") from None
    if not isfinite(value):
        raise SpecError(f"{what} must be {form}, got {text!r}, which is too large")
    if value < 0:
        raise SpecError(f"{what} must be >= 0, got {text!r}")
    return value
