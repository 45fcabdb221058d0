# SPDX-License-Identifier: BSD-3-Clause
"""How long an update takes under `backup`, for every N.

If only computation times matter, all N are simulated at once with the same times. With a network,
faults or slow phases, the full simulator runs for some N.

If the times of all workers were recorded together, the recorded versions themselves are simulated,
in their order. Otherwise times are drawn.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace

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

__all__ = [
    "REPLICATES",
    "choose_some",
    "draw_replicates",
    "mean_steps",
    "picks",
    "resampled_steps",
    "steps_from_simulations",
    "steps_from_times",
    "updates_needed",
]

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

REPLICATES = 20
ROUNDS = (200, 1000)  # versions per replicate: minimum, maximum
ROUNDS_RECORDED = 20_000  # of a recording: the last ones
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


def updates_needed(convergence: Convergence, needed: Ints) -> Floats:
    """Return the updates to the target, one row per scenario, one column per N."""
    counts = needed.astype(float)
    return np.stack([updates(counts) for updates in convergence.scenarios])


def steps_from_times(
    cluster: Cluster, spec: RunSpec, on_progress: Callable[[float], None]
) -> dict[Late, Floats]:
    """Return the mean time of an update, one row per replicate, one column per N."""
    rows: dict[Late, list[Floats]] = {"cancel": [], "finish": []}
    count = 1 if _is_joint(cluster) else REPLICATES
    for done, times in enumerate(draw_replicates(cluster, spec, count), start=1):
        for late, each in rows.items():
            each.append(_every_step(cluster, times, late))
        on_progress(done / count)
    return {late: np.stack(each) for late, each in rows.items()}


def draw_replicates(cluster: Cluster, spec: RunSpec, count: int) -> Iterator[Floats]:
    """Yield computation times of independent runs: one row per worker, one column per version.

    If the workers were recorded together, there is one such run, the recorded one.
    """
    if _is_joint(cluster):
        yield _recorded_rounds(cluster, spec)
        return
    least, most = ROUNDS
    # Fewer workers need more versions for the same precision.
    rounds = min(most, max(least, GRADIENTS // spec.workers)) + WARM_UP
    for replicate in range(count):
        yield draw_times(cluster.times, spec.workers, rounds, spec.seed * REPLICATES + replicate)


def _is_joint(cluster: Cluster) -> bool:
    return isinstance(cluster.times, Recorded) and cluster.times.together


def _recorded_rounds(cluster: Cluster, spec: RunSpec) -> Floats:
    """Return the recorded versions; the last of them also come first, to warm up."""
    assert isinstance(cluster.times, Recorded)
    own = [cluster.times.of(worker)[-ROUNDS_RECORDED:] for worker in range(spec.workers)]
    return np.take(np.stack(own), np.arange(-WARM_UP, len(own[0])), axis=1, mode="wrap")


def _every_step(cluster: Cluster, times: Floats, late: Late) -> Floats:
    """Return the mean time of an update for every N."""
    every = np.arange(1, len(times) + 1)
    chosen = every if late == "cancel" else choose_some(len(times), DENSE)
    return np.asarray(np.interp(every, chosen, mean_steps(cluster, times, chosen, late)))


def mean_steps(cluster: Cluster, times: Floats, needed: Ints, late: Late) -> Floats:
    """Return the mean time of an update for each of these N, from one row of times per worker.

    The first `WARM_UP` versions don't count.
    """
    lasted = version_durations(times, needed, late, by_version=_is_joint(cluster))
    return np.asarray(lasted[WARM_UP:].mean(axis=0))


def steps_from_simulations(
    cluster: Cluster,
    spec: RunSpec,
    convergence: Convergence,
    on_progress: Callable[[float], None],
) -> tuple[dict[Late, Floats], Floats]:
    """Return the mean time of an update and the seconds to the target, by full simulations.

    The latter by scenario, too.
    """
    chosen = choose_some(spec.workers, DENSE_SLOW)
    every = np.arange(1, spec.workers + 1)
    steps = max(5 * WARM_UP, GRADIENTS_SLOW // spec.workers)
    scenarios = convergence.scenarios
    step_s = np.empty((REPLICATES_SLOW, len(chosen)))
    seconds = np.empty((len(scenarios), REPLICATES_SLOW, len(chosen)))
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
            step_s[replicate, i] = lasted / len(counts)
            progress = [float(np.sum(1 / needs(counts))) for needs in scenarios]
            seconds[:, replicate, i] = [lasted / made for made in progress]
        on_progress((replicate + 1) / REPLICATES_SLOW)
    # Interpolate the time per update, not the product: that isn't linear between two N.
    worth = seconds / updates_needed(convergence, chosen)[:, None, :]
    whole_worth = (
        _interpolated(worth, chosen, every) * updates_needed(convergence, every)[:, None, :]
    )
    return {spec.late: _interpolated(step_s, chosen, every)}, whole_worth


def _interpolated(values: Floats, chosen: Ints, every: Ints) -> Floats:
    """Interpolate along the last axis, from the chosen N to every N."""
    return np.apply_along_axis(lambda row: np.interp(every, chosen, row), -1, values)


def choose_some(workers: int, at_most: int) -> Ints:
    """Choose some N from 1 to W, denser where b is small, because the best is mostly there."""
    if workers <= at_most:
        return np.arange(1, workers + 1)
    backups = np.unique(np.round(np.geomspace(1, workers, at_most)).astype(np.int64)) - 1
    return np.sort(workers - backups[backups < workers])


def resampled_steps(steps: Floats, cluster: Cluster, spec: RunSpec) -> Floats:
    """Return resampled times of an update, one row per resample, one column per N."""
    if not isinstance(cluster.times, Recorded):
        return np.asarray(steps[picks(len(steps), spec.seed)].mean(axis=1))
    lengths = [len(own) for own in cluster.times.times.values()]
    rounds = min(int(np.median(lengths)), ROUNDS[1]) + WARM_UP
    rows = []
    for resample in range(RESAMPLES_RECORDED):
        seed = spec.seed * RESAMPLES_RECORDED + resample + FIRST_RESAMPLE
        times = draw_times(cluster.times, spec.workers, rounds, seed)
        rows.append(_every_step(cluster, times, spec.late))
    return np.stack(rows)


def picks(replicates: int, seed: int) -> Ints:
    """Return the replicates of each resample, drawn with replacement."""
    return np.random.default_rng(seed).integers(replicates, size=(RESAMPLES, replicates))
