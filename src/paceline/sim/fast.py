# SPDX-License-Identifier: BSD-3-Clause
"""A vectorized simulator for runs in which only computation times matter; it is many times faster.

Without a network, faults and slow phases, four rules can be computed from the times alone:

    sync, backup      a version closes at its N-th arrival; a round is a few vector operations
    async, softsync   no worker waits, so its arrivals are the cumulative sum of its own times

The traces equal those of the shell, record by record; a test checks this. Events at the same time
happen in the order in which the work was assigned, as in the shell. Where this order isn't enough,
because late work ends at the same time as something else or computations take no time, `Tie` is
raised and the caller uses the shell. The planner uses `version_durations`, the same recurrence for
many N at once.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import repeat

import numpy as np
from numpy.typing import NDArray

from paceline.core.events import Fate
from paceline.core.policies import Async, SoftSync
from paceline.core.policy import Policy
from paceline.latency import TimeModel
from paceline.spec import Late, RunSpec
from paceline.trace.schema import Ended, Gradient, Joined, Record, Resumed, Update

__all__ = ["Tie", "barrier_records", "draw_times", "free_records", "version_durations"]

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class Tie(Exception):
    """Two events happen at the same time, and their order can't be reproduced."""


def draw_times(times: TimeModel, workers: int, count: int, seed: int) -> Floats:
    """Return the first `count` computation times of each worker, one row per worker."""
    return np.stack([times.stream(w, seed).draws(count) for w in range(workers)])


# --------------------------------------------------------------------------------------- barriers


@dataclass(frozen=True, slots=True)
class Round:
    """One version under a rule with a barrier, for several N at once: rows are N, columns workers.

    A worker that is late for an earlier version starts this one when it is free, if the version is
    still open then.
    """

    number: int  # of the update that closes it
    opened: Floats  # by N
    began: Floats  # when each worker starts, or would start, its work on this version
    arrives: Floats
    closed: Floats  # by N
    turn: Ints  # index of the worker's computation, from 0
    takes_part: NDArray[np.bool_]  # whether the worker starts before the version is closed


def barrier_rounds(
    times: Floats, needed: Ints, late: Late, *, by_version: bool = False
) -> Iterator[Round]:
    """Yield the versions of `backup`, for each N in `needed`, one after the other.

    A worker's computations take its times one after the other. With `by_version`, one that begins
    in the k-th version takes the k-th time, so that times that were measured together stay so.
    """
    workers, rounds = times.shape
    plans = np.arange(len(needed))
    columns = np.arange(workers)
    opened = np.zeros(len(needed))
    free_at = np.zeros((len(needed), workers))
    turn = np.zeros((len(needed), workers), dtype=np.int64)
    for number in range(1, rounds + 1):
        began = np.maximum(free_at, opened[:, None])
        arrives = began + (times[:, number - 1] if by_version else times[columns, turn])
        closed = np.sort(arrives, axis=1)[plans, needed - 1]
        takes_part = began <= closed[:, None]
        yield Round(number, opened, began, arrives, closed, turn, takes_part)
        turn = turn + takes_part
        if late == "finish":
            free_at = np.where(takes_part, np.maximum(arrives, closed[:, None]), free_at)
        else:
            free_at = np.broadcast_to(closed[:, None], free_at.shape)
        opened = closed


def version_durations(
    times: Floats, needed: Ints, late: Late, *, by_version: bool = False
) -> Floats:
    """Return how long each version lasts: one row per version, one column per N in `needed`.

    `by_version`: as for `barrier_rounds`.
    """
    if late == "cancel":  # all workers start together, so this is the N-th order statistic
        return np.asarray(np.sort(times.T, axis=1)[:, needed - 1])
    rounds = barrier_rounds(times, needed, late, by_version=by_version)
    closed = np.stack([each.closed for each in rounds])
    return np.diff(closed, axis=0, prepend=0.0)


def barrier_records(
    times: Floats, needed: int, spec: RunSpec, batch: int, on_update: Callable[[int], None]
) -> list[Record]:
    """Return the records of `backup:W-needed` for as many updates as there are times."""
    workers, rounds = times.shape
    records = _joined(spec, needed)
    version = np.zeros(workers, dtype=np.int64)  # of each worker's current work
    asked_at = np.zeros(workers)
    rank = np.arange(workers)  # in the order in which they were asked
    closed = 0.0
    for update, each in enumerate(barrier_rounds(times, np.array([needed]), spec.late), start=1):
        closed, takes_part = float(each.closed[0]), each.takes_part[0]
        reports = _reports(each, needed, version, asked_at, rank)
        # Only late work that is finished can end at the same time as something else.
        is_close = np.count_nonzero(each.arrives[0] <= closed) > needed or reports.has_ties()
        if is_close and spec.late == "finish" and needed < workers:
            raise Tie
        staleness = update - 1 - reports.version
        fates = [Fate.LATE if stale else Fate.ACCEPTED for stale in staleness.tolist()]
        compute_s = times[reports.worker, reports.turn - 1]
        records += reports.records(fates, staleness, compute_s, batch)
        contributors = tuple(reports.worker[staleness == 0].tolist())
        records.append(Update(closed, update, contributors, needed))
        on_update(update)
        version[takes_part] = update - 1
        asked_at[takes_part] = each.began[0][takes_part]
        accepted = reports.worker[staleness == 0]
        others = np.flatnonzero(~np.isin(np.arange(workers), accepted))
        if spec.late == "cancel" or update == rounds:
            turn = (each.turn[0] + takes_part)[others]
            t = np.full(len(others), closed)
            work = _Columns(t, others, turn, version[others], asked_at[others])
            records += _abandoned(work, update, times[others, turn - 1])
        rank[np.concatenate([accepted, others])] = np.arange(workers)
    records.append(Ended(closed, rounds))
    return records


def _reports(each: Round, needed: int, version: Ints, asked_at: Floats, rank: Ints) -> "_Columns":
    """Return what arrives while a version is open: its gradients, and late ones of earlier ones."""
    began, arrives, turn = each.began[0], each.arrives[0], each.turn[0]
    # Late for an earlier version: reported when the worker is free, when it starts this one.
    late = np.flatnonzero(each.takes_part[0] & (began > each.opened[0]))
    in_time = np.lexsort((rank, arrives))[:needed]
    newest = each.number - 1
    columns = _Columns(
        t=np.concatenate([began[late], arrives[in_time]]),
        worker=np.concatenate([late, in_time]),
        turn=np.concatenate([turn[late], turn[in_time] + 1]),
        version=np.concatenate([version[late], np.full(needed, newest)]),
        asked_at=np.concatenate([asked_at[late], began[in_time]]),
    )
    return columns.take(np.lexsort((rank[columns.worker], columns.t)))


# ----------------------------------------------------------------------------------- free running


def free_records(
    times: TimeModel,
    policy: Async | SoftSync,
    spec: RunSpec,
    batch: int,
    on_update: Callable[[int], None],
) -> list[Record]:
    """Return the records of `softsync`, or of `async`, which makes an update per gradient."""
    per_update = policy.c if isinstance(policy, SoftSync) else 1
    updates = spec.steps or 0
    total = updates * per_update
    arrival, compute_s = _free_arrivals(times, spec, total)
    workers, count = arrival.shape
    order = _in_order(arrival, compute_s, total)
    position = np.full(workers * count, total)  # of each gradient among all arrivals
    position[order] = np.arange(total)
    # A worker is asked when its previous gradient arrives, with the version that this one made.
    asked_at = np.concatenate([np.zeros((workers, 1)), arrival[:, :-1]], axis=1)
    version = np.zeros((workers, count), dtype=np.int64)
    version[:, 1:] = (position.reshape(workers, count)[:, :-1] + 1) // per_update
    accepted = _Columns(
        t=arrival.ravel()[order],
        worker=order // count,
        turn=order % count + 1,
        version=version.ravel()[order],
        asked_at=asked_at.ravel()[order],
    )
    staleness = np.arange(total) // per_update - accepted.version
    gradients = accepted.records(
        [Fate.ACCEPTED] * total, staleness, compute_s.ravel()[order], batch
    )
    records = _joined(spec, min(per_update, workers))
    givers = accepted.worker.tolist()
    for update, scales in enumerate(_scales(policy, staleness.reshape(updates, per_update)), 1):
        part = slice((update - 1) * per_update, update * per_update)
        records += gradients[part]
        time, contributors = gradients[part.stop - 1].t, tuple(givers[part])
        records.append(Update(time, update, contributors, per_update, scales=scales))
        on_update(update)
    end = gradients[-1].t
    turn = np.bincount(accepted.worker, minlength=workers)  # finished, and index of the next
    busy = np.flatnonzero(np.arange(workers) != givers[-1])
    turn = turn[busy]
    work = _Columns(
        np.full(len(busy), end), busy, turn + 1, version[busy, turn], asked_at[busy, turn]
    )
    records += _abandoned(work, updates, compute_s[busy, turn])
    records.append(Ended(end, updates))
    return records


def _scales(policy: Policy, staleness: Ints) -> Iterator[tuple[float, ...] | None]:
    """Yield the scales of each update, given one row of staleness per update; None: all 1."""
    by_staleness = np.array([policy.scale(stale) for stale in range(int(staleness.max()) + 1)])
    if np.all(by_staleness == 1.0):
        return repeat(None, len(staleness))
    scales = by_staleness[staleness]
    is_scaled = np.any(scales != 1.0, axis=1).tolist()
    flat, count = scales.ravel().tolist(), scales.shape[1]  # no nested lists: slow to collect
    return (
        tuple(flat[update * count : (update + 1) * count]) if scaled else None
        for update, scaled in enumerate(is_scaled)
    )


def _in_order(arrival: Floats, compute_s: Floats, total: int) -> Ints:
    """Return the first `total` arrivals as indices into the flat array, in the shell's order.

    Simultaneous arrivals come in the order in which they were asked for, which is the order of the
    arrivals before them; so ties are resolved one after the other.
    """
    if not compute_s.all():
        raise Tie
    count = arrival.shape[1]
    order = np.argsort(arrival, axis=None, kind="stable")
    t = arrival.ravel()[order]
    end = int(np.searchsorted(t, t[total - 1], side="right"))
    order, t = order[:end], t[:end]
    begins = np.flatnonzero(np.diff(t, prepend=-1.0))
    ends = np.append(begins[1:], end)
    if len(begins) < end:
        position = np.empty(arrival.size, dtype=np.int64)
        position[order] = np.arange(end)
        tied = ends - begins > 1
        for i, j in zip(begins[tied].tolist(), ends[tied].tolist(), strict=True):
            group = order[i:j]
            # The first gradients of all workers were asked for in the order of the workers.
            before = np.where(group % count, position[group - 1], group // count - arrival.size)
            order[i:j] = group = group[np.argsort(before)]
            position[group] = np.arange(i, j)
    return order[:total]


def _free_arrivals(times: TimeModel, spec: RunSpec, total: int) -> tuple[Floats, Floats]:
    """Return each worker's arrival and computation times, past the `total`-th arrival of all."""
    count = total // spec.workers + 16
    while True:
        compute = draw_times(times, spec.workers, count, spec.seed)
        arrival = np.cumsum(compute, axis=1)
        last_needed = np.partition(arrival, total - 1, axis=None)[total - 1]
        # No worker contributes more than `total`; this also ends the search if times are 0.
        if np.all(arrival[:, -1] > last_needed) or count > total:
            return arrival, compute
        count *= 2


# ----------------------------------------------------------------------------------------- records


@dataclass(frozen=True, slots=True)
class _Columns:
    """Gradients stored by column."""

    t: Floats
    worker: Ints
    turn: Ints
    version: Ints
    asked_at: Floats

    def take(self, order: Ints) -> "_Columns":
        """Return the gradients in another order."""
        return _Columns(
            self.t[order],
            self.worker[order],
            self.turn[order],
            self.version[order],
            self.asked_at[order],
        )

    def has_ties(self) -> bool:
        """Return whether two neighbours have the same time; they must be sorted."""
        return bool(np.any(np.diff(self.t) == 0))

    def records(
        self, fates: list[Fate], staleness: Ints, compute_s: Floats, samples: int
    ) -> list[Gradient]:
        """Return one record per gradient."""
        return [
            Gradient(t, worker, turn, version, fate, stale, asked, took, samples)
            for t, worker, turn, version, fate, stale, asked, took in zip(
                self.t.tolist(),
                self.worker.tolist(),
                self.turn.tolist(),
                self.version.tolist(),
                fates,
                staleness.tolist(),
                self.asked_at.tolist(),
                compute_s.tolist(),
                strict=True,
            )
        ]


def _abandoned(columns: "_Columns", updates: int, whole_s: Floats) -> list[Gradient]:
    """Return the records of cancelled work; `whole_s` is what it would have taken."""
    staleness = updates - columns.version
    spent_s = np.minimum(whole_s, columns.t - columns.asked_at)
    fates = [Fate.CANCELLED] * len(columns.worker)
    return columns.records(fates, staleness, spent_s, samples=0)


def _joined(spec: RunSpec, needed: int) -> list[Record]:
    """Return the first records: all workers join at time 0, and the run begins when it can."""
    records: list[Record] = [Joined(0.0, worker) for worker in range(spec.workers)]
    records.insert(max(needed, spec.min_workers), Resumed(0.0))
    return records
