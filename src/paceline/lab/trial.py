# SPDX-License-Identifier: BSD-3-Clause
"""One training run of the lab: everything it depends on, and its result.

A trial is a value, and its result follows from it. So a result can be stored under a digest of the
trial and need not be computed twice.
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

__all__ = ["Trial", "TrialResult", "gradients_per_update"]

REVISION = 2
"""Raise this when results change although trials don't, so that old stored results aren't used."""


def gradients_per_update(policy: str, workers: int) -> int:
    """Return how many gradients make an update under this rule while all workers are alive."""
    rule, spec = parse_policy(policy), RunSpec(workers=workers, steps=1)
    rule.validate(spec)
    return rule.needed(Decider(rule, spec).ledger)


@dataclass(frozen=True)
class Trial:
    """What to train, how, under which rule, on which workers, and for how long."""

    problem: Problem
    recipe: Recipe
    policy: str
    workers: int
    latency: str
    epochs: float
    """How much data the updates use; dropped gradients don't count."""
    network: str = ""
    """Such as "model=100MB,bandwidth=1.25GB"; if empty, sending takes no time."""
    faults: str = ""
    late: Late = "cancel"
    rows: int = 20
    """How often to evaluate the model, besides once at the start."""
    target: str = ""
    """Such as "accuracy>=0.97"; the trial ends at the first evaluation that reaches it."""

    @property
    def spec(self) -> RunSpec:
        """The run to simulate, with the problem's seed."""
        samples = self.epochs * self.problem.samples
        batch = self.problem.batch * gradients_per_update(self.policy, self.workers)
        steps = ceil(samples / batch)
        return RunSpec(workers=self.workers, steps=steps, late=self.late, seed=self.problem.seed)

    def simulate(self) -> Trace:
        """Simulate the run and return its trace."""
        batch = self.problem.batch
        cluster = Cluster.parse(self.latency, self.network, self.faults, batch=batch)
        return simulate(self.policy, cluster, self.spec)

    def digest(self) -> str:
        """Return a key for the stored result, the same on every machine.

        It covers the names and values of the fields of trial, recipe and problem, and the problem's
        `name`. So renaming a field orphans stored results; renaming a class or module doesn't.
        """
        parts = {part.name: getattr(self, part.name) for part in fields(self)}
        parts["problem"] = {
            "name": self.problem.name,
            **{f.name: getattr(self.problem, f.name) for f in fields(self.problem) if f.compare},
        }
        known = msgspec.json.encode({"revision": REVISION, **parts}, order="sorted")
        return hashlib.sha256(known).hexdigest()[:20]


class TrialResult(msgspec.Struct, frozen=True, kw_only=True):
    """What a trial measured."""

    rows: list[Row]
    is_diverged: bool
    updates: int
    seconds: float  # of virtual time, until the last update
    staleness: float  # mean over the gradients used
    used: int  # gradients
    dropped: int  # gradients that were finished
    cancelled: int  # gradients

    @classmethod
    def of(
        cls, trace: Trace, rows: Sequence[Row], updates: int, *, is_diverged: bool
    ) -> "TrialResult":
        """Summarize a run of which only the first `updates` were made."""
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
        """Return the final value of a score; NaN if the training diverged."""
        return nan if self.is_diverged else self.rows[-1].scores[score]
