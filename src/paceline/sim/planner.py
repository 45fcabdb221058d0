# SPDX-License-Identifier: BSD-3-Clause
"""Which N, which b: expected time of an update x updates needed, for every N from 1 to W.

Theory of operation
    The time of an update under `backup:b` is not just the N-th of W computation times: where late
    work is finished before it is dropped, a worker that was late begins the next version late. So
    nothing is corrected, everything is simulated. Where only computation times matter, all N are
    simulated at once with the same times (`fast.closing_times`); with a network, faults or slow
    phases the full simulator runs for a choice of N, and what lies between is interpolated. There
    an update that had to do with fewer than N, because workers were dead, counts for less.

    Everything is simulated in independent replicates. For a model the intervals tell the error of
    the simulation, by resampling the replicates. For a recording they tell how much the answer
    depends on having recorded just this stretch, by resampling the recording in its own length.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from paceline.core.policies import Backup
from paceline.errors import SpecError
from paceline.latency import Recorded
from paceline.sim.cluster import Cluster
from paceline.sim.convergence import Convergence
from paceline.sim.fast import closing_times, draw_times
from paceline.sim.simulate import simulate
from paceline.spec import Late, RunSpec

__all__ = ["Interval", "Option", "Plan", "plan"]

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

REPLICATES = 20
ROUNDS = (200, 1000)  # versions in a replicate: at least, at most
GRADIENTS = 8_000  # in a replicate, if that many versions are not too few or too many
WARM_UP = 20  # versions until lateness has settled; not counted
DENSE = 128  # up to so many N are simulated, the rest is interpolated
RESAMPLES = 400  # of the replicates of a model
RESAMPLES_RECORDED = 60  # of a recording

FIRST_RESAMPLE = 1 << 32  # seeds beyond those of the replicates

# Where the full simulator must run:
REPLICATES_SLOW = 20
DENSE_SLOW = 12
GRADIENTS_SLOW = 1_600  # in a replicate, if that is not too few versions

FLAT = 0.02  # how much worse than the best still counts as equal


@dataclass(frozen=True, slots=True)
class Interval:
    """Where a value lies, at 95 %."""

    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Option:
    """What one choice of N means."""

    machines: int
    needed: int  # N
    step_s: dict[Late, float]  # by what becomes of late work, as far as it was simulated
    updates: float
    seconds: float  # to the target
    interval: Interval | None  # of `seconds`; None: not asked for

    @property
    def backups(self) -> int:
        """The b of this choice."""
        return self.machines - self.needed

    @property
    def machine_hours(self) -> float:
        """All machines are paid for, those that are backups too."""
        return self.machines * self.seconds / 3600


@dataclass(frozen=True, slots=True)
class Plan:
    """For every N what it costs, and what to choose."""

    late: Late
    options: tuple[Option, ...]  # by N, from 1 to W, all machines in use
    best: Option  # soonest at the target
    best_backups: Interval
    gain: float  # of the best over sync: how many times sooner
    gain_interval: Interval
    flat: tuple[int, int]  # the range of b around the best that is within 2 % of it
    cheapest: Option | None
    """Fewest machine-hours, some machines given back, no slower than sync; None: not simulated."""

    assumptions: tuple[str, ...]

    @property
    def sync(self) -> Option:
        """Full synchronous training on all machines."""
        return self.options[-1]

    def sentence(self) -> str:
        """The recommendation in plain words."""
        workers, best = self.best.machines, self.best
        if best.backups == 0:
            return (
                f"Use sync: with {workers} workers no number of backups reaches the target sooner."
            )
        low, high = self.flat
        around = f"any b from {low} to {high} is" if low < high else "no other b is"
        least, most = round(self.best_backups.low), round(self.best_backups.high)
        certainty = f"is {least}" if least == most else f"lies between {least} and {most}"
        return (
            f"Use backup:{best.backups}: wait for {best.needed} of {workers} workers. The target "
            f"is reached {self.gain:.2f} times as soon as with sync "
            f"({self.gain_interval.low:.2f} to {self.gain_interval.high:.2f}); {around} within "
            f"{100 * FLAT:.0f} % of that. With 95 % certainty the best b {certainty}."
        )


def plan(
    cluster: Cluster,
    spec: RunSpec,
    convergence: Convergence,
    on_progress: Callable[[float], None] = lambda done: None,
) -> Plan:
    """Weigh every N for `spec.workers` machines; `spec.late` says what becomes of late work.

    `on_progress` is called with the share of the work that is done.
    """
    cluster.validate(spec)
    only_times = cluster.times.is_stationary and cluster.network is None and not cluster.faults
    needed = np.arange(1, spec.workers + 1)
    updates = convergence.updates(needed.astype(float))
    if only_times:
        steps = _steps_from_times(cluster, spec, on_progress)
        seconds = steps[spec.late] * updates  # one row a replicate, one column an N
        possible = _possible(seconds, cluster, spec, updates)
        how = "simulated with common computation times for all N"
    else:
        steps, seconds = _steps_from_simulations(cluster, spec, convergence, on_progress)
        possible = _bootstrap(seconds, spec.seed)
        how = "simulated in full for a choice of N, interpolated between"
    means = seconds.mean(axis=0)
    if not means[-1] > 0:
        raise SpecError("computation takes no time at all, so there is nothing to plan")
    best = int(np.argmin(means))
    options = tuple(
        Option(
            machines=spec.workers,
            needed=int(n),
            step_s={late: float(each[:, i].mean()) for late, each in steps.items()},
            updates=float(updates[i]),
            seconds=float(means[i]),
            interval=_interval(possible[:, i]),
        )
        for i, n in enumerate(needed)
    )
    return Plan(
        late=spec.late,
        options=options,
        best=options[best],
        best_backups=_interval(spec.workers - needed[np.argmin(possible, axis=1)]),
        gain=float(means[-1] / means[best]),
        gain_interval=_interval(possible[:, -1] / possible[:, best]),
        flat=_flat(means, best),
        cheapest=_cheapest(cluster, spec, convergence, options[-1]) if only_times else None,
        assumptions=(
            convergence.assumption,
            f"step times: {how}, late work {_verb(spec.late)}",
            f"intervals: {_meaning(cluster)}",
        ),
    )


def _meaning(cluster: Cluster) -> str:
    if isinstance(cluster.times, Recorded):
        return "how much the answer depends on having recorded just this stretch"
    return "the error of the simulation, if the latency is as given"


def _verb(late: Late) -> str:
    return "cancelled at once" if late == "cancel" else "finished and then dropped"


# ------------------------------------------------------------------------------ times of an update


def _steps_from_times(
    cluster: Cluster, spec: RunSpec, on_progress: Callable[[float], None]
) -> dict[Late, Floats]:
    """Mean time of an update, one row a replicate, one column an N, from computation times."""
    rows: dict[Late, list[Floats]] = {"cancel": [], "finish": []}
    for replicate in range(REPLICATES):
        seed = spec.seed * REPLICATES + replicate
        times = draw_times(cluster.times, spec.workers, _rounds(spec) + WARM_UP, seed)
        for late, each in rows.items():
            each.append(_mean_steps(times, late))
        on_progress((replicate + 1) / REPLICATES)
    return {late: np.stack(each) for late, each in rows.items()}


def _rounds(spec: RunSpec) -> int:
    """Few workers need more versions to be as precise."""
    least, most = ROUNDS
    return min(most, max(least, GRADIENTS // spec.workers))


def _mean_steps(times: Floats, late: Late) -> Floats:
    """The mean time of an update for every N, from one row of computation times a worker."""
    every = np.arange(1, len(times) + 1)
    chosen = every if late == "cancel" else _choose(len(times), DENSE)
    lasted = closing_times(times, chosen, late)
    settled = lasted[min(WARM_UP, len(lasted) - 1) :].mean(axis=0)
    return np.asarray(np.interp(every, chosen, settled))


def _steps_from_simulations(
    cluster: Cluster,
    spec: RunSpec,
    convergence: Convergence,
    on_progress: Callable[[float], None],
) -> tuple[dict[Late, Floats], Floats]:
    """Mean time of an update, and seconds to the target, by full simulations."""
    chosen = _choose(spec.workers, DENSE_SLOW)
    every = np.arange(1, spec.workers + 1)
    steps = max(5 * WARM_UP, GRADIENTS_SLOW // spec.workers)
    step_s, seconds = np.empty((2, REPLICATES_SLOW, len(chosen)))
    for replicate in range(REPLICATES_SLOW):
        seed = spec.seed * REPLICATES_SLOW + replicate
        for i, n in enumerate(chosen):
            trace = simulate(
                Backup(spec.workers - int(n)), cluster, replace(spec, steps=steps, seed=seed)
            )
            updates = list(trace.updates())[WARM_UP:]
            if len(updates) < WARM_UP:
                raise SpecError(
                    f"with N = {n} the simulated run got no further than "
                    f"{len(updates) + WARM_UP} updates; workers that die must return"
                )
            lasted = updates[-1].t - updates[0].t
            # An update of few contributions is worth as much less as it would need more updates.
            counts = np.array([len(u.contributors) for u in updates[1:]], dtype=float)
            progress = float(np.sum(1 / convergence.updates(counts)))
            step_s[replicate, i] = lasted / len(counts)
            seconds[replicate, i] = lasted / progress
        on_progress((replicate + 1) / REPLICATES_SLOW)
    # Seconds are interpolated as steps x updates, or the curve between two N would be a chord.
    worth = seconds / convergence.updates(chosen.astype(float))
    whole_worth = np.stack([np.interp(every, chosen, row) for row in worth])
    whole_steps = np.stack([np.interp(every, chosen, row) for row in step_s])
    return {spec.late: whole_steps}, whole_worth * convergence.updates(every.astype(float))


def _choose(workers: int, at_most: int) -> Ints:
    """Some N from 1 to W, close together where b is small, for that is where the best mostly is."""
    if workers <= at_most:
        return np.arange(1, workers + 1)
    backups = np.unique(np.round(np.geomspace(1, workers, at_most)).astype(np.int64)) - 1
    return np.sort(workers - backups[backups < workers])


# -------------------------------------------------------------------------------------- uncertainty


def _possible(seconds: Floats, cluster: Cluster, spec: RunSpec, updates: Floats) -> Floats:
    """What the answer could have been: one row a possibility, one column an N."""
    if not isinstance(cluster.times, Recorded):
        return _bootstrap(seconds, spec.seed)
    lengths = [len(own) for own in cluster.times.times.values()]
    rounds = max(2, min(int(np.median(lengths)), ROUNDS[1]))
    rows = []
    for resample in range(RESAMPLES_RECORDED):
        seed = spec.seed * RESAMPLES_RECORDED + resample + FIRST_RESAMPLE
        rows.append(_mean_steps(draw_times(cluster.times, spec.workers, rounds, seed), spec.late))
    return np.stack(rows) * updates


def _bootstrap(seconds: Floats, seed: int) -> Floats:
    """Means of replicates drawn again and again with replacement."""
    rng = np.random.default_rng(seed)
    picks = rng.integers(len(seconds), size=(RESAMPLES, len(seconds)))
    return np.asarray(seconds[picks].mean(axis=1))


def _interval(values: NDArray[np.generic]) -> Interval:
    low, high = np.percentile(values.astype(float), [2.5, 97.5])
    return Interval(float(low), float(high))


def _flat(means: Floats, best: int) -> tuple[int, int]:
    """The b around the best whose time is within `FLAT` of it, without a gap."""
    good = means <= means[best] * (1 + FLAT)
    low = high = best
    while low > 0 and good[low - 1]:
        low -= 1
    while high < len(means) - 1 and good[high + 1]:
        high += 1
    return len(means) - 1 - high, len(means) - 1 - low


# --------------------------------------------------------------------------------------------- cost


def _cheapest(cluster: Cluster, spec: RunSpec, convergence: Convergence, sync: Option) -> Option:
    """The fewest machine-hours when the slowest machines may be given back, no slower than sync."""
    expected = [cluster.times.mean(worker) for worker in range(spec.workers)]
    fastest_first = np.argsort(expected, kind="stable")
    rounds = _rounds(spec) + WARM_UP
    samples = [
        draw_times(cluster.times, spec.workers, rounds, spec.seed * REPLICATES + r)[fastest_first]
        for r in range(REPLICATES // 4)
    ]
    cheapest = sync
    for machines in _choose(spec.workers, DENSE // 4).tolist():
        needed = _choose(machines, DENSE // 4)
        lasted = [closing_times(s[:machines], needed, spec.late)[WARM_UP:] for s in samples]
        step_s = np.concatenate(lasted).mean(axis=0)
        updates = convergence.updates(needed.astype(float))
        i = int(np.argmin(step_s * updates))
        option = Option(
            machines=machines,
            needed=int(needed[i]),
            step_s={spec.late: float(step_s[i])},
            updates=float(updates[i]),
            seconds=float(step_s[i] * updates[i]),
            interval=None,
        )
        if option.seconds <= sync.seconds and option.machine_hours < cheapest.machine_hours:
            cheapest = option
    return cheapest
