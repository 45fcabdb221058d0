# SPDX-License-Identifier: BSD-3-Clause
"""Keeps the settings of a worker's optimizers in step with the server's.

The server's optimizers are the ones that step. Their learning rates and other options reach a
worker's script in two ways: the worker's schedulers follow the server's, and the worker takes over
what other workers' scripts have changed by hand. The server learns with the next gradient what the
script has changed, so until then only the script's optimizer has the new options.
"""

from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from paceline.errors import SpecError
from paceline.run.tensors.group_options import KnownOptions, set_option
from paceline.run.tensors.state_spec import OptionChange, SchedulerCalls
from paceline.run.worker.lr_schedulers import Follower, TrainingPasses

__all__ = ["OptimizerSettings", "SettingChanges"]


class SettingChanges(NamedTuple):
    """What a script has done to its optimizers since the server last knew."""

    options: tuple[OptionChange, ...] = ()
    schedulers: tuple[SchedulerCalls, ...] = ()


class OptimizerSettings:
    """The options and schedulers of a worker's optimizers."""

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        schedulers: Sequence[LRScheduler],
        worker: int,
        passes: TrainingPasses,
    ) -> None:
        self._optimizers = optimizers
        self._known = KnownOptions(optimizers)
        self._followers = [
            Follower(
                scheduler,
                number,
                optimizers.index(scheduler.optimizer),
                worker,
                passes,
                self._known,
            )
            for number, scheduler in enumerate(schedulers)
        ]
        self._has_joined = False  # a server that it hasn't followed yet

    def count_push(self, optimizer: int) -> None:
        """Note that the script has called `step()` of this optimizer."""
        for follower in self._followers:
            follower.count_push(optimizer)

    def settle(self, optimizer: int, contributors: int) -> None:
        """Note how many gradients the update has that the last push went into; 0: none."""
        for follower in self._followers:
            follower.settle(optimizer, contributors)

    def changes(self, optimizer: int) -> SettingChanges:
        """Return what the server should know before it gets a gradient of this optimizer."""
        reports = [follower.report(optimizer) for follower in self._followers]
        found = tuple([report for report in reports if report is not None])
        return SettingChanges(tuple(self._known.changed()), found)

    def join(self) -> None:
        """Note that the worker has joined a server, which may be behind the last one."""
        self._has_joined = True

    def follow(
        self,
        version: int,
        steps: Sequence[int],
        epochs: Mapping[int, float],
        options: Sequence[OptionChange],
    ) -> None:
        """Follow the server, whose schedulers are at these steps and epochs at this version.

        Raises SpecError if the server has other schedulers.
        """
        if len(steps) != len(self._followers):
            raise SpecError(
                f"run.prepare() got {len(self._followers)} schedulers here and {len(steps)} on the "
                "server; pass the same ones in every process"
            )
        for follower in self._followers:
            follower.set_version(version)
        has_joined, self._has_joined = self._has_joined, False
        if has_joined:
            for follower, count in zip(self._followers, steps, strict=True):
                follower.join(count)
        if not options and not self._are_behind(steps, epochs):
            return
        with self._known.change():
            for number, follower in enumerate(self._followers):
                if has_joined and options:  # the options of a new server replace all options here
                    follower.go_back(steps[number], epochs.get(number))
                follower.follow(steps[number], epochs.get(number))
                if options:  # their values are from after these steps
                    follower.catch_up()
            for option in options:
                set_option(self._optimizers, option)
            self._known.learn(options)
            for follower in self._followers:
                follower.read_rates()
                follower.repeat_calls()

    def _are_behind(self, steps: Sequence[int], epochs: Mapping[int, float]) -> bool:
        pairs = enumerate(self._followers)
        return any(one.is_behind(steps[number], epochs.get(number)) for number, one in pairs)

    def catch_up(self) -> None:
        """Make the steps that the schedulers have put off until the script's next batch."""
        if any(follower.has_steps_to_make for follower in self._followers):
            with self._known.change():
                for follower in self._followers:
                    follower.catch_up()

    def put_own_options(self, optimizer: int, state: dict[str, Any]) -> None:
        """Put the options that the server may not have into a state of its optimizer."""
        changed = self._known.unreported()
        options = {(one.group, one.name) for one in changed if one.optimizer == optimizer}
        for follower in self._followers:
            if follower.optimizer == optimizer:
                options |= follower.own_options
        groups = self._optimizers[optimizer].param_groups
        for index, name in options:
            group, value = state["param_groups"][index], groups[index][name]
            if isinstance(group.get(name), Tensor) and isinstance(value, Real | Tensor):
                group[name] = torch.full_like(group[name], float(value))
            else:
                group[name] = value.item() if isinstance(value, Tensor) else value

    def adopt(self, optimizer: int, state: dict[str, Any]) -> None:
        """Take over the options of a `state_dict` that the server has loaded."""
        groups = self._optimizers[optimizer].param_groups
        for group, given in zip(groups, state["param_groups"], strict=True):
            group.update({name: value for name, value in given.items() if name != "params"})
        self._known.read_all()
