# SPDX-License-Identifier: BSD-3-Clause
"""Extract the computation times from a trace, to simulate with them again.

A trace holds the full computation time of every finished gradient. For a cancelled one it holds
only the time until it was cancelled. Such a censored time is completed with a random draw from the
longer times of the same worker, including completed ones, longest first (the order of Kaplan and
Meier). If the worker has no longer time, the draw is from the finished times of all workers; if
there is none either, only the lower bound is known and used. Both cases are counted, so that a
report can say how many times were drawn and how many are too optimistic.

If the run had a barrier, so that every gradient was for the next update, all workers began each
version together. Then the times are also kept by version, so that they can be drawn together: a
slow network or a busy machine slows down several workers at once, and independent draws would hide
that. A cancelled worker notices this a little later, and begins the next version a little after the
others; that delay belongs to its next time.

If the new simulation has no network of its own, the time that parameters and gradients spent in
transit in the recording counts as computation time.
"""

from bisect import bisect_right, insort
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from paceline.core.events import Fate
from paceline.errors import TraceError
from paceline.latency import Recorded, TimeStream
from paceline.trace.schema import Gradient, Restored, Trace, Update

__all__ = ["UPDATES_MIN", "Recording", "Replayed", "recorded_times", "recording_by_version"]

Floats = NDArray[np.float64]
Seen = tuple[float, bool]  # a computation time, and whether it was finished
Version = tuple[int, int]  # how often the run was restored before, and the version

UPDATES_MIN = 30  # to plan from; with fewer, one slow update changes the advice
ROUNDING_S = 1e-9  # smaller differences between times are rounding errors
CANCELLED_MAX = 0.02  # share of the computations; a run that cancels fewer hides nothing
LONGER = 1 + 1e-9  # a censored time exceeds its bound by at least this factor


@dataclass(frozen=True, slots=True)
class Recording:
    """The computation times of a trace, in order, by worker; workers are renumbered from 0."""

    times: dict[int, Floats]
    drawn: int  # how many were cancelled in the trace, and completed by a random draw
    bounds: int  # how many were cancelled after a longer time than any gradient took
    by_version: dict[int, Floats] | None = None
    """The time of each worker in each version, since it was opened; None: the run had no barrier.

    A worker that took no part in a version, because it was late or dead, has one of its other
    times.
    """

    finished: int | None = None
    """How many workers usually finished a version; None: nearly all, or the run had no barrier.

    If a run cancels late work, nobody knows how long the others would have taken.
    """

    @property
    def total(self) -> int:
        """The number of computation times."""
        return sum(len(t) for t in self.times.values())

    def model(self) -> Recorded:
        """Return a model that draws from these times, whole versions if it can."""
        if self.by_version is None:
            return Recorded(self.times)
        return Recorded(self.by_version, together=True)

    def left_to_chance(self) -> str:
        """Return a sentence on how far these times are measured, drawn or only bounds."""
        if not self.drawn and not self.bounds:
            return f"all {self.total} computation times are as recorded"
        words = f"{self.drawn + self.bounds} of {self.total} computation times were cut short by "
        words += f"cancellation; {self.drawn} are drawn from longer ones"
        if self.bounds:
            verb = "is" if self.bounds == 1 else "are"
            words += (
                f", and {self.bounds} {verb} only known to be longer than any finished one, so "
                "waiting for more workers than the recording did looks better than it is"
            )
        return words


def recorded_times(trace: Trace, seed: int, *, with_travel: bool) -> Recording:
    """Return the computation times of all workers; raise `TraceError` if there are none.

    `with_travel`: include the time that the recorded network added.
    """
    seen: dict[int, list[Seen]] = defaultdict(list)
    versions: dict[int, list[Version]] = defaultdict(list)
    began_after: dict[int, list[float]] = defaultdict(list)
    opened = _opened(trace) if with_travel and trace.header.late == "cancel" else {}
    for gradient, version in _with_versions(trace):
        whole = gradient.fate is not Fate.CANCELLED
        took_s = _took(gradient, with_travel)
        # Work that was cancelled before it started has no computation time.
        if gradient.fate is not Fate.DUPLICATE and (whole or took_s > 0):
            seen[gradient.worker].append((took_s, whole))
            versions[gradient.worker].append(version)
            after_s = gradient.asked_at - opened.get(version, gradient.asked_at)
            began_after[gradient.worker].append(max(0.0, after_s))
    if not any(whole for own in seen.values() for _, whole in own):
        raise TraceError("the trace has no finished gradient, so no computation time is known")
    rng = np.random.default_rng(seed)
    workers = sorted(seen)
    recording = _completed([seen[worker] for worker in workers], rng)
    since_opened = {
        i: recording.times[i] + np.array(began_after[worker]) for i, worker in enumerate(workers)
    }
    by_version = _by_version(trace, since_opened, [versions[worker] for worker in workers], rng)
    if by_version is None:
        return recording
    return replace(recording, by_version=by_version, finished=_finished(seen, versions))


def recording_by_version(
    rows: Sequence[Sequence[float | None]], rng: np.random.Generator
) -> Recording:
    """Return the times of a table with one row per version and one column per worker.

    None means that the worker was cancelled when the last of the others arrived, so each row and
    each column must have a time.
    """
    last = [max(time for time in row if time is not None) for row in rows]
    seen: list[list[Seen]] = [
        [
            (end, False) if time is None else (time, True)
            for time, end in zip(own, last, strict=True)
        ]
        for own in zip(*rows, strict=True)
    ]
    recording = _completed(seen, rng)
    known = [sum(time is not None for time in row) for row in rows]
    return replace(recording, by_version=recording.times, finished=_usual(known, recording.total))


def _completed(seen: list[list[Seen]], rng: np.random.Generator) -> Recording:
    """Return the times of each worker, after completing the censored ones."""
    finished = np.array([t for own in seen for t, whole in own if whole])
    completed = [_complete(own, finished, rng) for own in seen]
    return Recording(
        times={worker: times for worker, (times, _, _) in enumerate(completed)},
        drawn=sum(drawn for _, drawn, _ in completed),
        bounds=sum(bounds for _, _, bounds in completed),
    )


def _with_versions(trace: Trace) -> Iterator[tuple[Gradient, Version]]:
    """Yield all gradients with their versions; a restored run makes some versions again."""
    restored = 0
    for record in trace.records:
        if isinstance(record, Restored):
            restored += 1
        elif isinstance(record, Gradient):
            yield record, (restored, record.version)


def _opened(trace: Trace) -> dict[Version, float]:
    """Return when the update was made that opened each version."""
    restored = 0
    opened = {}
    for record in trace.records:
        if isinstance(record, Restored):
            restored += 1
        elif isinstance(record, Update):
            opened[restored, record.update] = record.t
    return opened


def _by_version(
    trace: Trace,
    times: dict[int, Floats],
    versions: list[list[Version]],
    rng: np.random.Generator,
) -> dict[int, Floats] | None:
    """Return the times of each worker, one for each version; None if there is no barrier."""
    accepted = [(g, v) for g, v in _with_versions(trace) if g.fate is Fate.ACCEPTED]
    has_repeats = len({(g.worker, v) for g, v in accepted}) < len(accepted)
    if has_repeats or any(g.staleness for g, _ in accepted):
        return None
    rows = {version: row for row, version in enumerate(sorted({v for _, v in accepted}))}
    table = {}
    for worker, own in times.items():
        column = rng.choice(own, size=len(rows))
        for version, took_s in zip(versions[worker], own.tolist(), strict=True):
            if version in rows:
                column[rows[version]] = took_s
        table[worker] = column
    return table


def _finished(seen: dict[int, list[Seen]], versions: dict[int, list[Version]]) -> int | None:
    """Return how many workers usually finished a version; None: nearly all that began did."""
    whole: Counter[Version] = Counter()
    for worker, own in seen.items():
        whole.update(v for v, (_, is_whole) in zip(versions[worker], own, strict=True) if is_whole)
    return _usual(list(whole.values()), sum(map(len, seen.values())))


def _usual(finished: list[int], began: int) -> int | None:
    """Return the median of the numbers that finished a version; None: nearly all that began."""
    if began - sum(finished) <= CANCELLED_MAX * began:
        return None
    return int(np.median(finished))


def _complete(
    own: list[Seen], finished: Floats, rng: np.random.Generator
) -> tuple[Floats, int, int]:
    """Complete one worker's censored times; return all times and the counts of both cases."""
    times = np.array([t for t, _ in own])
    whole = np.array([is_whole for _, is_whole in own])
    known = sorted(times[whole].tolist())
    drawn = bounds = 0
    for place in sorted(np.flatnonzero(~whole), key=lambda i: -times[i]):
        bound = times[place] * LONGER
        longer = known[bisect_right(known, bound) :] or finished[finished > bound]
        if len(longer):
            times[place] = rng.choice(longer)
            drawn += 1
        else:
            times[place] = bound
            bounds += 1
        insort(known, float(times[place]))
    return times, drawn, bounds


def _took(gradient: Gradient, with_travel: bool) -> float:
    travel_s = gradient.t - gradient.asked_at - gradient.compute_s
    is_real = with_travel and travel_s > ROUNDING_S
    return gradient.compute_s + (travel_s if is_real else 0.0)


@dataclass(frozen=True, slots=True, eq=False)
class Replayed:
    """Each worker's k-th computation takes as long as its k-th in the recording.

    A worker that needs more times than were recorded continues with blocks drawn from its own.
    """

    recording: Recording

    @property
    def is_stationary(self) -> bool:
        """Always true: a time depends on its position in the sequence, not on when it starts."""
        return True

    def mean(self, worker: int) -> float:
        """Return the mean of the worker's recorded times."""
        return Recorded(self.recording.times).mean(worker)

    def stream(self, worker: int, seed: int) -> TimeStream:
        """Return the worker's recorded times, followed by drawn ones."""
        beyond = Recorded(self.recording.times).stream(worker, seed)
        blocks = iter([self.recording.times[worker]])

        def draw(rng: np.random.Generator) -> Floats:
            del rng
            recorded = next(blocks, None)
            return beyond.draws(256) if recorded is None else recorded

        return TimeStream(draw, worker, seed)

    def __str__(self) -> str:
        return "replayed from a trace"
