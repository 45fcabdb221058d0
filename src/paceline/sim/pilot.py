# SPDX-License-Identifier: BSD-3-Clause
"""What a recorded run, the pilot, says about the choice of b, and whether to trust it.

The planner simulates with the times of the pilot. As a check, it simulates the pilot itself. If
that gives a wrong time per update, the time with other numbers of backups is wrong, too.

While workers join or leave, or the run is paused, updates take longer, and so do the first
gradients of a process. Both are left out until the next update is made, and so is what surrounds a
gap in the trace.

Two kinds of runs are refused although their times are known. Workers that share cores slow each
other down, so their times depend on how many of them compute, and with it on the rule. And with
several optimizers, as in a GAN, there is no such thing as the noise scale of the updates.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf
from statistics import fmean

import numpy as np

from paceline.core.policies import Backup, Sync, parse_policy
from paceline.core.policy import Policy
from paceline.errors import SpecError
from paceline.sim.cluster import Cluster
from paceline.sim.recorded_times import UPDATES_MIN, Recording, recorded_times
from paceline.sim.simulate import simulate
from paceline.sim.step_times import draw_replicates, mean_steps
from paceline.spec import RunSpec
from paceline.trace.schema import (
    Gap,
    Gradient,
    Header,
    Joined,
    Left,
    Paused,
    Record,
    Restored,
    Resumed,
    Trace,
    Update,
)

__all__ = ["Pilot", "study"]

ERROR_MAX = 0.05  # of the simulated time of an update
# Workers compute at the same time, right after an update. If together they keep the cores busy for
# a quarter of it, leaving out one of eight changes its time by 3 %.
BUSY_MAX = 0.25
RECENT = 20_000  # records at the end of the trace: enough, and the future resembles them most
REPLICATES = 5
SIMULATED_UPDATES = 5_000  # of a rule without a formula

_INTERRUPTIONS = (Joined, Left, Paused, Resumed, Restored, Gap)


@dataclass(frozen=True, slots=True)
class Pilot:
    """A run that can be planned from."""

    trace: Trace  # the part that counts
    recording: Recording
    own_s: float  # how long its updates took, on average
    simulated_s: float  # the same in a simulation with its times

    @property
    def needed(self) -> int | None:
        """The number of gradients that an update waited for; None: its rule has no such number."""
        header = self.trace.header
        return _needed(parse_policy(header.policy), header.workers)

    @property
    def error(self) -> float:
        """By how much the simulation is off; 0.1 is 10 %."""
        return self.simulated_s / self.own_s - 1

    def agreement(self) -> str:
        """Return in words how well a simulation repeats its own updates."""
        own, simulated = (f"{1000 * s:.4g} ms" for s in (self.own_s, self.simulated_s))
        return (
            f"an update of the recorded run took {own} on average, and takes {simulated} "
            f"({100 * self.error:+.1f} %) in a simulation with its times"
        )


def study(trace: Trace, seed: int) -> Pilot:
    """Return what the trace says; raise `SpecError` with the reason if it can't be relied on."""
    header, records = _latest_part(trace)
    if header.optimizers > 1:
        raise SpecError(
            f"the script has {header.optimizers} optimizers, and the planner understands only the "
            "updates of one; try several rules with paceline compare instead"
        )
    calm, lasted = _without_interruptions(records[-RECENT:])
    part = Trace(header, calm if lasted else records)
    recording = recorded_times(part, seed, with_travel=True)
    if len(recording.times) < 2:
        raise SpecError("the run had one worker, so there is no other that it could wait for")
    if len(lasted) < UPDATES_MIN:
        raise SpecError(
            f"a plan needs at least {UPDATES_MIN} updates while no worker joins or leaves, and the "
            f"run made {len(lasted)}; record a longer run"
        )
    if not fmean(lasted) > 0:
        raise SpecError("the updates of the run took no time, so there is nothing to plan")
    _check_cores(part, sum(lasted))
    policy = parse_policy(header.policy)
    pilot = Pilot(part, recording, fmean(lasted), _simulate(policy, header, recording, seed))
    if abs(pilot.error) > ERROR_MAX:
        raise SpecError(
            f"{pilot.agreement()}, so simulations of other rules would be wrong, too; record a "
            "longer run, or one under sync, which cancels nothing"
        )
    return pilot


def _latest_part(trace: Trace) -> tuple[Header, list[Record]]:
    """Return the part since a user resumed the run, perhaps with another rule."""
    header, begin = trace.header, 0
    for i, record in enumerate(trace.records):
        if isinstance(record, Restored) and record.resumed:
            header, begin = record.header, i
    return header, trace.records[begin:]


def _without_interruptions(records: Sequence[Record]) -> tuple[list[Record], list[float]]:
    """Leave out the gradients that an interruption may have delayed.

    Also returns how long each update took that was made without an interruption.
    """
    calm: list[Record] = []
    lasted: list[float] = []
    before = -inf  # when the last update was made
    is_calm = False
    since = -inf  # when the first update after the last interruption was made
    for record in records:
        if isinstance(record, Update):
            if is_calm:
                lasted.append(record.t - before)
            else:
                since = record.t
            before, is_calm = record.t, True
        elif isinstance(record, _INTERRUPTIONS):
            is_calm = False
        if not isinstance(record, Gradient) or (is_calm and record.asked_at >= since):
            calm.append(record)
    return calm, lasted


def _check_cores(trace: Trace, lasted_s: float) -> None:
    """Raise `SpecError` if the workers are more than the cores, and keep them busy."""
    workers, cores = trace.header.workers, trace.header.cores
    if not cores or workers <= cores:
        return
    used_s = sum(g.cpu_s for g in trace.gradients()) + sum(u.apply_s for u in trace.updates())
    busy = used_s / (lasted_s * cores)
    if busy > BUSY_MAX:
        shared = "1 core and keep it" if cores == 1 else f"{cores:g} cores and keep them"
        raise SpecError(
            f"the {workers} workers share {shared} busy for {100 * min(1, busy):.0f} % of the "
            "time, so they slow each other down, and backups would change by how much; try several "
            "rules with paceline compare, or record a run with a core for each worker"
        )


def _simulate(policy: Policy, header: Header, recording: Recording, seed: int) -> float:
    """Return the mean time of an update of this rule with the recorded times."""
    cluster = replace(Cluster.parse("0s"), times=recording.model())
    spec = RunSpec(workers=len(recording.times), late=header.late, seed=seed)
    needed = _needed(policy, spec.workers)
    if needed is not None:
        return fmean(
            float(mean_steps(cluster, times, np.array([needed]), spec.late)[0])
            for times in draw_replicates(cluster, spec, REPLICATES)
        )
    trace = simulate(policy, cluster, replace(spec, steps=SIMULATED_UPDATES))
    _, lasted = _without_interruptions(trace.records)
    return fmean(lasted)


def _needed(policy: Policy, workers: int) -> int | None:
    """Return N under `sync` and `backup`; None: another rule."""
    if isinstance(policy, Backup):
        return max(1, workers - policy.b)
    return workers if isinstance(policy, Sync) else None
