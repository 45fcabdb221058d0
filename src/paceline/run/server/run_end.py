# SPDX-License-Identifier: BSD-3-Clause
"""Write how a run ended: the last checkpoint, and the end of the trace.

Usually that happens when all workers have left. If some stay, to evaluate the result or because
they hang, it isn't delayed for long: whatever happens to the processes then, nothing is lost.
"""

import msgspec

from paceline.run.server.executor import RunParts
from paceline.run.server.recorder import Recorder
from paceline.run.server.watchers import Watchers
from paceline.trace.event_records import record_gap
from paceline.trace.schema import Ended, Gap

__all__ = ["RunEnd"]


class RunEnd:
    """The end of a run, and what is written then."""

    def __init__(self, parts: RunParts, recorder: Recorder, watchers: Watchers) -> None:
        self._parts = parts
        self._recorder = recorder
        self._watchers = watchers
        self.is_saved = False

    def save(self, end: Ended) -> None:
        """Write everything, unless that was done before, and report the end."""
        if not self.is_saved:
            self.is_saved = True  # nothing is recorded from now on
            self._watchers.report_saving(True)
            checkpointer, failures = self._parts.checkpointer, self._parts.failures
            checkpointer.finish()
            failures.fail(checkpointer.failure)
            failures.fail(self._recorder.end(self._ended(end), self.gap()))
        self._watchers.report_end(self._ended(end))

    def _ended(self, end: Ended) -> Ended:
        """Return how the run ended; it has failed if it could not be saved."""
        return msgspec.structs.replace(end, reason=self._parts.failures.failure or end.reason)

    def gap(self) -> Gap:
        """Return where the run is, for a trace that lacks records."""
        decider, now = self._parts.decider, self._parts.clock.now()
        return record_gap(now, decider.policy, decider.ledger, decider.leases.plain())
