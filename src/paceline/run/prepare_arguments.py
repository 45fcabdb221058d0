# SPDX-License-Identifier: BSD-3-Clause
"""What a script passes to `run.prepare()`: sorted by kind, and checked."""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from paceline.errors import SpecError

__all__ = ["Prepared"]


@dataclass(frozen=True)
class Prepared:
    """What a script passes to `run.prepare()`, sorted by kind."""

    given: tuple[Any, ...]
    models: list[nn.Module]
    optimizers: list[Optimizer]
    schedulers: list[LRScheduler]
    loaders: list[Any]

    @classmethod
    def sort(cls, given: Sequence[Any]) -> "Prepared":
        """Sort the objects; raises SpecError for one that a run can't use."""
        prepared = cls(tuple(given), [], [], [], [])
        for one in given:
            if isinstance(one, nn.Module):
                prepared.models.append(one)
            elif isinstance(one, Optimizer):
                prepared.optimizers.append(one)
            elif isinstance(one, LRScheduler):
                prepared.schedulers.append(one)
            elif _is_list_of_objects(one):
                raise SpecError(
                    "pass models and optimizers to run.prepare() one by one, not in lists"
                )
            elif hasattr(one, "__iter__") and not isinstance(one, str | bytes):
                prepared.loaders.append(one)
            else:
                raise SpecError(
                    "run.prepare() takes models, optimizers, schedulers and loaders, got "
                    f"{type(one).__qualname__}"
                )
        for scheduler in prepared.schedulers:
            if scheduler.optimizer not in prepared.optimizers:
                raise SpecError(
                    f"{type(scheduler).__qualname__} was passed to run.prepare() without its "
                    "optimizer; pass both"
                )
        return prepared

    def check(self) -> None:
        """Raise SpecError unless a server can train these."""
        if not self.optimizers:
            raise SpecError("run.prepare() needs at least one optimizer, got none")
        for optimizer in self.optimizers:
            closure = inspect.signature(type(optimizer).step).parameters.get("closure")
            if closure is not None and closure.default is closure.empty:
                raise SpecError(
                    f"{type(optimizer).__qualname__} needs a closure, which the server can't call; "
                    "use an optimizer that steps without one"
                )


def _is_list_of_objects(one: Any) -> bool:
    return isinstance(one, list | tuple) and any(
        isinstance(item, nn.Module | Optimizer | LRScheduler) for item in one
    )
