# SPDX-License-Identifier: BSD-3-Clause
"""Checks on the report of a gradient, before it becomes an event."""

from paceline.core.decider import Decider
from paceline.errors import ProtocolError
from paceline.run.net.messages import GradientReport
from paceline.run.tensors.shard import Shard

__all__ = ["check_gradient", "is_of_another_optimizer"]


def check_gradient(decider: Decider, shard: Shard, worker: int, report: GradientReport) -> None:
    """Raise ProtocolError if the report names an optimizer, parameter or turn that can't be."""
    parameters = shard.state.parameters
    if report.optimizer >= len(parameters):
        raise ProtocolError(f"there is no optimizer {report.optimizer}")
    if report.unused and max(report.unused) >= len(parameters[report.optimizer]):
        raise ProtocolError(f"there is no parameter {max(report.unused)}")
    if report.cancelled and decider.would_accept(worker):
        raise ProtocolError(f"turn {report.turn} was not cancelled")


def is_of_another_optimizer(
    decider: Decider, shard: Shard, worker: int, report: GradientReport
) -> bool:
    """Return whether the update that it is for already has gradients of another optimizer.

    Policies that mix the turns of workers may mix optimizers; under all others, workers stay in
    step.
    """
    member = decider.ledger.members.get(worker)
    if decider.policy.repeats or member is None or member.work is None:
        return False
    other = shard.optimizer_of(member.work.update)
    return other is not None and other != report.optimizer
