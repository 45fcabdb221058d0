# SPDX-License-Identifier: BSD-3-Clause
"""Notice that all workers compute the same gradient, so that more workers don't help.

That happens if a script that has no prepared loader takes the same batches in every worker.
"""

from paceline.run.net.messages import GradientReport

__all__ = ["SameGradients"]

VERSIONS = 10  # about how many are looked at; a script that divides its data does so from the start
TIMES = 2  # two workers may draw the same sample once, by chance

WARNING = (
    "warning: all workers computed the same gradient, as they do if they train on the same "
    "batches; divide the data with run.worker and run.workers, or pass the loader to run.prepare()"
)


class SameGradients:
    """Compares the first gradients of a run."""

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._left = VERSIONS * workers if workers > 1 else 0  # reports still to be looked at
        self._norms: dict[tuple[int, int], dict[int, float]] = {}  # by version and optimizer
        self._seen = 0  # versions at which they were all the same

    @property
    def is_watching(self) -> bool:
        """Whether to call `note`: only for the first gradients of a run."""
        return self._left > 0

    def note(self, worker: int, report: GradientReport, needed: int) -> str:
        """Note an accepted gradient; return a warning if they are all the same, "" otherwise.

        `needed`: how many gradients make an update. If it is one, workers have only their first
        version in common.
        """
        self._left -= 1
        if report.samples > 1 or not report.sq_norm:  # it comes from a prepared loader, then
            return ""
        norms = self._norms.setdefault((report.version, report.optimizer), {})
        norms[worker] = report.sq_norm
        is_group = len(norms) == (needed if needed > 1 else self._workers)
        if not is_group or len(set(norms.values())) > 1:
            return ""
        self._seen += 1
        if self._seen < TIMES and needed > 1:
            return ""
        self._left = 0
        return WARNING
