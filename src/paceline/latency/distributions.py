# SPDX-License-Identifier: BSD-3-Clause
"""Distributions of a single computation time; all times in seconds.

Latency strings have no brackets, so parts can be nested only as far as a string can express.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from math import exp, fsum, gamma, inf, isclose
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from paceline.errors import SpecError
from paceline.latency.text import format_number, format_percent, format_seconds

__all__ = [
    "LONGEST",
    "PLAIN_NUMBERS",
    "Constant",
    "Distribution",
    "Exponential",
    "Floats",
    "Gamma",
    "LogNormal",
    "Mixture",
    "Named",
    "Pareto",
    "Sometimes",
    "Sum",
    "Weibull",
]

Floats = NDArray[np.float64]

LONGEST = 1e12
"""Heavy tails can exceed what a float holds; longer times are cut off at 30,000 years."""

PLAIN_NUMBERS = ("sigma", "shape", "alpha")
"""Settings that aren't durations."""

_ZERO_IS_FINE = ("seconds", "shift")


class Distribution(ABC):
    """The distribution of one computation time; every draw is >= 0 and finite."""

    __slots__ = ()

    def sample(self, rng: np.random.Generator, n: int) -> Floats:
        """Return `n` independent draws."""
        with np.errstate(over="ignore", invalid="ignore"):
            return np.fmin(self._draw(rng, n), LONGEST)

    @abstractmethod
    def mean(self) -> float:
        """Return the expectation; may be inf."""

    @abstractmethod
    def __str__(self) -> str:
        """Return the string that `parse_latency` reads as this distribution."""

    @abstractmethod
    def _draw(self, rng: np.random.Generator, n: int) -> Floats:
        """Return `n` draws, which may overflow."""


@dataclass(frozen=True, slots=True)
class Named(Distribution):
    """A distribution with a name and settings, which are the fields of its class."""

    example: ClassVar[str]  # starts with the name

    def __post_init__(self) -> None:
        for key, name in self.settings().items():
            value = float(getattr(self, name))
            least = ">= 0" if key in _ZERO_IS_FINE else "> 0"
            if not (value > 0 or (value == 0 and key in _ZERO_IS_FINE)):
                raise SpecError(f"{key} must be {least}, got {value}")
            if value > LONGEST:
                raise SpecError(f"{key} must be <= {LONGEST:g}, got {value}")
            object.__setattr__(self, name, value)

    @classmethod
    def name(cls) -> str:
        return cls.example.partition(":")[0]

    @classmethod
    def settings(cls) -> dict[str, str]:
        """Map the name of each setting in a string to its field."""
        return {field.name.removesuffix("_s"): field.name for field in fields(cls)}

    @classmethod
    def form(cls) -> str:
        return f"{cls.name()}:{','.join(cls.settings())}".replace(",shift", "[,shift=]")

    def __str__(self) -> str:
        values = {key: getattr(self, name) for key, name in self.settings().items()}
        shift = values.pop("shift")
        texts = [
            format_number(value) if key in PLAIN_NUMBERS else format_seconds(value)
            for key, value in values.items()
        ]
        if shift:
            texts.append(f"shift={format_seconds(shift)}")
        return f"{self.name()}:{','.join(texts)}"


@dataclass(frozen=True, slots=True)
class Constant(Named):
    """Always the same time."""

    example = "const:50ms"
    seconds: float

    def mean(self) -> float:
        return self.seconds

    def __str__(self) -> str:
        return format_seconds(self.seconds)

    def _draw(self, rng: np.random.Generator, n: int) -> Floats:
        return np.full(n, self.seconds)


@dataclass(frozen=True, slots=True)
class Exponential(Named):
    """Exponential with the given mean, plus `shift`."""

    example = "exp:20ms,shift=50ms"
    mean_s: float  # not `mean`, which is a method of every distribution
    shift: float = 0.0

    def mean(self) -> float:
        return self.shift + self.mean_s

    def _draw(self, rng: np.random.Generator, n: int) -> Floats:
        return self.shift + self.mean_s * rng.standard_exponential(n)


@dataclass(frozen=True, slots=True)
class LogNormal(Named):
    """The logarithm is normal with deviation `sigma`; half of the times are below `median`."""

    example = "lognormal:50ms,0.3"
    median: float
    sigma: float
    shift: float = 0.0

    def mean(self) -> float:
        # For larger sigma the mean exceeds what a float holds.
        return self.shift + self.median * (exp(self.sigma**2 / 2) if self.sigma < 37 else inf)

    def _draw(self, rng: np.random.Generator, n: int) -> Floats:
        return self.shift + self.median * np.exp(self.sigma * rng.standard_normal(n))


@dataclass(frozen=True, slots=True)
class Gamma(Named):
    """Gamma; with an integer `shape`, the sum of that many exponential times."""

    example = "gamma:50ms,4"
    mean_s: float
    shape: float
    shift: float = 0.0

    def mean(self) -> float:
        return self.shift + self.mean_s

    def _draw(self, rng: np.random.Generator, n: int) -> Floats:
        return self.shift + self.mean_s * (rng.standard_gamma(self.shape, n) / self.shape)


@dataclass(frozen=True, slots=True)
class Pareto(Named):
    """Classical Pareto: P(time > t) = (scale / t) ** alpha; never below `scale`."""

    example = "pareto:50ms,2.5"
    scale: float
    alpha: float
    shift: float = 0.0

    def mean(self) -> float:
        return self.shift + self.scale * self.alpha / (self.alpha - 1) if self.alpha > 1 else inf

    def _draw(self, rng: np.random.Generator, n: int) -> Floats:
        return self.shift + self.scale * (1 + rng.pareto(self.alpha, n))


@dataclass(frozen=True, slots=True)
class Weibull(Named):
    """Weibull: P(time > t) = exp(-(t / scale) ** shape)."""

    example = "weibull:50ms,1.5"
    scale: float
    shape: float
    shift: float = 0.0

    def mean(self) -> float:
        # For smaller shapes the mean exceeds what a float holds.
        return self.shift + self.scale * (gamma(1 + 1 / self.shape) if self.shape > 0.006 else inf)

    def _draw(self, rng: np.random.Generator, n: int) -> Floats:
        return self.shift + self.scale * rng.weibull(self.shape, n)


@dataclass(frozen=True, slots=True)
class Sometimes(Distribution):
    """A draw of its part with the given probability, otherwise 0."""

    probability: float
    part: Distribution  # must be `Named`, because the strings have no brackets

    def __post_init__(self) -> None:
        _check_parts((self.part,), Named)
        if not 0 <= self.probability <= 1:
            raise SpecError(f"probability must be between 0 and 1, got {self.probability}")

    def mean(self) -> float:
        # 0 * inf would be NaN.
        return self.probability * self.part.mean() if self.probability else 0.0

    def __str__(self) -> str:
        return f"{format_percent(self.probability)} {self.part}"

    def _draw(self, rng: np.random.Generator, n: int) -> Floats:
        return np.where(rng.random(n) < self.probability, self.part._draw(rng, n), 0.0)


@dataclass(frozen=True, slots=True)
class Sum(Distribution):
    """The sum of independent draws of its parts."""

    parts: tuple[Distribution, ...]  # two or more, `Named` or `Sometimes`

    def __post_init__(self) -> None:
        _check_parts(self.parts, Named, Sometimes)
        if len(self.parts) < 2:
            raise SpecError(f"a sum must have two parts or more, got {len(self.parts)}")

    def mean(self) -> float:
        return sum(part.mean() for part in self.parts)

    def __str__(self) -> str:
        return " + ".join(map(str, self.parts))

    def _draw(self, rng: np.random.Generator, n: int) -> Floats:
        total: Floats = np.sum([part._draw(rng, n) for part in self.parts], axis=0)
        return total


@dataclass(frozen=True, slots=True)
class Mixture(Distribution):
    """A draw of one of its parts, chosen with the given weights."""

    weights: tuple[float, ...]  # >= 0; they sum to 1
    parts: tuple[Distribution, ...]  # two or more, none of them a `Mixture`

    def __post_init__(self) -> None:
        _check_parts(self.parts, Named, Sometimes, Sum)
        if not len(self.weights) == len(self.parts) >= 2 or min(self.weights) < 0:
            raise SpecError(f"two parts or more must have a weight >= 0 each, got {self.weights}")
        if not isclose(fsum(self.weights), 1, abs_tol=1e-9):
            raise SpecError(f"weights must add up to 100%, got {100 * fsum(self.weights):g}%")

    def mean(self) -> float:
        both = zip(self.weights, self.parts, strict=True)
        return sum(weight * part.mean() for weight, part in both if weight)

    def __str__(self) -> str:
        both = zip(self.weights, self.parts, strict=True)
        return " | ".join(f"{format_percent(weight)} {part}" for weight, part in both)

    def _draw(self, rng: np.random.Generator, n: int) -> Floats:
        chosen = np.searchsorted(np.cumsum(self.weights[:-1]), rng.random(n), side="right")
        return np.stack([part._draw(rng, n) for part in self.parts])[chosen, np.arange(n)]


def _check_parts(parts: tuple[Distribution, ...], *kinds: type) -> None:
    """Raise SpecError if a string, which has no brackets, can't express this nesting."""
    for part in parts:
        if not isinstance(part, kinds):
            raise SpecError(f"{type(part).__name__} must not be nested here, got {str(part)!r}")
