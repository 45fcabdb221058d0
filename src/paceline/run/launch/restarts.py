# SPDX-License-Identifier: BSD-3-Clause
"""When to restart a process that died: after growing pauses, and a limited number of times."""

__all__ = ["RestartBackoff"]

FIRST_PAUSE_S = 0.5
PAUSE_MAX_S = 30.0
ATTEMPTS_MAX = 5  # in a row, without progress


class RestartBackoff:
    """Counts the restarts of one process since it last made progress."""

    def __init__(self) -> None:
        self.attempts = 0
        self._progress = 0

    def next_pause_s(self, progress: int) -> float | None:
        """Return how long to wait before the next restart; None: give up.

        `progress` is any number that grows as the process makes progress. When it has grown, the
        count starts again.
        """
        if progress > self._progress:
            self._progress = progress
            self.attempts = 0
        if self.attempts >= ATTEMPTS_MAX:
            return None
        self.attempts += 1
        return min(FIRST_PAUSE_S * 2.0 ** (self.attempts - 1), PAUSE_MAX_S)

    def line(self, what: str, pause_s: float | None) -> str:
        """Return a line about what has happened to the process, and what follows."""
        if pause_s is None:
            return f"{what}; gave up after {ATTEMPTS_MAX} failed restarts"
        return f"{what}; restarting in {pause_s:g} s (attempt {self.attempts} of {ATTEMPTS_MAX})"
