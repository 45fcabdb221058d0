# SPDX-License-Identifier: BSD-3-Clause
"""Remembers a scheduler before its first step, so that it can go back with a restored server."""

from collections import deque
from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from paceline.run.tensors.group_options import all_options, set_option

__all__ = ["SchedulerSnapshot", "copied"]


class SchedulerSnapshot:
    """A scheduler and the options of its optimizer as they are now.

    `state_dict()` isn't enough, because a script's own scheduler may not implement it.
    """

    def __init__(self, scheduler: LRScheduler) -> None:
        self._optimizers = [scheduler.optimizer]
        self._options = all_options(self._optimizers)
        self._attributes = [(one, copied(vars(one))) for one in _with_nested(scheduler)]

    def restore(self) -> None:
        """Bring the scheduler and the options back to where they were."""
        for one, attributes in self._attributes:
            vars(one).update(copied(attributes))
        for option in self._options:
            set_option(self._optimizers, option)


def _with_nested(scheduler: LRScheduler) -> Iterator[LRScheduler]:
    """Yield the scheduler and those that it consists of, such as those of a SequentialLR."""
    yield scheduler
    for value in vars(scheduler).values():
        for one in value if isinstance(value, list | tuple) else [value]:
            if isinstance(one, LRScheduler):
                yield from _with_nested(one)


def copied(value: Any) -> Any:
    """Return a copy of numbers, tensors and what contains them; other objects stay the same."""
    if isinstance(value, Tensor):
        return value.clone()
    if type(value) is dict:
        return {name: copied(part) for name, part in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(copied, value))
    if isinstance(value, deque):
        return value.copy()
    return value
