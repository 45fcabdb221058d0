# SPDX-License-Identifier: BSD-3-Clause
"""Why a run failed, and when to give one up."""

from paceline.run.server.timers import ASLEEP_S
from paceline.run.settings import Settings

__all__ = ["RunFailure"]

NON_FINITE_MAX = 100  # refused gradients in a row, for each worker, until the run fails
SKIPPED_MAX = 100  # updates in a row that didn't step, until the run fails


class RunFailure:
    """Detects when it is pointless to continue a run."""

    def __init__(self) -> None:
        self.failure = ""
        """Why the run failed; "" if it didn't."""
        self._refusals = 0  # of non-finite gradients, since the last step
        self._skipped = 0  # updates since the last step
        self._stuck_s: float | None = None  # for how long the run has been stuck; None: it isn't
        self._checked_at = 0.0

    def count_step(self) -> None:
        """Note that an update has changed the parameters."""
        self._refusals = self._skipped = 0

    def count_skipped(self) -> None:
        """Count an update that was made without a step, because it wasn't finite."""
        self._skipped += 1
        if self._skipped >= SKIPPED_MAX:
            self.fail(
                f"the last {self._skipped} updates did not step, because their averaged gradients "
                "contained NaN or infinity; lower the learning rate or the scale of the loss"
            )

    def count_refusal(self, workers: int) -> None:
        """Count a refused non-finite gradient of a run with this many workers."""
        self._refusals += 1
        if self._refusals >= NON_FINITE_MAX * max(1, workers):
            self.fail(
                f"the last {self._refusals} gradients all contained NaN or infinity; "
                "lower the learning rate, or check the data"
            )

    def check_patience(self, settings: Settings, is_stuck: bool, here: int, now: float) -> None:
        """Fail if the run has had fewer than `min_workers` workers for too long.

        `is_stuck`: whether it has too few of them now. `here`: how many it has.
        """
        passed_s, self._checked_at = min(now - self._checked_at, ASLEEP_S), now
        if not is_stuck:
            self._stuck_s = None
        else:
            self._stuck_s = 0.0 if self._stuck_s is None else self._stuck_s + passed_s
        if self._stuck_s is not None and self._stuck_s >= settings.patience_s:
            self.fail(
                f"only {here} of at least {settings.spec.min_workers} workers were here for "
                f"{settings.patience_s:g} s"
            )

    def fail(self, reason: str) -> None:
        """End the run as a failure; the first reason counts."""
        self.failure = self.failure or reason
