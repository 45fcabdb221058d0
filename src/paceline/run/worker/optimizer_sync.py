# SPDX-License-Identifier: BSD-3-Clause
"""Keeps the settings of a worker's optimizers in step with the server's.

The server's optimizers are the ones that step. Their learning rates and other options reach a
worker's script in two ways: the worker advances its own schedulers as often as the server's
optimizers have stepped, and it takes over what other workers' scripts have changed by hand.
"""

from collections.abc import Sequence
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from paceline.run.tensors.group_options import KnownOptions, set_option
from paceline.run.tensors.state_spec import OptionChange
from paceline.run.worker.lr_schedulers import advance

__all__ = ["OptimizerSettings"]


class OptimizerSettings:
    """The options and schedulers of a worker's optimizers."""

    def __init__(self, optimizers: Sequence[Optimizer], schedulers: Sequence[LRScheduler]) -> None:
        self._optimizers = optimizers
        self._schedulers: list[list[LRScheduler]] = [[] for _ in optimizers]
        for scheduler in schedulers:
            self._schedulers[optimizers.index(scheduler.optimizer)].append(scheduler)
        self._steps = [0] * len(optimizers)
        self._known = KnownOptions(optimizers)

    def changed(self) -> tuple[OptionChange, ...]:
        """Return what the script has changed since the server last knew."""
        return tuple(self._known.changed())

    def follow(self, steps: Sequence[int], options: Sequence[OptionChange]) -> None:
        """Follow the server, whose optimizers have made `steps` steps and have these options."""
        has_changed = bool(options)
        for i, count in enumerate(steps):
            if count > self._steps[i]:  # a restored server may be behind: wait until it isn't
                for scheduler in self._schedulers[i]:
                    advance(scheduler, count - self._steps[i])
                    has_changed = True
                self._steps[i] = count
        for option in options:
            set_option(self._optimizers, option)
        if has_changed:
            self._known.read()

    def adopt(self, optimizer: int, state: dict[str, Any]) -> None:
        """Take over the options of a `state_dict` that the server has loaded."""
        groups = self._optimizers[optimizer].param_groups
        for group, given in zip(groups, state["param_groups"], strict=True):
            group.update({name: value for name, value in given.items() if name != "params"})
        self._known.read()
