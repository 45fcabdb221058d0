# SPDX-License-Identifier: BSD-3-Clause
"""Schedulers of a run: the learning rate follows the version, not the calls of a script.

As with an optimizer, `follow` turns a scheduler into one that is also of its own class. Nothing is
put into the scheduler itself, so that its state is that of a plain one.
"""

from typing import Any

from torch.optim.lr_scheduler import LRScheduler

from paceline.errors import SpecError

__all__ = ["advance", "follow"]


class _Following(LRScheduler):
    """A scheduler that is stepped by `advance` alone."""

    def step(self, epoch: int | None = None) -> None:
        """Do nothing: each update makes a step."""


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


def advance(scheduler: LRScheduler) -> None:
    """Make the step that the scheduler itself would make."""
    assert isinstance(scheduler, _Following)
    super(_Following, scheduler).step()
