# SPDX-License-Identifier: BSD-3-Clause
"""How long a turn takes, and how long an injected delay (`--latency`) makes it take."""

from paceline.latency import parse_latency
from paceline.run.system import SYSTEM, System

__all__ = ["TurnClock"]


class TurnClock:
    """When the current turn began, and when its gradient is due."""

    def __init__(self, latency: str, worker: int, seed: int, system: System = SYSTEM) -> None:
        """`latency` is the latency to inject; "" injects none."""
        self._monotonic, self._cpu_time = system.monotonic, system.cpu_time
        self._joined_at = self._began_at = self._monotonic()
        self._delays = parse_latency(latency).stream(worker, seed) if latency else None
        self._due_at = 0.0
        self._cpu_read_s = self._cpu_began_s = self._cpu_time()

    def begin(self, asked_at: float | None) -> None:
        """Begin a turn; `asked_at` is when the server asked, None if its clock isn't ours."""
        self._began_at = self._monotonic()
        self._cpu_began_s = self._cpu_read_s  # to read that clock takes microseconds
        if self._delays is not None:
            if asked_at is not None:  # our own overhead is part of the injected latency
                self._began_at = max(asked_at, self._joined_at)
            self._due_at = self._began_at + self._delays.take(self._began_at - self._joined_at)

    @property
    def remaining_s(self) -> float:
        """Time until the gradient is due; 0 if it is."""
        return max(0.0, self._due_at - self._monotonic())

    @property
    def elapsed_s(self) -> float:
        """Time since the turn began."""
        return self._monotonic() - self._began_at

    @property
    def compute_s(self) -> float:
        """The time that a gradient which is ready now takes, including the injected delay."""
        return max(self._monotonic(), self._due_at) - self._began_at

    def read_cpu_s(self) -> float:
        """Return the processor time of this process since it was read in the turn before."""
        self._cpu_read_s = self._cpu_time()
        return self._cpu_read_s - self._cpu_began_s
