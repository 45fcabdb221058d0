# SPDX-License-Identifier: BSD-3-Clause
"""Choose N, and so b: time per update x number of updates, for every N from 1 to W.

Theory of operation
    Under `backup:b` an update doesn't simply take the N-th of W computation times: if late work is
    finished before it is dropped, a late worker starts the next version late. So the planner
    simulates. If only computation times matter, it simulates all N at once with the same times
    (`fast.version_durations`). With a network, faults or slow phases it runs the full simulator for
    some N and interpolates between them; there, an update with fewer than N contributions, because
    workers were dead, counts for less.

    How many updates a target needs is often known only roughly. Then there are several scenarios,
    and the planner takes the N with the smallest regret: in its worst scenario, the time to the
    target exceeds that of the best N for this scenario by the smallest factor. Among choices that
    are nearly equal it takes the one with the fewest backups.

    A plan from a run that followed a plan should confirm it. So the planner keeps the recorded
    number of backups unless its regret is larger with 95 % certainty. And a recording in which late
    work was cancelled says nothing about waiting for more workers than it did, so the smallest
    regret relative to the rest would mean less and less. Then the planner also keeps the recorded
    number unless a larger one is better in every scenario.

    For a latency model the planner simulates independent replicates, and the intervals show the
    error of the simulation, by resampling the replicates. For a recording it simulates the recorded
    versions, and the intervals show how much the answer depends on the recorded period, by
    resampling blocks of whole versions. The interval of the gain covers all scenarios, too.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceline.errors import SpecError
from paceline.latency import Recorded
from paceline.sim.cluster import Cluster
from paceline.sim.convergence import Convergence
from paceline.sim.step_times import (
    REPLICATES,
    choose_some,
    draw_replicates,
    mean_steps,
    picks,
    resampled_steps,
    steps_from_simulations,
    steps_from_times,
    updates_needed,
)
from paceline.spec import Late, RunSpec

__all__ = ["FLAT", "FLAT_WORDS", "Gain", "Interval", "Option", "Plan", "plan"]

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

CHEAPEST_DENSE = 32  # how many numbers of machines, and of N, are tried at most
FLAT = 0.02  # options that are worse than the best by at most this count as equal
FLAT_WORDS = f"{100 * FLAT:.0f} %"


@dataclass(frozen=True, slots=True)
class Interval:
    """A 95 % interval of a value."""

    low: float
    high: float


class Gain(NamedTuple):
    """How many times as fast one option is as another, over all scenarios."""

    least: float
    most: float

    @property
    def is_range(self) -> bool:
        """Whether the two differ when printed."""
        return f"{self.least:.2f}" != f"{self.most:.2f}"

    def words(self) -> str:
        """Return it as text: one number, or two if they differ."""
        return f"{self.least:.2f} to {self.most:.2f}" if self.is_range else f"{self.least:.2f}"


@dataclass(frozen=True, slots=True)
class Option:
    """The cost of one choice of N."""

    machines: int
    needed: int  # N
    step_s: dict[Late, float]  # for cancelled and for finished late work, if simulated
    updates: float
    seconds: float  # to the target, in the most likely scenario
    seconds_last: float  # in the last one, which is the worst for dropping work
    interval: Interval | None  # of `seconds`; None: not computed

    @property
    def backups(self) -> int:
        """The number b of backups."""
        return self.machines - self.needed

    @property
    def rule(self) -> str:
        """The rule that this choice is."""
        return f"backup:{self.backups}" if self.backups else "sync"

    def gain_over(self, other: "Option") -> Gain:
        """Return how many times as fast as the other option this one reaches the target."""
        # In between, the noise scale is in between, and so is the gain.
        ends = other.seconds / self.seconds, other.seconds_last / self.seconds_last
        return Gain(min(ends), max(ends))

    @property
    def machine_hours(self) -> float:
        """The cost in machine-hours, including the backups."""
        return self.machines * self.seconds / 3600


@dataclass(frozen=True, slots=True)
class Plan:
    """The cost of every N, and which one to choose."""

    options: tuple[Option, ...]  # by N, from 1 up, all machines in use
    baseline: Option
    """What the best is compared with: the recorded rule, or else the fewest backups."""

    best: Option
    best_backups: Interval
    gain_interval: Interval  # of `gain`, over all scenarios
    flat: tuple[int, int]  # the range of b around the best that is within 2 % of it
    late: Late = "cancel"
    cheapest: Option | None = None
    """Fewest machine-hours, with fewer machines, no slower than sync; None: not simulated."""

    assumptions: tuple[str, ...] = ()
    intervals: str = ""  # what they show

    def sentence(self) -> str:
        """Return the recommendation in words."""
        workers, best, gain = self.best.machines, self.best, self.gain
        if best is self.baseline:
            return f"Use {best.rule}: with {workers} workers, {self._why_no_other()}."
        low, high = self.flat
        around = f"any b from {low} to {high} is" if low < high else "no other b is"
        interval = f"{self.gain_interval.low:.2f} to {self.gain_interval.high:.2f}"
        interval = f"95 % interval: {interval}"
        if gain.is_range:
            interval = f"depending on the noise scale; {interval}"
        least, most = round(self.best_backups.low), round(self.best_backups.high)
        repeated = (
            f"would still be {least}"
            if least == most == best.backups
            else f"would be between {least} and {most}"
        )
        return (
            f"Use {best.rule}: wait for {best.needed} of {workers} workers. It reaches the target "
            f"{gain.words()} times as fast as {self.baseline.rule} ({interval}); {around} within "
            f"{FLAT_WORDS} of that. With other random draws of the times, the best b {repeated}."
        )

    def in_short(self) -> str:
        """Return the recommendation in words, without intervals."""
        best, baseline, gain = self.best, self.baseline, self.gain
        if best is baseline:
            return f"the best number of backups is {best.backups}: {self._why_no_other()}"
        condition = ", depending on the noise scale" if gain.is_range else ""
        return (
            f"{best.rule} (waiting for {best.needed} of {best.machines} workers) would reach the "
            f"same target {gain.words()} times as fast as {baseline.rule}{condition}"
        )

    def _why_no_other(self) -> str:
        """Return in words why no other option is recommended instead of the baseline."""
        is_sync, is_last = not self.baseline.backups, self.baseline is self.options[-1]
        more = "backups" if is_sync else "more backups" if is_last else "another number of backups"
        gains = [option.gain_over(self.baseline) for option in self.options]
        promising = [gain for gain in gains if gain.most > 1 + FLAT]
        if not promising:
            reason = f"{more} would not save more than {FLAT_WORDS} of the time"
        elif is_last and all(gain.least <= 1 + FLAT for gain in promising):
            reason = f"{more} would save time only if the noise scale stayed small"
        else:
            reason = f"it isn't certain that {more} would save more than {FLAT_WORDS} of the time"
        if is_sync or not is_last:
            return reason
        return (
            f"{reason}; whether fewer would, this recording can't tell, because late work was "
            "cancelled"
        )

    @property
    def gain(self) -> Gain:
        """How many times as fast as the baseline the best option reaches the target."""
        return self.best.gain_over(self.baseline)


def plan(
    cluster: Cluster,
    spec: RunSpec,
    convergence: Convergence,
    on_progress: Callable[[float], None] = lambda done: None,
    most: int | None = None,
    ran: int | None = None,
) -> Plan:
    """Compare every N for `spec.workers` machines, with late work handled as `spec.late` says.

    `on_progress` is called with the fraction of the work that is done. `most`: the largest N to
    compare, because the times say nothing about larger ones; None: all. `ran`: the N of the rule
    that was recorded; None: unknown.
    """
    cluster.validate(spec)
    only_times = cluster.times.is_stationary and cluster.network is None and not cluster.faults
    needed = np.arange(1, spec.workers + 1)
    updates = updates_needed(convergence, needed)
    # The axes of `seconds` and `resampled` are scenarios, replicates, N.
    if only_times:
        steps = steps_from_times(cluster, spec, on_progress)
        seconds = steps[spec.late] * updates[:, None, :]
        resampled = resampled_steps(steps[spec.late], cluster, spec) * updates[:, None, :]
        how = "all N are simulated with the same computation times"
    else:
        steps, seconds = steps_from_simulations(cluster, spec, convergence, on_progress)
        resampled = np.asarray(seconds[:, picks(seconds.shape[1], spec.seed)].mean(axis=2))
        how = "some N are simulated in full, and the others are interpolated"
    means = seconds.mean(axis=1)
    if not means[0, -1] > 0:
        raise SpecError("the plan needs computation times > 0, but all of them are 0")
    options = tuple(
        Option(
            machines=spec.workers,
            needed=int(n),
            step_s={late: float(each[:, i].mean()) for late, each in steps.items()},
            updates=float(updates[0, i]),
            seconds=float(means[0, i]),
            seconds_last=float(means[-1, i]),
            interval=_interval(resampled[0, :, i]),
        )
        for i, n in enumerate(needed[:most])
    )
    assumptions = (
        convergence.assumption,
        f"late work is {_verb(spec.late)}; {how}",
    )
    has_cheapest = only_times and len(options) == spec.workers
    return replace(
        _choose(options, means[:, :most], resampled[:, :, :most], ran),
        late=spec.late,
        cheapest=_cheapest(cluster, spec, convergence, options[-1]) if has_cheapest else None,
        assumptions=assumptions,
        intervals=_interval_meaning(cluster, convergence),
    )


def _choose(options: tuple[Option, ...], means: Floats, resampled: Floats, ran: int | None) -> Plan:
    """Choose one of the options, given the seconds to the target.

    The axes of `means` are scenarios and N, those of `resampled` scenarios, resamples and N.
    """
    workers, regret = options[0].machines, _regret(means)
    base = min(ran or workers, len(options)) - 1
    best = int(_least(regret))
    regrets = _regret(resampled)
    if base < workers - 1:
        is_sure = _interval(regrets[:, base] / regrets.min(axis=1)).low > 1 + FLAT
        is_better = np.all(means[:, base] > means[:, best] * (1 + FLAT))
        if not is_sure or (len(options) < workers and not is_better):
            best = base
    gains = means[:, base] / means[:, best]
    resampled_gains = resampled[:, :, base] / resampled[:, :, best]
    return Plan(
        options=options,
        baseline=options[base],
        best=options[best],
        best_backups=_interval(workers - 1 - _least(regrets)),
        gain_interval=Interval(
            _interval(resampled_gains[np.argmin(gains)]).low,
            _interval(resampled_gains[np.argmax(gains)]).high,
        ),
        flat=_flat(regret, best, workers),
    )


def _regret(seconds: Floats) -> Floats:
    """Return by which factor each N is slower than the best one in its worst scenario.

    The first axis of `seconds` is the scenarios, the last axis is N.
    """
    best = seconds.min(axis=-1, keepdims=True)
    return np.asarray((seconds / best).max(axis=0))


def _least(regret: Floats) -> Ints:
    """Return the index of the largest N whose regret is within `FLAT` of the smallest one."""
    is_good = regret <= regret.min(axis=-1, keepdims=True) * (1 + FLAT)
    return np.asarray(regret.shape[-1] - 1 - np.argmax(is_good[..., ::-1], axis=-1))


def _interval_meaning(cluster: Cluster, convergence: Convergence) -> str:
    what = (
        "how much the answer depends on the recorded period"
        if isinstance(cluster.times, Recorded)
        else "the error of the simulation, if the latency model is right"
    )
    if convergence.others:
        return f"{what}, and on the noise scale"
    return f"{what}; errors in the assumed number of updates are not included"


def _verb(late: Late) -> str:
    return "cancelled at once" if late == "cancel" else "finished and then dropped"


# -------------------------------------------------------------------------------------- uncertainty


def _interval(values: NDArray[np.generic]) -> Interval:
    low, high = np.percentile(values.astype(float), [2.5, 97.5])
    return Interval(float(low), float(high))


def _flat(regret: Floats, best: int, workers: int) -> tuple[int, int]:
    """Return the contiguous range of b around the best whose regret is within `FLAT` of it."""
    good = regret <= regret[best] * (1 + FLAT)
    low = high = best
    while low > 0 and good[low - 1]:
        low -= 1
    while high < len(regret) - 1 and good[high + 1]:
        high += 1
    return workers - 1 - high, workers - 1 - low


# --------------------------------------------------------------------------------------------- cost


def _cheapest(cluster: Cluster, spec: RunSpec, convergence: Convergence, sync: Option) -> Option:
    """Return the option with the fewest machine-hours, without the slowest machines if need be.

    It is no slower than sync on all machines.
    """
    expected = [cluster.times.mean(worker) for worker in range(spec.workers)]
    fastest_first = np.argsort(expected, kind="stable")
    samples = [times[fastest_first] for times in draw_replicates(cluster, spec, REPLICATES // 4)]
    cheapest = sync
    for machines in choose_some(spec.workers, CHEAPEST_DENSE).tolist():
        needed = choose_some(machines, CHEAPEST_DENSE)
        each = [mean_steps(cluster, times[:machines], needed, spec.late) for times in samples]
        step_s = np.mean(each, axis=0)
        updates = updates_needed(convergence, needed).max(axis=0)
        i = int(np.argmin(step_s * updates))
        option = Option(
            machines=machines,
            needed=int(needed[i]),
            step_s={spec.late: float(step_s[i])},
            updates=float(updates[i]),
            seconds=float(step_s[i] * updates[i]),
            seconds_last=float(step_s[i] * updates[i]),
            interval=None,
        )
        if option.seconds <= sync.seconds and option.machine_hours < cheapest.machine_hours:
            cheapest = option
    return cheapest
