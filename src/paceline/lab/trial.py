# SPDX-License-Identifier: BSD-3-Clause
"""One training run of the lab: all that it depends on, and what came of it.

A trial is a value, and its outcome follows from it; so an outcome can be kept under a digest of the
trial, and need not be computed twice.
"""

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields
from math import ceil, nan
from statistics import fmean

import msgspec

from paceline.core.decider import Decider
from paceline.core.events import Fate
from paceline.core.policies import parse_policy
from paceline.lab.problem import Problem
from paceline.lab.recipe import Recipe
from paceline.lab.training import Row
from paceline.sim.cluster import Cluster
from paceline.sim.simulate import simulate
from paceline.spec import Late, RunSpec
from paceline.trace.schema import Gradient, Trace, Update

__all__ = ["Outcome", "Trial", "gradients_of"]

REVISION = 2
"""Raised when outcomes change though trials do not, so that none is taken from before."""


def gradients_of(policy: str, workers: int) -> int:
    """How many make an update under this rule, with all workers there."""
    rule, spec = parse_policy(policy), RunSpec(workers=workers, steps=1)
    rule.validate(spec)
    return rule.needed(Decider(rule, spec).ledger)


@dataclass(frozen=True)
class Trial:
    """Who trains what, under which rule, on which machines, and for how long."""

    problem: Problem
    recipe: Recipe
    policy: str
    workers: int
    latency: str
    epochs: float
    """How much data is used; what is dropped is not."""
    network: str = ""
    """Such as "model=100MB,bandwidth=1.25GB"; without one, nothing that is sent takes time."""
    faults: str = ""
    late: Late = "cancel"
    rows: int = 20
    """How often the model is evaluated, beside the beginning."""
    target: str = ""
    """Such as "accuracy>=0.97": at the first row that has reached it, the trial ends."""

    @property
    def spec(self) -> RunSpec:
        """The run that is simulated; its luck is the problem's seed's."""
        samples = self.epochs * self.problem.samples
        batch = self.problem.batch * gradients_of(self.policy, self.workers)
        steps = ceil(samples / batch)
        return RunSpec(workers=self.workers, steps=steps, late=self.late, seed=self.problem.seed)

    def simulate(self) -> Trace:
        """Its machines on the clock of the simulator."""
        batch = self.problem.batch
        cluster = Cluster.parse(self.latency, self.network, self.faults, batch=batch)
        return simulate(self.policy, cluster, self.spec)

    def digest(self) -> str:
        """The same for the same trial, whatever the machine."""
        parts = {part.name: getattr(self, part.name) for part in fields(self)}
        parts["problem"] = {
            "name": self.problem.name,
            **{f.name: getattr(self.problem, f.name) for f in fields(self.problem) if f.compare},
        }
        known = msgspec.json.encode({"revision": REVISION, **parts}, order="sorted")
        return hashlib.sha256(known).hexdigest()[:20]


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What came of a trial."""

    rows: list[Row]
    is_diverged: bool
    updates: int  # that were made
    seconds: float  # of virtual time until then
    staleness: float  # of the gradients that were used, on average
    used: int  # gradients
    dropped: int  # gradients that were whole
    cancelled: int  # gradients

    @classmethod
    def of(cls, trace: Trace, rows: Sequence[Row], updates: int, *, is_diverged: bool) -> "Outcome":
        """What came of a run of which so many updates were made."""
        seconds, versions, fates = 0.0, 0, Counter[Fate]()
        stalenesses: list[int] = []
        for record in trace.records:
            if versions == updates:
                break
            if isinstance(record, Update):
                seconds, versions = record.t, record.update
            elif isinstance(record, Gradient):
                fates[record.fate] += 1
                if record.fate is Fate.ACCEPTED:
                    stalenesses.append(record.staleness)
        return cls(
            rows=list(rows),
            is_diverged=is_diverged,
            updates=updates,
            seconds=seconds,
            staleness=fmean(stalenesses or [0]),
            used=fates[Fate.ACCEPTED],
            dropped=fates[Fate.LATE] + fates[Fate.STALE],
            cancelled=fates[Fate.CANCELLED],
        )

    def last(self, score: str) -> float:
        """The value at the end; NaN where the training came to no end."""
        return nan if self.is_diverged else self.rows[-1].scores[score]
