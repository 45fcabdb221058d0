# SPDX-License-Identifier: BSD-3-Clause
"""A clock for the launcher's time limits, which doesn't count the time that the launcher slept.

A machine may be suspended, and a user may press Ctrl-Z. When the launcher continues, the others
have had no time to answer either, so nothing has hung.
"""

from collections.abc import Callable
from dataclasses import replace

from paceline.run.system import System

__all__ = ["with_awake_clock"]

STEP_S = 1.0  # the launcher looks at the clock several times a second; more than this is sleep


def with_awake_clock(system: System) -> System:
    """Return the same system with a clock that stands still while the launcher sleeps."""
    return replace(system, monotonic=_AwakeClock(system.monotonic))


class _AwakeClock:
    def __init__(self, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        self._now = self._last = monotonic()

    def __call__(self) -> float:
        now = self._monotonic()
        self._now += min(now - self._last, STEP_S)
        self._last = now
        return self._now
