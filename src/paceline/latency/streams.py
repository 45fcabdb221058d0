# SPDX-License-Identifier: BSD-3-Clause
"""The computation times of one worker, one after the other, drawn from a seed.

`TimeStream` is that sequence, and a `TimeModel` makes it: `Latency` from a distribution, factors
and slow `Phases` that last, `Recorded` from a recording.

Theory of operation: the k-th time of a worker depends on the seed, the worker and k only. Times
are drawn in blocks of a fixed size from a generator of the worker's own, and each kind of phases
has a generator of its own, so that adding phases multiplies the same times. Nothing is drawn, and
no generator is made, before the first question.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice, pairwise
from math import inf, isqrt, prod
from typing import Protocol

import numpy as np

from paceline.errors import SpecError
from paceline.latency.distributions import LONGEST, Distribution, Floats
from paceline.latency.text import format_ids, format_number, format_seconds
from paceline.spec import RunSpec

__all__ = ["Latency", "Phases", "Recorded", "TimeModel", "TimeStream"]

Draw = Callable[[np.random.Generator], Floats]

# How many times are drawn at once. It is part of what a seed means: never change it.
_BLOCK = 256

_FACTOR_MAX = 1e6
_WORKER_MAX = 999_999

# A worker not asked for this many cycles of slow and normal has forgotten its state (the
# correlation is below exp(-4000)), so it is drawn afresh instead of walked through.
_FORGOTTEN_CYCLES = 1000


@dataclass(frozen=True, slots=True)
class Phases:
    """Slow phases that last: a worker alternates between normal and slow, at random.

    Both last exponentially long. The state at the first question is drawn from the stationary
    distribution, and every worker has its own alternation.
    """

    factor: float  # a computation begun in a slow phase takes so many times as long, to its end
    lasting: float  # the mean length of a slow phase, in seconds
    every: float  # the mean length of what is between two slow phases, in seconds
    workers: tuple[int, ...] | None = None  # those that have such phases, ascending; None: all

    def __post_init__(self) -> None:
        object.__setattr__(self, "factor", _check_factor(self.factor))
        for name in ("lasting", "every"):
            value = float(getattr(self, name))
            if not 0 < value <= LONGEST:
                raise SpecError(f"{name} must be > 0 and <= {LONGEST:g}, got {value}")
            object.__setattr__(self, name, value)
        if self.workers is not None:
            if not self.workers:
                raise SpecError("workers must not be empty; leave them out for all")
            workers = tuple(sorted({_check_worker(worker) for worker in self.workers}))
            object.__setattr__(self, "workers", workers)

    @property
    def share(self) -> float:
        """The share of the time that a worker spends in slow phases."""
        return self.lasting / (self.lasting + self.every)

    def is_on(self, worker: int) -> bool:
        """Whether this worker has such phases at all."""
        if self.workers is None:
            return True
        place = bisect_left(self.workers, worker)
        return place < len(self.workers) and self.workers[place] == worker

    def __str__(self) -> str:
        lengths = f"for {format_seconds(self.lasting)} every {format_seconds(self.every)}"
        where = "" if self.workers is None else f" on {format_ids(self.workers)}"
        return f"phases x{format_number(self.factor)} {lengths}{where}"


class TimeStream:
    """The computation times of one worker from one seed; made by a `TimeModel`."""

    __slots__ = ("_times", "_walks")

    def __init__(self, draw: Draw, worker: int, seed: int, phases: Sequence[Phases] = ()) -> None:
        """`draw` gives the next block, whose size must always be the same."""
        _check_worker(worker)
        if seed < 0:
            raise SpecError(f"seed must be >= 0, got {seed}")
        self._times = chain.from_iterable(_blocks(draw, worker, seed))
        # Numbered among its own, so that the phases of other workers change nothing here.
        own = [phase for phase in phases if phase.is_on(worker)]
        self._walks = tuple(_Walk(phase, (worker, i), seed) for i, phase in enumerate(own, 1))

    def take(self, start: float) -> float:
        """Return the next time, for a computation begun at `start`; starts never decrease."""
        seconds = next(self._times)
        for walk in self._walks:
            seconds *= walk.factor_at(start)
        return seconds

    def draws(self, count: int) -> Floats:
        """Return the next `count` times at once, the same numbers that `take` would give.

        Raises SpecError if the worker has slow phases: then a time depends on when it is begun.
        """
        if self._walks:
            raise SpecError("times with slow phases depend on their starts; use take(start)")
        return np.fromiter(islice(self._times, count), np.float64, count)


class TimeModel(Protocol):
    """What says how long the workers of a run take."""

    @property
    def is_stationary(self) -> bool:
        """Whether a time does not depend on when the computation begins."""

    def stream(self, worker: int, seed: int) -> TimeStream:
        """Return the worker's times from the first one on."""

    def mean(self, worker: int) -> float:
        """Return the mean time of a computation begun at a random moment; may be inf."""


@dataclass(frozen=True, slots=True)
class Latency:
    """How long workers take by a distribution, their factors and slow phases; a `TimeModel`."""

    base: Distribution
    factors: tuple[tuple[int, float], ...] = ()  # (worker, how many times as long it takes)
    phases: tuple[Phases, ...] = ()  # independent; where several are on, their factors multiply

    def __post_init__(self) -> None:
        factors = sorted((_check_worker(w), _check_factor(factor)) for w, factor in self.factors)
        for (worker, one), (again, other) in pairwise(factors):
            if worker == again:
                raise SpecError(f"worker {worker} must have one factor, got {one} and {other}")
        object.__setattr__(self, "factors", tuple(factors))

    @property
    def is_stationary(self) -> bool:
        """Whether a time does not depend on when the computation begins: no phases."""
        return not self.phases

    def validate(self, spec: RunSpec) -> None:
        """Raise `SpecError` if it speaks of workers that the run does not have."""
        named = [worker for worker, _ in self.factors]
        named += [worker for phase in self.phases for worker in phase.workers or ()]
        for worker in named:
            if worker >= spec.workers:
                raise SpecError(
                    f"'{self}' speaks of worker {worker}; the workers are 0 to {spec.workers - 1}"
                )

    def factor(self, worker: int) -> float:
        """Return how many times as long this worker always takes."""
        place = bisect_left(self.factors, (worker, 0.0))
        found = self.factors[place : place + 1]
        return found[0][1] if found and found[0][0] == worker else 1.0

    def mean(self, worker: int) -> float:
        """Return the mean time of a computation begun at a random moment; may be inf."""
        slower = (1 + p.share * (p.factor - 1) for p in self.phases if p.is_on(worker))
        return self.base.mean() * self.factor(worker) * prod(slower)

    def stream(self, worker: int, seed: int) -> TimeStream:
        """Return the worker's times from the first one on."""
        base, factor = self.base, self.factor(worker)
        return TimeStream(lambda rng: base.sample(rng, _BLOCK) * factor, worker, seed, self.phases)

    def __str__(self) -> str:
        groups: dict[float, list[int]] = {}
        for worker, factor in self.factors:
            groups.setdefault(factor, []).append(worker)
        slower = [f"{format_ids(ids)} x{format_number(f)}" for f, ids in groups.items()]
        return "; ".join([str(self.base), *slower, *map(str, self.phases)])


@dataclass(frozen=True, slots=True, eq=False)
class Recorded:
    """The times of a recording, drawn again by a circular block bootstrap; a `TimeModel`.

    Each worker draws from its own sequence: contiguous blocks from random places, read on
    cyclically, so that slowness which lasted in the recording lasts again (Politis & Romano 1992).
    """

    times: Mapping[int, Floats]  # for each worker its times in their order; copied
    block: int | None = None  # computations in a block; None: the square root of the worker's

    def __post_init__(self) -> None:
        if self.block is not None and self.block < 1:
            raise SpecError(f"block must be >= 1, got {self.block}")
        if not self.times:
            raise SpecError("a recording must have at least one worker, got none")
        copies = {w: np.array(self.times[w], dtype=np.float64) for w in sorted(self.times)}
        for worker, times in copies.items():
            if times.ndim != 1 or not times.size:
                raise SpecError(f"worker {worker} must have a list of times, got {times.tolist()}")
            wrong = times[~(np.isfinite(times) & (times >= 0))]
            if wrong.size:
                raise SpecError(f"times of worker {worker} must be >= 0 and finite, got {wrong[0]}")
            times.setflags(write=False)
        object.__setattr__(self, "times", copies)

    @property
    def is_stationary(self) -> bool:
        """Always true: a recording knows the order of the times and not their moments."""
        return True

    def mean(self, worker: int) -> float:
        """Return the mean of the worker's recorded times."""
        return float(self._of(worker).mean())

    def stream(self, worker: int, seed: int) -> TimeStream:
        """Return the worker's times from the first one on; raises SpecError if not recorded."""
        times = self._of(worker)
        length = self.block or isqrt(times.size)
        # Whole blocks, together about as many times as the other models draw at once.
        offsets, count = np.arange(length), -(-_BLOCK // length)

        def draw(rng: np.random.Generator) -> Floats:
            begins = rng.integers(times.size, size=(count, 1))
            return np.take(times, (begins + offsets).ravel(), mode="wrap")

        return TimeStream(draw, worker, seed)

    def __str__(self) -> str:
        return f"the recorded times of {format_ids(self.times)}"

    def _of(self, worker: int) -> Floats:
        if worker not in self.times:
            there = format_ids(self.times)
            raise SpecError(f"worker {worker} is not in the recording, which has {there}")
        return self.times[worker]


class _Walk:
    """One worker's alternation between normal and slow, asked forward in time."""

    __slots__ = ("_key", "_phases", "_rng", "_seed", "_slow", "_until")

    def __init__(self, phases: Phases, key: tuple[int, int], seed: int) -> None:
        self._phases = phases
        self._key = key
        self._seed = seed
        self._rng: np.random.Generator | None = None
        self._slow = False
        self._until = -inf  # the present state ends here; before the first question, long ago

    def factor_at(self, start: float) -> float:
        if start >= self._until:
            self._advance(start)
        return self._phases.factor if self._slow else 1.0

    def _advance(self, start: float) -> None:
        phases = self._phases
        rng = self._rng = self._rng or _generator(self._seed, self._key)
        gap = start - self._until
        if gap > _FORGOTTEN_CYCLES * (phases.lasting + phases.every):
            # As if the opposite of the state that is drawn ended just now. Exponential lengths
            # have no memory, so what is left of this state is as long as a whole one.
            self._slow = rng.random() >= phases.share
            gap = 0.0
        # Counting the gap down, not the time up, ends even where the lengths are smaller than
        # the resolution of a large start.
        while gap >= 0:
            self._slow = not self._slow
            gap -= rng.exponential(phases.lasting if self._slow else phases.every)
        self._until = start - gap


def _blocks(draw: Draw, worker: int, seed: int) -> Iterator[list[float]]:
    rng = _generator(seed, (worker, 0))
    while True:
        yield draw(rng).tolist()


def _generator(seed: int, key: tuple[int, int]) -> np.random.Generator:
    # A spawn key, and not a list as the seed: [1] and [1, 0] would seed the same generator, and
    # so would one large number and two small ones.
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=key))


def _check_worker(worker: int) -> int:
    if not 0 <= worker <= _WORKER_MAX:
        raise SpecError(f"a worker must be an id between 0 and {_WORKER_MAX}, got {worker}")
    return worker


def _check_factor(factor: float) -> float:
    if not 0 < factor <= _FACTOR_MAX:
        raise SpecError(f"factor must be > 0 and <= {_FACTOR_MAX:g}, got {factor}")
    return float(factor)
