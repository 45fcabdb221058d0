# SPDX-License-Identifier: BSD-3-Clause
"""Sequences of computation times of a worker, drawn from a seed.

A `TimeStream` is such a sequence, and a `TimeModel` creates it: `Latency` from a distribution,
factors and slow `Phases`, `Recorded` from a recording.

Theory of operation: the k-th time of a worker depends only on the seed, the worker and k. Times are
drawn in blocks of a fixed size from the worker's own generator. Each kind of phases has a generator
of its own, so adding phases multiplies the same times. No generator is created, and nothing is
drawn, before the first time is requested. What workers share, such as phases that slow them down
together, is drawn from a generator that doesn't depend on the worker.
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

# How many times are drawn at once. Changing it would change the times that a seed gives.
_BLOCK = 256

_FACTOR_MAX = 1e6
_WORKER_MAX = 999_999

_SHARED = _WORKER_MAX + 1  # instead of a worker, in the key of a generator

# After this many cycles of slow and normal the state is independent of the last known one (the
# correlation is below exp(-4000)), so it is drawn again instead of simulated step by step.
_FORGOTTEN_CYCLES = 1000


@dataclass(frozen=True, slots=True)
class Phases:
    """Slow phases: a worker alternates between normal and slow, at random.

    The lengths of both are exponential. The initial state is drawn from the stationary
    distribution. Workers alternate independently, unless they are slow `together`.
    """

    factor: float  # a computation started in a slow phase takes this many times as long
    lasting: float  # the mean length of a slow phase, in seconds
    every: float  # the mean time between two slow phases, in seconds
    workers: tuple[int, ...] | None = None  # the workers concerned, ascending; None: all
    together: bool = False  # whether all of these workers are slow at the same times

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
        """Return whether this worker has these phases."""
        if self.workers is None:
            return True
        index = bisect_left(self.workers, worker)
        return index < len(self.workers) and self.workers[index] == worker

    def __str__(self) -> str:
        lengths = f"for {format_seconds(self.lasting)} every {format_seconds(self.every)}"
        where = "" if self.workers is None else f" on {format_ids(self.workers)}"
        together = " together" if self.together else ""
        return f"phases x{format_number(self.factor)} {lengths}{where}{together}"


class TimeStream:
    """The computation times of one worker for one seed; created by a `TimeModel`."""

    __slots__ = ("_times", "_walks")

    def __init__(
        self,
        draw: Draw,
        worker: int,
        seed: int,
        phases: Sequence[Phases] = (),
        *,
        together: bool = False,
    ) -> None:
        """`draw` returns the next block; all blocks must have the same size.

        `together`: all workers draw the same random numbers.
        """
        _check_worker(worker)
        if seed < 0:
            raise SpecError(f"seed must be >= 0, got {seed}")
        self._times = chain.from_iterable(_blocks(draw, _SHARED if together else worker, seed))
        # Numbered per worker, so that phases of other workers change nothing here.
        own = [phase for phase in phases if phase.is_on(worker) and not phase.together]
        walks: list[_Walk | _SharedWalk]
        walks = [_Walk(phase, (worker, i), seed) for i, phase in enumerate(own, 1)]
        shared = [phase for phase in phases if phase.together]
        walks += [
            _SharedWalk(phase, i, seed) for i, phase in enumerate(shared) if phase.is_on(worker)
        ]
        self._walks = tuple(walks)

    def take(self, start: float) -> float:
        """Return the next time, for a computation that starts at `start`; never go back in time."""
        seconds = next(self._times)
        for walk in self._walks:
            seconds *= walk.factor_at(start)
        return seconds

    def draws(self, count: int) -> Floats:
        """Return the next `count` times, the same numbers that `take` would return.

        Raises SpecError if the worker has slow phases: its times then depend on when it starts.
        """
        if self._walks:
            raise SpecError("times with slow phases depend on their starts; use take(start)")
        return np.fromiter(islice(self._times, count), np.float64, count)


class TimeModel(Protocol):
    """How long the workers of a run take."""

    @property
    def is_stationary(self) -> bool:
        """Whether a time doesn't depend on when the computation starts."""

    def stream(self, worker: int, seed: int) -> TimeStream:
        """Return the sequence of the worker's times."""

    def mean(self, worker: int) -> float:
        """Return the mean time of a computation that starts at a random time; may be inf."""


@dataclass(frozen=True, slots=True)
class Latency:
    """A `TimeModel` of a distribution, factors of single workers, and slow phases."""

    base: Distribution
    factors: tuple[tuple[int, float], ...] = ()  # (worker, how many times as long it takes)
    phases: tuple[Phases, ...] = ()  # independent; the factors of simultaneous ones multiply

    def __post_init__(self) -> None:
        factors = sorted((_check_worker(w), _check_factor(factor)) for w, factor in self.factors)
        for (worker, one), (again, other) in pairwise(factors):
            if worker == again:
                raise SpecError(f"worker {worker} must have one factor, got {one} and {other}")
        object.__setattr__(self, "factors", tuple(factors))

    @property
    def is_stationary(self) -> bool:
        """Whether there are no slow phases, so that times don't depend on when they start."""
        return not self.phases

    def validate(self, spec: RunSpec) -> None:
        """Raise `SpecError` if it names workers that the run doesn't have."""
        named = [worker for worker, _ in self.factors]
        named += [worker for phase in self.phases for worker in phase.workers or ()]
        for worker in named:
            if worker >= spec.workers:
                raise SpecError(
                    f"'{self}' names worker {worker}; the workers are 0 to {spec.workers - 1}"
                )

    def factor(self, worker: int) -> float:
        """Return how many times as long this worker always takes."""
        index = bisect_left(self.factors, (worker, 0.0))
        found = self.factors[index : index + 1]
        return found[0][1] if found and found[0][0] == worker else 1.0

    def mean(self, worker: int) -> float:
        """Return the mean time of a computation that starts at a random time; may be inf."""
        slower = (1 + p.share * (p.factor - 1) for p in self.phases if p.is_on(worker))
        return self.base.mean() * self.factor(worker) * prod(slower)

    def stream(self, worker: int, seed: int) -> TimeStream:
        """Return the sequence of the worker's times."""
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
    """A `TimeModel` that resamples recorded times with a circular block bootstrap.

    Each worker draws contiguous blocks of its own sequence at random positions, wrapping around at
    the end, so that slow periods of the recording stay together (Politis & Romano 1992). With
    `together`, all workers draw the same positions, so slowness that they share stays, too.
    """

    times: Mapping[int, Floats]  # the times of each worker, in order; copied
    block: int | None = None  # times per block; None: the square root of the worker's count
    together: bool = False  # the k-th times of all workers were measured at the same time

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
        sizes = [times.size for times in copies.values()]
        if self.together and min(sizes) < max(sizes):
            raise SpecError(
                "workers that were recorded together must have equally many times, got "
                f"{min(sizes)} to {max(sizes)}"
            )
        object.__setattr__(self, "times", copies)

    @property
    def is_stationary(self) -> bool:
        """Always true: a recording has the order of the times, not when they started."""
        return True

    def mean(self, worker: int) -> float:
        """Return the mean of the worker's recorded times."""
        return float(self.of(worker).mean())

    def stream(self, worker: int, seed: int) -> TimeStream:
        """Return the sequence of the worker's times; raise SpecError if it wasn't recorded."""
        times = self.of(worker)
        length = self.block or isqrt(times.size)
        # Whole blocks, in total about as many times as the other models draw at once.
        offsets, count = np.arange(length), -(-_BLOCK // length)

        def draw(rng: np.random.Generator) -> Floats:
            begins = rng.integers(times.size, size=(count, 1))
            return np.take(times, (begins + offsets).ravel(), mode="wrap")

        return TimeStream(draw, worker, seed, together=self.together)

    def __str__(self) -> str:
        return f"the recorded times of {format_ids(self.times)}"

    def of(self, worker: int) -> Floats:
        """Return the worker's recorded times; raise SpecError if it wasn't recorded."""
        if worker not in self.times:
            recorded = format_ids(self.times)
            raise SpecError(f"worker {worker} is not in the recording, which has {recorded}")
        return self.times[worker]


class _Walk:
    """One worker's alternation between normal and slow, evaluated forward in time."""

    __slots__ = ("_key", "_phases", "_rng", "_seed", "_slow", "_until")

    def __init__(self, phases: Phases, key: tuple[int, int], seed: int) -> None:
        self._phases = phases
        self._key = key
        self._seed = seed
        self._rng: np.random.Generator | None = None
        self._slow = False
        self._until = -inf  # when the current state ends; -inf before the first call

    def factor_at(self, start: float) -> float:
        if start >= self._until:
            self._advance(start)
        return self._phases.factor if self._slow else 1.0

    def _advance(self, start: float) -> None:
        phases = self._phases
        rng = self._rng = self._rng or _generator(self._seed, self._key)
        gap = start - self._until
        if gap > _FORGOTTEN_CYCLES * (phases.lasting + phases.every):
            # As if the opposite of the drawn state ended just now. Exponential lengths are
            # memoryless, so the rest of a state is as long as a whole one.
            self._slow = rng.random() >= phases.share
            gap = 0.0
        # Counting down the gap, not up the time, terminates even if the lengths are smaller than
        # the resolution of a large `start`.
        while gap >= 0:
            self._slow = not self._slow
            gap -= rng.exponential(phases.lasting if self._slow else phases.every)
        self._until = start - gap


class _SharedWalk:
    """An alternation that is the same for all workers, whenever each of them starts.

    So the state at a time must not depend on the starts before: time is divided into segments, each
    with a generator of its own.
    """

    __slots__ = ("_key", "_length", "_phases", "_rng", "_seed", "_segment", "_slow", "_until")

    def __init__(self, phases: Phases, number: int, seed: int) -> None:
        self._phases = phases
        self._key = (_SHARED, number + 1)
        self._seed = seed
        self._length = _FORGOTTEN_CYCLES * (phases.lasting + phases.every)
        self._segment = -1
        self._rng: np.random.Generator  # of the segment
        self._slow = False
        self._until = 0.0  # when the current state ends, in seconds after the segment began

    def factor_at(self, start: float) -> float:
        segment, since = divmod(start, self._length)
        if segment != self._segment:
            self._segment = int(segment)
            self._rng = _generator(self._seed, (*self._key, self._segment))
            self._slow = self._rng.random() < self._phases.share
            self._until = self._draw()
        while since >= self._until:
            self._slow = not self._slow
            self._until += self._draw()
        return self._phases.factor if self._slow else 1.0

    def _draw(self) -> float:
        return self._rng.exponential(self._phases.lasting if self._slow else self._phases.every)


def _blocks(draw: Draw, worker: int, seed: int) -> Iterator[list[float]]:
    rng = _generator(seed, (worker, 0))
    while True:
        yield draw(rng).tolist()


def _generator(seed: int, key: tuple[int, ...]) -> np.random.Generator:
    # Use a spawn key, not a list as the seed: [1] and [1, 0] would seed the same generator, and so
    # would one large number and two small ones.
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=key))


def _check_worker(worker: int) -> int:
    if not 0 <= worker <= _WORKER_MAX:
        raise SpecError(f"a worker must be an id between 0 and {_WORKER_MAX}, got {worker}")
    return worker


def _check_factor(factor: float) -> float:
    if not 0 < factor <= _FACTOR_MAX:
        raise SpecError(f"factor must be > 0 and <= {_FACTOR_MAX:g}, got {factor}")
    return float(factor)
