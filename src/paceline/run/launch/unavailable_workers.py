# SPDX-License-Identifier: BSD-3-Clause
"""The workers that the launcher won't start again; the server and the user are told about them.

On a cluster, a worker may also wait for a machine that has room for it. If there are enough others,
the run doesn't wait for this worker either, but it joins as soon as it has started.
"""

from collections.abc import Callable, Mapping

from paceline.run.launch.monitor import RunMonitor
from paceline.run.launch.processes import Child

__all__ = ["UnavailableWorkers"]


class UnavailableWorkers:
    """Workers whose scripts ended, or that don't start, so that the run doesn't wait for them."""

    def __init__(
        self, monitor: RunMonitor, say: Callable[[str], None], min_workers: int = 1
    ) -> None:
        """`say` shows a line to the user. `min_workers`: with fewer, the run pauses."""
        self._monitor = monitor
        self._say = say
        self._min_workers = min_workers
        self._reasons: dict[int, str] = {}  # by worker
        self._completed: set[int] = set()  # those of them whose scripts ended with exit code 0
        self._unreported: set[int] = set()  # those that the server doesn't know about
        self._waiting: set[int] = set()  # those that will be started when a machine has room
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

    def report(self, waiting: Mapping[Child, str]) -> None:
        """Tell the server about those that it doesn't know about.

        `waiting`: the processes that can't be started yet, and why.
        """
        self._note_waiting({child.who.worker: why for child, why in waiting.items()})
        if self._unreported:
            reasons = {worker: self._reasons[worker] for worker in sorted(self._unreported)}
            if self._monitor.report_unavailable(reasons, self._completed & reasons.keys()):
                self._unreported.clear()

    def _note_waiting(self, waiting: Mapping[int | None, str]) -> None:
        for worker in self._waiting - waiting.keys():  # it was started, or given up
            self._reasons.pop(worker, None)
            self._unreported.discard(worker)
        self._waiting &= waiting.keys()
        if len(self._monitor.here) < self._min_workers:
            return  # the run can't do without more, and would pause and then fail
        for number, why in waiting.items():
            if number is not None and number not in self._waiting:
                self.add(number, why)
                self._waiting.add(number)

    def say_early_ends(self, of_updates: str) -> None:
        """Print which workers' scripts ended although the run went on.

        `of_updates`: what follows the number of an update, such as " of 100".
        """
        left, version = self._monitor.left, self._monitor.version
        early = {worker for worker in self._unsaid if left.get(worker, version) < version}
        self._unsaid -= early
        for worker in sorted(early):
            self._say(f"the script of worker {worker} ended at update {left[worker]}{of_updates}")
