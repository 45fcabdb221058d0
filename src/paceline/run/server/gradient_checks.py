# SPDX-License-Identifier: BSD-3-Clause
"""What must hold of a gradient that a worker announces, before it becomes an event."""

from paceline.core.decider import Decider
from paceline.errors import ProtocolError
from paceline.run.net.messages import GradientReport
from paceline.run.tensors.shard import Shard

__all__ = ["check_gradient", "is_of_another_optimizer"]


def check_gradient(decider: Decider, shard: Shard, worker: int, gradient: GradientReport) -> None:
    """Raise ProtocolError unless it can be a gradient of this run."""
    parameters = shard.common.parameters
    if gradient.optimizer >= len(parameters):
        raise ProtocolError(f"there is no optimizer {gradient.optimizer}")
    if gradient.unused and max(gradient.unused) >= len(parameters[gradient.optimizer]):
        raise ProtocolError(f"there is no parameter {max(gradient.unused)}")
    if gradient.cancelled and decider.would_accept(worker):
        raise ProtocolError(f"nobody has cancelled turn {gradient.turn}")


def is_of_another_optimizer(
    decider: Decider, shard: Shard, worker: int, gradient: GradientReport
) -> bool:
    """Whether others have begun the same update with another optimizer.

    Rules that mix the turns of workers mix their optimizers too; all others keep in step.
    """
    member = decider.ledger.members.get(worker)
    if decider.policy.repeats or member is None or member.work is None:
        return False
    other = shard.optimizer_of(member.work.update)
    return other is not None and other != gradient.optimizer
