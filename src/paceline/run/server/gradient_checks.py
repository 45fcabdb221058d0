# SPDX-License-Identifier: BSD-3-Clause
"""Checks on the report of a gradient, before it becomes an event."""

from paceline.core.decider import Decider
from paceline.errors import ProtocolError
from paceline.run.net.messages import GradientReport
from paceline.run.tensors.shard import Shard

__all__ = ["OptimizerPhases", "check_gradient"]

CATCHING_UP = 10  # turns; the iteration of a GAN has fewer steps


def check_gradient(decider: Decider, shard: Shard, worker: int, report: GradientReport) -> None:
    """Raise ProtocolError if the report names a parameter or turn that can't be."""
    if report.unused and max(report.unused) >= len(shard.whole.parameters[report.optimizer]):
        raise ProtocolError(f"there is no parameter {max(report.unused)}")
    if report.cancelled and decider.would_accept(worker):
        raise ProtocolError(f"turn {report.turn} was not cancelled")


class OptimizerPhases:
    """Keeps the workers of a script with several optimizers at the same one.

    An update belongs to the optimizer of its first gradient. A worker that is at another one, as
    the workers of a GAN are after a late gradient, is asked for the next gradient until it has
    caught up. It doesn't catch up if the script trains one layer after the other, for many steps
    each: then, the update takes gradients of both, so that no worker trains in vain.

    Policies that mix the turns of workers always mix optimizers.
    """

    def __init__(self, decider: Decider, shard: Shard) -> None:
        self._decider = decider
        self._shard = shard
        self._missed: dict[int, int] = {}  # turns in a row, by worker
        self._mixes = decider.policy.repeats or len(shard.state.optimizers) == 1

    def is_out_of_step(self, worker: int, report: GradientReport) -> bool:
        """Return whether to ask the worker for its next gradient instead of using this one."""
        if not self.is_at_another(worker, report):
            self._missed[worker] = 0
            return False
        self._missed[worker] = self._missed.get(worker, 0) + 1
        return self._missed[worker] <= CATCHING_UP

    def is_at_another(self, worker: int, report: GradientReport) -> bool:
        """Return whether the worker is at another optimizer than its update."""
        member = self._decider.ledger.members.get(worker)
        if self._mixes or member is None or member.work is None:
            return False
        others = self._shard.optimizers_of(member.work.update)
        return bool(others) and report.optimizer not in others
