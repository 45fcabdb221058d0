# SPDX-License-Identifier: BSD-3-Clause
"""The schedulers of a run, on the server, and how far each of them is.

Theory of operation
    Only the server's schedulers set learning rates that take effect. Workers report how their
    scripts call `scheduler.step()`. The first report decides what moves the scheduler on:

    epoch, call     the calls: the n-th call of any worker makes the n-th step, and the other
                    workers' n-th calls change nothing
    step            the turns of the worker that has had the most: a script without a loader calls
                    the scheduler once per turn
    mini-batch      the accepted gradients of all workers: as many steps per gradient as the script
                    makes calls per step of its optimizer, which is usually one
    metric          the metrics of worker 0
    given           the largest epoch that any worker's script has passed

Turns and gradients are counted here rather than in the workers, so a run that continues from a
checkpoint needs no calls from before it.
"""

import warnings
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR

from paceline.errors import ProtocolError
from paceline.run.tensors.state_spec import SchedulerCalls, SchedulerMode

__all__ = ["Schedules"]

_DESCRIPTIONS: dict[SchedulerMode, str] = {
    "epoch": "one step per epoch",
    "call": "one step per call in the script",
    "step": "one step per optimizer.step() of a worker",
    "metric": "steps with the metric of worker 0",
    "given": "steps to the epoch that the script passes",
}
_WITHOUT_PASSES = ("call", "step")


@dataclass
class _Schedule:
    """A scheduler and how far it is."""

    scheduler: LRScheduler
    optimizer: int
    mode: SchedulerMode | None = None  # None: no script has called it yet
    steps: int = 0  # that it has made; of "metric": the calls of worker 0
    ratio: tuple[int, int] = (0, 1)  # of "mini-batch": the script's calls and optimizer steps
    epoch: float | None = None  # not None iff "given"
    metrics: list[float] = field(default_factory=list)

    @property
    def description(self) -> str:
        """What moves the scheduler on, for the output of the server."""
        name, (calls, steps) = type(self.scheduler).__qualname__, self.ratio
        if self.mode is not None and self.mode != "mini-batch":
            return f"{name}: {_DESCRIPTIONS[self.mode]}"
        if calls and steps % calls == 0:
            if calls == steps:
                return f"{name}: one step per accepted mini-batch"
            return f"{name}: one step per {steps // calls} accepted mini-batches"
        return f"{name}: {calls / steps:.3g} steps per accepted mini-batch"

    def step_to(self, steps: int) -> None:
        """Make steps until it has made this many."""
        if isinstance(self.scheduler, OneCycleLR):  # which raises if it is stepped any further
            steps = min(steps, self.scheduler.total_steps)
        for _ in range(self.steps, steps):
            self.scheduler.step()
        self.steps = max(self.steps, steps)

    def step_to_epoch(self, epoch: float) -> None:
        """Step to an epoch that a script has passed, unless it is further already."""
        if self.epoch is None or epoch > self.epoch:
            self.epoch = epoch
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the script's own call has warned
                # An epoch may be a fraction, but torch's annotation says int.
                self.scheduler.step(epoch)  # type: ignore[arg-type]

    def step_with(self, metrics: Sequence[float], calls: int) -> None:
        """Step with the metrics of the latest of these calls, unless they are known already."""
        for call, metric in enumerate(metrics, calls - len(metrics) + 1):
            if call > self.steps:
                self.steps = call
                self.metrics.append(metric)
                self.scheduler.step(metric)  # type: ignore[arg-type] # a metric, not an epoch


class Schedules:
    """The schedulers of a run."""

    def __init__(self, optimizers: Sequence[Optimizer], schedulers: Iterable[LRScheduler]) -> None:
        self.contributions = [0] * len(optimizers)
        """The gradients that each optimizer has stepped along."""
        self._turns: list[dict[int, int]] = [{} for _ in optimizers]  # of each worker
        self._schedules = [
            _Schedule(scheduler, optimizers.index(scheduler.optimizer)) for scheduler in schedulers
        ]

    @property
    def steps(self) -> tuple[int, ...]:
        """The steps that each scheduler has made."""
        return tuple([schedule.steps for schedule in self._schedules])

    @property
    def epochs(self) -> dict[int, float]:
        """The latest epoch of each scheduler whose script passes one."""
        found = enumerate(schedule.epoch for schedule in self._schedules)
        return {number: epoch for number, epoch in found if epoch is not None}

    def check(self, calls: Iterable[SchedulerCalls]) -> None:
        """Raise ProtocolError if there is no such scheduler, or its epoch isn't finite."""
        for one in calls:
            if one.scheduler >= len(self._schedules):
                raise ProtocolError(f"there is no scheduler {one.scheduler}")
            if one.epoch is not None and not isfinite(one.epoch):
                raise ProtocolError(f"scheduler.step({one.epoch}) needs a finite epoch")

    def note_calls(self, worker: int, calls: Iterable[SchedulerCalls]) -> list[str]:
        """Step the schedulers that a worker's script has called.

        Returns a line for each scheduler whose mode is now known.
        """
        news = []
        for one in calls:
            schedule = self._schedules[one.scheduler]
            if not _may_change(schedule.mode, one.mode):
                continue
            is_new, schedule.mode = schedule.mode is None, one.mode
            schedule.ratio = (one.calls, max(1, one.steps))
            if is_new:
                news.append(schedule.description)
            if one.mode == "metric":
                schedule.step_with(one.metrics if worker == 0 else (), one.calls)
            elif one.epoch is not None:
                schedule.step_to_epoch(one.epoch)
            else:
                schedule.step_to(self._due(schedule, worker))
        return news

    def count_turn(self, worker: int, optimizer: int) -> None:
        """Note that a worker has reported a turn, whatever becomes of its gradient."""
        turns = self._turns[optimizer]
        turns[worker] = turns.get(worker, 0) + 1

    def count_step(self, optimizer: int, contributions: int) -> None:
        """Note that an optimizer has stepped along this many gradients."""
        self.contributions[optimizer] += contributions
        for schedule in self._schedules:
            if schedule.optimizer == optimizer and schedule.mode in ("step", "mini-batch"):
                schedule.step_to(self._due(schedule))

    def _due(self, schedule: _Schedule, reporter: int | None = None) -> int:
        """Return how many steps the scheduler should have made, as far as a report tells."""
        calls, steps = schedule.ratio
        if schedule.mode == "mini-batch":
            return self.contributions[schedule.optimizer] * calls // steps
        if schedule.mode == "step":
            turns = self._turns[schedule.optimizer]
            if reporter is not None:  # others may have reported the turn of the coming update
                return turns.get(reporter, 0)
            return max(turns.values(), default=0)
        return calls

    # ------------------------------------------------------------------------------------ state

    def state_dict(self, pending: Sequence[Iterable[int]] = ()) -> dict[str, Any]:
        """Return how far the schedulers are, for a checkpoint, as plain values.

        `pending`: by optimizer, the workers whose last turns aren't part of a version yet. A run
        that continues from the checkpoint computes and counts these turns again.
        """
        turns = [Counter(counted) for counted in self._turns]
        for counted, workers in zip(turns, pending, strict=False):
            counted.subtract(workers)
        return {
            "contributions": self.contributions,
            "turns": [sorted(counted.items()) for counted in turns],
            "schedulers": [
                [one.mode, one.steps, one.ratio, one.epoch, one.metrics] for one in self._schedules
            ],
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Bring new schedulers to where they were; this changes options of the optimizers.

        Raises ValueError if there was another number of schedulers.
        """
        there, here = len(saved["schedulers"]), len(self._schedules)
        if there != here:
            raise ValueError(f"it has {there} schedulers, the run has {here}")
        self.contributions = list(saved["contributions"])
        self._turns = [dict(turns) for turns in saved["turns"]]
        for schedule, values in zip(self._schedules, saved["schedulers"], strict=True):
            mode, steps, ratio, epoch, metrics = values
            # Or torch warns at the next call that the optimizer hasn't stepped.
            schedule.scheduler.optimizer._opt_called = True  # type: ignore[attr-defined]
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                if mode == "metric":
                    schedule.step_with(metrics, len(metrics))
                else:
                    schedule.step_to(steps)
            schedule.mode, schedule.steps, schedule.ratio = mode, steps, tuple(ratio)
            if epoch is not None:
                schedule.step_to_epoch(epoch)


def _may_change(known: SchedulerMode | None, reported: SchedulerMode) -> bool:
    """Return whether a scheduler may go on as reported; the first calls of a run decide."""
    if known is None or known == reported:
        return True
    return reported == "given" or {known, reported} == set(_WITHOUT_PASSES)
