# SPDX-License-Identifier: BSD-3-Clause
"""Which N, which b: expected time of an update x updates needed, for every N from 1 to W.

Theory of operation
    The time of an update under `backup:b` is not just the N-th of W computation times: where late
    work is finished before it is dropped, a worker that was late begins the next version late. So
    nothing is corrected, everything is simulated. Where only computation times matter, all N are
    simulated at once with the same times (`fast.closing_times`); with a network, faults or slow
    phases the full simulator runs for a choice of N, and what lies between is interpolated.

    The simulation is made in independent replicates. For a latency model, the intervals tell the
    error of the simulation: the bootstrap resamples the replicates. For a recording, each
    replicate is one resampling of the recording, of its own length, so the intervals tell how much
    the answer depends on the luck of having recorded just this stretch.
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
DENSE_SLOW = 12  # likewise where the full simulator must run
GRADIENTS_SLOW = 20_000  # that the full simulator simulates for one N
RESAMPLES = 400
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
    step_s: dict[Late, float]  # by what becomes of late work
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
    cheapest: Option  # fewest machine-hours, some machines given back, no slower than sync
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
            f"{100 * FLAT:.0f} % of that. At 95 % certainty the best b {certainty}."
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
    only_times = cluster.times.is_stationary and cluster.network is None and not cluster.faults
    steps = _steps_from_times if only_times else _steps_from_simulations
    needed = np.arange(1, spec.workers + 1)
    replicates = steps(cluster, spec, on_progress)
    updates = convergence.updates(needed.astype(float))
    seconds = replicates[spec.late] * updates  # one row a replicate, one column an N
    means = seconds.mean(axis=0)
    if not means[-1] > 0:
        raise SpecError("computation takes no time at all, so there is nothing to plan")
    resampled = _resample(seconds, cluster, spec.seed)
    best = int(np.argmin(means))
    options = tuple(
        Option(
            machines=spec.workers,
            needed=int(n),
            step_s={late: float(each[:, i].mean()) for late, each in replicates.items()},
            updates=float(updates[i]),
            seconds=float(means[i]),
            interval=_interval(resampled[:, i]),
        )
        for i, n in enumerate(needed)
    )
    how = "simulated with common computation times for all N"
    if not only_times:
        how = "simulated in full for a choice of N, interpolated between"
    cheapest = options[best]
    if only_times:
        cheapest = _cheapest(cluster, spec, convergence, options[-1])
    return Plan(
        late=spec.late,
        options=options,
        best=options[best],
        best_backups=_interval(spec.workers - needed[np.argmin(resampled, axis=1)]),
        gain=float(means[-1] / means[best]),
        gain_interval=_interval(resampled[:, -1] / resampled[:, best]),
        flat=_flat(means, best),
        cheapest=cheapest,
        assumptions=(convergence.assumption, f"step times: {how}, late work {_verb(spec.late)}"),
    )


def _verb(late: Late) -> str:
    return "cancelled at once" if late == "cancel" else "finished and then dropped"


# ------------------------------------------------------------------------------ times of an update


def _steps_from_times(
    cluster: Cluster, spec: RunSpec, on_progress: Callable[[float], None]
) -> dict[Late, Floats]:
    """Mean time of an update, one row a replicate, one column an N, from computation times."""
    rounds = _rounds(cluster, spec) + WARM_UP
    dense = _choose(spec.workers, DENSE)
    every = np.arange(1, spec.workers + 1)
    rows: dict[Late, list[Floats]] = {"cancel": [], "finish": []}
    for replicate in range(REPLICATES):
        times = draw_times(cluster.times, spec.workers, rounds, _seed(spec, replicate))
        rows["cancel"].append(closing_times(times, every, "cancel")[WARM_UP:].mean(axis=0))
        lasted = closing_times(times, dense, "finish")[WARM_UP:].mean(axis=0)
        rows["finish"].append(np.interp(every, dense, lasted))
        on_progress((replicate + 1) / REPLICATES)
    return {late: np.stack(each) for late, each in rows.items()}


def _rounds(cluster: Cluster, spec: RunSpec) -> int:
    """Enough to be precise; of a recording, as many as it has, to be as uncertain as it is."""
    enough = _enough_rounds(spec)
    if isinstance(cluster.times, Recorded):
        return max(2, min(enough, *(len(own) for own in cluster.times.times.values())))
    return enough


def _enough_rounds(spec: RunSpec) -> int:
    """Few workers need more versions to be as precise."""
    least, most = ROUNDS
    return min(most, max(least, GRADIENTS // spec.workers))


def _steps_from_simulations(
    cluster: Cluster, spec: RunSpec, on_progress: Callable[[float], None]
) -> dict[Late, Floats]:
    """The same from full simulations; the replicates are stretches of one long run."""
    chosen = _choose(spec.workers, DENSE_SLOW)
    steps = max(REPLICATES * 10, GRADIENTS_SLOW // spec.workers)
    result: dict[Late, Floats] = {}
    lates: tuple[Late, Late] = ("cancel", "finish")
    for part, late in enumerate(lates):
        columns: list[Floats] = []
        for i, n in enumerate(chosen):
            of_n = replace(spec, steps=steps, late=late)
            trace = simulate(Backup(spec.workers - int(n)), cluster, of_n)
            times = np.array([0.0, *(u.t for u in trace.updates())])
            if len(times) <= REPLICATES:
                raise SpecError(
                    f"with N = {n} the simulated run made only {len(times) - 1} updates; "
                    "the workers that die must return"
                )
            stretches = np.array_split(np.diff(times), REPLICATES)
            columns.append(np.array([stretch.mean() for stretch in stretches]))
            on_progress((part + (i + 1) / len(chosen)) / 2)
        by_n = np.stack(columns, axis=1)
        every = np.arange(1, spec.workers + 1)
        result[late] = np.stack([np.interp(every, chosen, row) for row in by_n])
    return result


def _choose(workers: int, at_most: int) -> Ints:
    """Some N from 1 to W, close together where b is small, for that is where the best mostly is."""
    if workers <= at_most:
        return np.arange(1, workers + 1)
    backups = np.unique(np.round(np.geomspace(1, workers, at_most)).astype(np.int64)) - 1
    return np.sort(workers - backups[backups < workers])


def _seed(spec: RunSpec, replicate: int) -> int:
    return spec.seed * REPLICATES + replicate


# -------------------------------------------------------------------------------------- uncertainty


def _resample(seconds: Floats, cluster: Cluster, seed: int) -> Floats:
    """What the answer could have been: one row a possibility, one column an N."""
    if isinstance(cluster.times, Recorded):
        return seconds
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
    rounds = _enough_rounds(spec) + WARM_UP
    times = draw_times(cluster.times, spec.workers, rounds, spec.seed)
    fastest_first = times[np.argsort(times.mean(axis=1), kind="stable")]
    cheapest = sync
    for machines in _choose(spec.workers, DENSE // 4).tolist():
        needed = _choose(machines, DENSE // 4)
        lasted = closing_times(fastest_first[:machines], needed, spec.late)[WARM_UP:]
        step_s = lasted.mean(axis=0)
        updates = convergence.updates(needed.astype(float))
        i = int(np.argmin(step_s * updates))
        seconds = float(step_s[i] * updates[i])
        option = Option(
            machines=machines,
            needed=int(needed[i]),
            step_s={spec.late: float(step_s[i])},
            updates=float(updates[i]),
            seconds=seconds,
            interval=None,
        )
        if seconds <= sync.seconds and option.machine_hours < cheapest.machine_hours:
            cheapest = option
    return cheapest
