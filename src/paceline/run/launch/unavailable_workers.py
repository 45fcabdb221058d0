# SPDX-License-Identifier: BSD-3-Clause
"""The workers that the launcher won't start again; the server and the user are told about them."""

from collections.abc import Callable

from paceline.run.launch.monitor import RunMonitor

__all__ = ["UnavailableWorkers"]


class UnavailableWorkers:
    """Workers whose scripts ended, or that are given up, so that the run doesn't wait for them."""

    def __init__(self, monitor: RunMonitor, say: Callable[[str], None]) -> None:
        """`say` shows a line to the user."""
        self._monitor = monitor
        self._say = say
        self._reasons: dict[int, str] = {}  # by worker
        self._completed: set[int] = set()  # those of them whose scripts ended with exit code 0
        self._unreported: set[int] = set()  # those that the server doesn't know about
        self._unsaid: set[int] = set()  # those of the completed about which a line may be due

    def add(self, worker: int, reason: str) -> None:
        """Note that a worker won't be started again."""
        self._reasons[worker] = reason
        self._unreported.add(worker)

    def add_completed(self, worker: int) -> None:
        """Note that the script of a worker has ended."""
        self.add(worker, "its script ended")
        self._completed.add(worker)
        self._unsaid.add(worker)

    def on_server_start(self) -> None:
        """Prepare for a new server: what was reported to the last one is lost."""
        self._unreported = set(self._reasons)

    @property
    def are_reported(self) -> bool:
        """Whether the server knows about all of them."""
        return not self._unreported

    def report(self) -> None:
        """Tell the server about those that it doesn't know about."""
        if self._unreported:
            reasons = {worker: self._reasons[worker] for worker in sorted(self._unreported)}
            if self._monitor.report_unavailable(reasons, self._completed & reasons.keys()):
                self._unreported.clear()

    def say_early_ends(self, of_updates: str) -> None:
        """Print which workers' scripts ended although the run went on.

        `of_updates`: what follows the number of an update, such as " of 100".
        """
        left, version = self._monitor.left, self._monitor.version
        early = {worker for worker in self._unsaid if left.get(worker, version) < version}
        self._unsaid -= early
        for worker in sorted(early):
            self._say(f"the script of worker {worker} ended at update {left[worker]}{of_updates}")
