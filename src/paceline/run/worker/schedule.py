# SPDX-License-Identifier: BSD-3-Clause
"""Schedulers of a run: the learning rate follows the version, not the calls of a script.

As with an optimizer, `follow` turns a scheduler into one that is also of its own class. Nothing is
put into the scheduler itself, so that its state is that of a plain one.
"""

from typing import Any, ClassVar
from warnings import warn

from torch.optim.lr_scheduler import LRScheduler

from paceline.errors import SpecError

__all__ = ["advance", "follow"]


SELDOM = 5  # a scheduler that is not called in so many steps is meant for epochs


class _Following(LRScheduler):
    """A scheduler that is stepped by `advance` alone. Each has a class and a count of its own."""

    uncalled: ClassVar[int] = 0  # steps since the script has called it

    def step(self, epoch: int | None = None) -> None:
        """Do nothing: each update makes a step."""
        type(self).uncalled = 0


class _FollowingServer(_Following):
    """Such a one in a worker, where the server's counts."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Refused: the server would not know of it."""
        raise SpecError(
            "load the state of a scheduler before run.prepare(): after it the learning rate is the "
            "server's, and what is loaded here would be lost"
        )


def follow(scheduler: LRScheduler, server: bool) -> None:
    """Let the script's own calls do nothing; with `server`, let nobody load a state into it."""
    kind, ours = type(scheduler), _FollowingServer if server else _Following
    scheduler.__class__ = type(kind.__name__, (ours, kind), {"__doc__": kind.__doc__})


def advance(scheduler: LRScheduler, steps: int = 1) -> None:
    """Make steps that the scheduler itself would make."""
    assert isinstance(scheduler, _Following)
    ours = type(scheduler)
    ours.uncalled += 1
    if ours.uncalled == SELDOM:  # and not when it is called: the first epoch may never end
        warn(
            f"{ours.__name__}.step() was not called in {SELDOM} steps of the optimizer, as if it "
            "were meant for epochs; a prepared scheduler makes a step with each update, whoever "
            "calls it: count its periods in updates, and call it in each pass",
            stacklevel=2,
        )
    for _ in range(steps):
        super(_Following, scheduler).step()
