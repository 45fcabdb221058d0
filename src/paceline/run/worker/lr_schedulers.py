# SPDX-License-Identifier: BSD-3-Clause
"""Schedulers of a run: the learning rate depends on the version, not on the script's calls.

Like `pace` for optimizers, `follow` replaces a scheduler's class with a subclass of it. The
scheduler's attributes don't change, so its `state_dict()` is that of a plain one.
"""

from typing import Any, ClassVar
from warnings import warn

from torch.optim.lr_scheduler import LRScheduler

from paceline.errors import SpecError

__all__ = ["advance", "follow"]


UNCALLED_STEPS = 5  # a scheduler that isn't called in this many steps is meant for epochs


class _Following(LRScheduler):
    """A scheduler that only `advance` steps. Each has a class, and so a count, of its own."""

    uncalled: ClassVar[int] = 0  # steps since the script last called it

    def step(self, epoch: int | None = None) -> None:
        """Do nothing: every update makes a step."""
        type(self).uncalled = 0


class _FollowingServer(_Following):
    """A scheduler in a worker, which follows the one on the server."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Refuse: the server wouldn't know."""
        raise SpecError(
            "load the state of a scheduler before run.prepare(): during a run the server sets the "
            "learning rate, and a state loaded in a worker would be lost"
        )


def follow(scheduler: LRScheduler, server: bool) -> None:
    """Make the script's calls of `step` do nothing; with `server`, also refuse to load a state."""
    kind, ours = type(scheduler), _FollowingServer if server else _Following
    scheduler.__class__ = type(kind.__name__, (ours, kind), {"__doc__": kind.__doc__})


def advance(scheduler: LRScheduler, steps: int = 1) -> None:
    """Make this many real steps."""
    assert isinstance(scheduler, _Following)
    ours = type(scheduler)
    ours.uncalled += 1
    if ours.uncalled == UNCALLED_STEPS:  # don't wait for the call: the first epoch may never end
        warn(
            f"{ours.__name__}.step() was not called in {UNCALLED_STEPS} steps of the optimizer, so "
            "it may be meant for epochs; a prepared scheduler makes one step with every update: "
            "count its periods in updates, and call it after every optimizer.step()",
            stacklevel=2,
        )
    for _ in range(steps):
        super(_Following, scheduler).step()
