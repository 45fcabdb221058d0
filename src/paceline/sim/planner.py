# SPDX-License-Identifier: BSD-3-Clause
"""Choose N, and so b: time per update x number of updates, for every N from 1 to W.

Theory of operation
    Under `backup:b` an update doesn't simply take the N-th of W computation times: if late work is
    finished before it is dropped, a late worker starts the next version late. So the planner
    simulates. If only computation times matter, it simulates all N at once with the same times
    (`fast.version_durations`). With a network, faults or slow phases it runs the full simulator for
    some N and interpolates between them; there, an update with fewer than N contributions, because
    workers were dead, counts for less.

    The planner simulates independent replicates. For a latency model the intervals show the error
    of the simulation, by resampling the replicates. For a recording they show how much the answer
    depends on the recorded period, by resampling the recording at its own length.
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
from paceline.sim.fast import draw_times, version_durations
from paceline.sim.simulate import simulate
from paceline.spec import Late, RunSpec

__all__ = ["Interval", "Option", "Plan", "plan"]

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

REPLICATES = 20
ROUNDS = (200, 1000)  # versions per replicate: minimum, maximum
GRADIENTS = 8_000  # per replicate, as far as ROUNDS allows
WARM_UP = 20  # versions until lateness is stationary; not counted
DENSE = 128  # how many N are simulated at most; the rest is interpolated
RESAMPLES = 400  # of the replicates of a model
RESAMPLES_RECORDED = 60  # of a recording

FIRST_RESAMPLE = 1 << 32  # seeds beyond those of the replicates

# For the full simulator:
REPLICATES_SLOW = 20
DENSE_SLOW = 12
GRADIENTS_SLOW = 1_600  # per replicate, unless that is too few versions

FLAT = 0.02  # options that are worse than the best by at most this count as equal


@dataclass(frozen=True, slots=True)
class Interval:
    """A 95 % interval of a value."""

    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Option:
    """The cost of one choice of N."""

    machines: int
    needed: int  # N
    step_s: dict[Late, float]  # for cancelled and for finished late work, if simulated
    updates: float
    seconds: float  # to the target
    interval: Interval | None  # of `seconds`; None: not computed

    @property
    def backups(self) -> int:
        """The number b of backups."""
        return self.machines - self.needed

    @property
    def machine_hours(self) -> float:
        """The cost in machine-hours, including the backups."""
        return self.machines * self.seconds / 3600


@dataclass(frozen=True, slots=True)
class Plan:
    """The cost of every N, and which one to choose."""

    late: Late
    options: tuple[Option, ...]  # by N, from 1 to W, all machines in use
    best: Option  # the first to reach the target
    best_backups: Interval
    gain: float  # how many times as fast as sync the best option reaches the target
    gain_interval: Interval
    flat: tuple[int, int]  # the range of b around the best that is within 2 % of it
    cheapest: Option | None
    """Fewest machine-hours, with fewer machines, no slower than sync; None: not simulated."""

    assumptions: tuple[str, ...]

    @property
    def sync(self) -> Option:
        """Full synchronous training on all machines."""
        return self.options[-1]

    def sentence(self) -> str:
        """Return the recommendation in words."""
        workers, best = self.best.machines, self.best
        if best.backups == 0:
            return (
                f"Use sync: with {workers} workers no number of backups reaches the target sooner."
            )
        low, high = self.flat
        around = f"any b from {low} to {high} is" if low < high else "no other b is"
        least, most = round(self.best_backups.low), round(self.best_backups.high)
        certainty = f"is {least}" if least == most else f"is between {least} and {most}"
        return (
            f"Use backup:{best.backups}: wait for {best.needed} of {workers} workers. It reaches "
            f"the target {self.gain:.2f} times as fast as sync "
            f"({self.gain_interval.low:.2f} to {self.gain_interval.high:.2f}); {around} within "
            f"{100 * FLAT:.0f} % of that. With 95 % certainty the best b {certainty}."
        )


def plan(
    cluster: Cluster,
    spec: RunSpec,
    convergence: Convergence,
    on_progress: Callable[[float], None] = lambda done: None,
) -> Plan:
    """Compare every N for `spec.workers` machines, with late work handled as `spec.late` says.

    `on_progress` is called with the fraction of the work that is done.
    """
    cluster.validate(spec)
    only_times = cluster.times.is_stationary and cluster.network is None and not cluster.faults
    needed = np.arange(1, spec.workers + 1)
    updates = convergence.updates(needed.astype(float))
    if only_times:
        steps = _steps_from_times(cluster, spec, on_progress)
        seconds = steps[spec.late] * updates  # one row per replicate, one column per N
        resampled = _resampled(seconds, cluster, spec, updates)
        how = "simulated with the same computation times for all N"
    else:
        steps, seconds = _steps_from_simulations(cluster, spec, convergence, on_progress)
        resampled = _bootstrap(seconds, spec.seed)
        how = "simulated in full for some N, interpolated between them"
    means = seconds.mean(axis=0)
    if not means[-1] > 0:
        raise SpecError("the plan needs computation times > 0, but all of them are 0")
    best = int(np.argmin(means))
    options = tuple(
        Option(
            machines=spec.workers,
            needed=int(n),
            step_s={late: float(each[:, i].mean()) for late, each in steps.items()},
            updates=float(updates[i]),
            seconds=float(means[i]),
            interval=_interval(resampled[:, i]),
        )
        for i, n in enumerate(needed)
    )
    return Plan(
        late=spec.late,
        options=options,
        best=options[best],
        best_backups=_interval(spec.workers - needed[np.argmin(resampled, axis=1)]),
        gain=float(means[-1] / means[best]),
        gain_interval=_interval(resampled[:, -1] / resampled[:, best]),
        flat=_flat(means, best),
        cheapest=_cheapest(cluster, spec, convergence, options[-1]) if only_times else None,
        assumptions=(
            convergence.assumption,
            f"step times: {how}, late work {_verb(spec.late)}",
            f"intervals: {_interval_meaning(cluster)}",
        ),
    )


def _interval_meaning(cluster: Cluster) -> str:
    if isinstance(cluster.times, Recorded):
        return "how much the answer depends on the recorded period"
    return "the error of the simulation, if the latency model is right"


def _verb(late: Late) -> str:
    return "cancelled at once" if late == "cancel" else "finished and then dropped"


# ------------------------------------------------------------------------------ times of an update


def _steps_from_times(
    cluster: Cluster, spec: RunSpec, on_progress: Callable[[float], None]
) -> dict[Late, Floats]:
    """Return the mean time of an update, one row per replicate, one column per N."""
    rows: dict[Late, list[Floats]] = {"cancel": [], "finish": []}
    for replicate in range(REPLICATES):
        seed = spec.seed * REPLICATES + replicate
        times = draw_times(cluster.times, spec.workers, _rounds(spec) + WARM_UP, seed)
        for late, each in rows.items():
            each.append(_mean_steps(times, late))
        on_progress((replicate + 1) / REPLICATES)
    return {late: np.stack(each) for late, each in rows.items()}


def _rounds(spec: RunSpec) -> int:
    """Return the versions per replicate; fewer workers need more for the same precision."""
    least, most = ROUNDS
    return min(most, max(least, GRADIENTS // spec.workers))


def _mean_steps(times: Floats, late: Late) -> Floats:
    """Return the mean time of an update for every N, from one row of times per worker."""
    every = np.arange(1, len(times) + 1)
    chosen = every if late == "cancel" else _choose(len(times), DENSE)
    lasted = version_durations(times, chosen, late)
    settled = lasted[min(WARM_UP, len(lasted) - 1) :].mean(axis=0)
    return np.asarray(np.interp(every, chosen, settled))


def _steps_from_simulations(
    cluster: Cluster,
    spec: RunSpec,
    convergence: Convergence,
    on_progress: Callable[[float], None],
) -> tuple[dict[Late, Floats], Floats]:
    """Return the mean time of an update and the seconds to the target, by full simulations."""
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
                    f"with N = {n} the simulated run stopped after "
                    f"{len(updates) + WARM_UP} updates; let killed workers come back, e.g. with "
                    "kill any every 10m for 1m"
                )
            lasted = updates[-1].t - updates[0].t
            # An update with few contributions counts for less: more such updates are needed.
            counts = np.array([len(u.contributors) for u in updates[1:]], dtype=float)
            progress = float(np.sum(1 / convergence.updates(counts)))
            step_s[replicate, i] = lasted / len(counts)
            seconds[replicate, i] = lasted / progress
        on_progress((replicate + 1) / REPLICATES_SLOW)
    # Interpolate the time per update, not the product: that isn't linear between two N.
    worth = seconds / convergence.updates(chosen.astype(float))
    whole_worth = np.stack([np.interp(every, chosen, row) for row in worth])
    whole_steps = np.stack([np.interp(every, chosen, row) for row in step_s])
    return {spec.late: whole_steps}, whole_worth * convergence.updates(every.astype(float))


def _choose(workers: int, at_most: int) -> Ints:
    """Choose some N from 1 to W, denser where b is small, because the best is mostly there."""
    if workers <= at_most:
        return np.arange(1, workers + 1)
    backups = np.unique(np.round(np.geomspace(1, workers, at_most)).astype(np.int64)) - 1
    return np.sort(workers - backups[backups < workers])


# -------------------------------------------------------------------------------------- uncertainty


def _resampled(seconds: Floats, cluster: Cluster, spec: RunSpec, updates: Floats) -> Floats:
    """Return resampled answers, one row per resample, one column per N."""
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
    """Return means of replicates that are resampled with replacement."""
    rng = np.random.default_rng(seed)
    picks = rng.integers(len(seconds), size=(RESAMPLES, len(seconds)))
    return np.asarray(seconds[picks].mean(axis=1))


def _interval(values: NDArray[np.generic]) -> Interval:
    low, high = np.percentile(values.astype(float), [2.5, 97.5])
    return Interval(float(low), float(high))


def _flat(means: Floats, best: int) -> tuple[int, int]:
    """Return the contiguous range of b around the best whose time is within `FLAT` of it."""
    good = means <= means[best] * (1 + FLAT)
    low = high = best
    while low > 0 and good[low - 1]:
        low -= 1
    while high < len(means) - 1 and good[high + 1]:
        high += 1
    return len(means) - 1 - high, len(means) - 1 - low


# --------------------------------------------------------------------------------------------- cost


def _cheapest(cluster: Cluster, spec: RunSpec, convergence: Convergence, sync: Option) -> Option:
    """Return the option with the fewest machine-hours, without the slowest machines if need be.

    It is no slower than sync on all machines.
    """
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
        lasted = [version_durations(s[:machines], needed, spec.late)[WARM_UP:] for s in samples]
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
