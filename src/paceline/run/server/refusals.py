# SPDX-License-Identifier: BSD-3-Clause
"""Report connections that the server refused, but not more often than a reader can follow.

Anyone on this machine can connect to the server and be refused, as often as they like. A few
refusals a minute are reported; the others are only counted.
"""

from collections.abc import Callable

__all__ = ["Refusals"]

PERIOD_S = 60.0
REPORTS_MAX = 10  # in each period


class Refusals:
    """Reports refused connections of clients that are not authenticated."""

    def __init__(self, report: Callable[[str], None]) -> None:
        self._report = report
        self._began_at = 0.0  # the period
        self._count = 0  # refusals in it

    def add(self, reason: str, now: float) -> None:
        """Report a refusal, or count it."""
        if now >= self._began_at + PERIOD_S:
            self.report_rest()
            self._began_at, self._count = now, 0
        self._count += 1
        if self._count <= REPORTS_MAX:
            self._report(f"refused a connection: {reason}")
        elif self._count == REPORTS_MAX + 1:
            self._report("further refused connections are only counted for a while")

    def report_rest(self) -> None:
        """Report how many refusals were only counted."""
        if self._count > REPORTS_MAX:
            more = self._count - REPORTS_MAX
            self._report(f"refused {more:,} more connection{'s' if more > 1 else ''}")
            self._count = REPORTS_MAX
