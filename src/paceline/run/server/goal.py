# SPDX-License-Identifier: BSD-3-Clause
"""What ends a run beside its number of updates: enough samples, or no hope."""

from paceline.trace.schema import FINISHED, STOPPED

__all__ = ["Goal"]

NON_FINITE_MAX = 100  # gradients without an update between them, for each worker, until it ends


class Goal:
    """How far a run has come, in samples, and why it failed, if it did."""

    def __init__(self, samples_wanted: int | None, steps: int | None = None) -> None:
        self.samples = 0  # that came into updates
        self.failure = ""
        self._samples_wanted = samples_wanted
        self._steps = steps
        self._refusals = 0  # of gradients that were not finite, since the last update

    def updated(self, samples: int) -> None:
        """An update of so many samples was made."""
        self.samples += samples
        self._refusals = 0

    def refused(self, workers: int) -> None:
        """A gradient that was not finite was refused; there are so many workers."""
        self._refusals += 1
        if self._refusals >= NON_FINITE_MAX * max(1, workers):
            self.fail(
                f"the last {self._refusals} gradients all had a NaN or an infinity in them; "
                "lower the learning rate, or look at the data"
            )

    def fail(self, why: str) -> None:
        """The run can come to nothing; the first reason counts."""
        self.failure = self.failure or why

    @property
    def is_reached(self) -> bool:
        """Whether the run is to make no update more."""
        return self._has_enough or bool(self.failure)

    @property
    def _has_enough(self) -> bool:
        return self._samples_wanted is not None and self.samples >= self._samples_wanted

    def reason(self, version: int) -> str:
        """What is recorded of an end at this version."""
        if self.failure:
            return self.failure
        is_last = self._steps is not None and version >= self._steps
        return FINISHED if is_last or self._has_enough else STOPPED
