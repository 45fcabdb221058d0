# SPDX-License-Identifier: BSD-3-Clause
"""The reports with which a worker ends a turn: what it has computed, and what it cost."""

from math import isfinite
from typing import NamedTuple

import torch

from paceline.run.net.messages import AbandonReport, Assignment, GradientReport
from paceline.run.worker.batches import Batches
from paceline.run.worker.leases import HeldLeases
from paceline.run.worker.logged_scalars import LoggedScalars
from paceline.run.worker.optimizer_sync import SettingChanges
from paceline.run.worker.replica import Replica
from paceline.run.worker.turn_clock import TurnClock

__all__ = ["TurnReports"]


class TurnReports(NamedTuple):
    """Writes the reports of a worker."""

    replica: Replica
    batches: Batches
    scalars: LoggedScalars
    leases: HeldLeases
    clock: TurnClock

    def of_gradient(
        self, turn: Assignment, optimizer: int, changes: SettingChanges
    ) -> GradientReport:
        """Complete the gradient in the slot, and describe it."""
        with torch.no_grad():
            unused, sq_norm = self.replica.collect(optimizer)
        return GradientReport(
            turn.turn,
            turn.version,
            optimizer,
            self.batches.samples(optimizer),
            self.clock.compute_s,
            sq_norm if isfinite(sq_norm) else None,
            unused,
            changes.options,
            self.scalars.hand_in(),
            schedulers=changes.schedulers,
            uses=self.batches.uses(optimizer),
            new_samples=self.batches.new_samples(optimizer),
            pulled=self.leases.hand_in_pulled(),
            cpu_s=self.clock.read_cpu_s(),
        )

    def of_worthless(
        self, turn: Assignment, optimizer: int, changes: SettingChanges, *, is_cut: bool
    ) -> GradientReport | AbandonReport:
        """Describe a gradient that is no longer wanted; `is_cut`: it isn't complete."""
        compute_s = self.clock.elapsed_s
        pulled, cpu_s = self.leases.hand_in_pulled(), self.clock.read_cpu_s()
        if is_cut or self.clock.remaining_s:
            abandoned = (turn.turn, compute_s, turn.version, changes.options, optimizer)
            return AbandonReport(*abandoned, changes.schedulers, pulled, cpu_s)
        samples = self.batches.samples(optimizer)
        return GradientReport(
            turn.turn,
            turn.version,
            optimizer,
            samples,
            compute_s,
            None,
            options=changes.options,
            cancelled=True,
            schedulers=changes.schedulers,
            pulled=pulled,
            cpu_s=cpu_s,
        )
