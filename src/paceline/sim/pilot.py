# SPDX-License-Identifier: BSD-3-Clause
"""What a recorded run, the pilot, says about the choice of b, and whether to trust it.

The planner draws from the times of the pilot. As a check, the same draws predict how long an update
of the pilot itself takes. If they are wrong about that, they are wrong about other numbers of
backups, too.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean

import numpy as np

from paceline.core.policies import Backup, Sync, parse_policy
from paceline.core.policy import Policy
from paceline.errors import SpecError
from paceline.sim.cluster import Cluster
from paceline.sim.recorded_times import Recording, recorded_times
from paceline.sim.simulate import simulate
from paceline.sim.step_times import draw_replicates, mean_steps
from paceline.spec import RunSpec
from paceline.trace.schema import (
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

UPDATES_MIN = 30  # with fewer, one slow update changes the advice
ERROR_MAX = 0.05  # of the predicted time of an update
REPLICATES = 5
SIMULATED_UPDATES = 500

_INTERRUPTIONS = (Joined, Left, Paused, Resumed, Restored)


@dataclass(frozen=True, slots=True)
class Pilot:
    """A run that can be planned from."""

    header: Header
    recording: Recording
    own_s: float  # how long its updates took, on average
    predicted_s: float  # what draws from its times say

    @property
    def error(self) -> float:
        """By how much the prediction is off; 0.1 is 10 %."""
        return self.predicted_s / self.own_s - 1

    def agreement(self) -> str:
        """Return in words how well draws from its times predict its own updates."""
        return (
            f"an update of the recorded run took {1000 * self.own_s:.4g} ms; draws from its times "
            f"predict {1000 * self.predicted_s:.4g} ms ({100 * self.error:+.1f} %)"
        )


def study(trace: Trace, seed: int) -> Pilot:
    """Return what the trace says; raise `SpecError` with the reason if it can't be relied on."""
    header, records = _latest_part(trace)
    recording = recorded_times(Trace(header, records), seed, with_travel=True)
    if len(recording.times) < 2:
        raise SpecError("the run had one worker, so it has no stragglers to plan for")
    lasted = _undisturbed(records)
    if len(lasted) < UPDATES_MIN:
        raise SpecError(
            f"the run made {len(lasted)} updates without interruption, and a plan needs at least "
            f"{UPDATES_MIN}"
        )
    policy = parse_policy(header.policy)
    pilot = Pilot(header, recording, fmean(lasted), _predict(policy, header, recording, seed))
    if abs(pilot.error) > ERROR_MAX:
        raise SpecError(
            f"{pilot.agreement()}, so they would mislead about other numbers of backups; record a "
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


def _undisturbed(records: Sequence[Record]) -> list[float]:
    """Return how long updates took while no worker came or left, and the run wasn't paused."""
    lasted: list[float] = []
    before: float | None = None
    for record in records:
        if isinstance(record, Update):
            if before is not None:
                lasted.append(record.t - before)
            before = record.t
        elif isinstance(record, _INTERRUPTIONS):
            before = None
    return lasted


def _predict(policy: Policy, header: Header, recording: Recording, seed: int) -> float:
    """Return the mean time of an update of this rule with times drawn from the recording."""
    cluster = replace(Cluster.parse("0s"), times=recording.model())
    spec = RunSpec(workers=len(recording.times), late=header.late, seed=seed)
    if isinstance(policy, Sync | Backup):
        backups = policy.b if isinstance(policy, Backup) else 0
        needed = np.array([max(1, spec.workers - backups)])
        replicates = draw_replicates(cluster, spec, REPLICATES)
        return fmean(
            float(mean_steps(cluster, times, needed, spec.late)[0]) for times in replicates
        )
    trace = simulate(policy, cluster, replace(spec, steps=SIMULATED_UPDATES))
    return fmean(_undisturbed(trace.records))
