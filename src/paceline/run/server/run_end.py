# SPDX-License-Identifier: BSD-3-Clause
"""Write how a run ended: the last checkpoint, and the end of the trace.

Usually that happens when all workers have left. If some stay, to evaluate the result or because
they hang, it isn't delayed for long: whatever happens to the processes then, nothing is lost.
"""

import msgspec

from paceline.run.server.executor import RunParts
from paceline.run.server.recorder import Recorder
from paceline.trace.event_records import record_gap
from paceline.trace.schema import Ended, Gap

__all__ = ["RunEnd"]


class RunEnd:
    """The end of a run, and what is written then."""

    def __init__(self, parts: RunParts, recorder: Recorder) -> None:
        self._parts = parts
        self._recorder = recorder
        self.is_saved = False

    def save(self, end: Ended) -> None:
        """Write everything, and record nothing from now on."""
        self.is_saved = True
        checkpointer, failures = self._parts.checkpointer, self._parts.failures
        checkpointer.finish()
        failures.fail(checkpointer.failure)
        failures.fail(self._recorder.end(self.ended(end), self.gap()))

    def ended(self, end: Ended) -> Ended:
        """Return how the run ended; it has failed if it could not be saved."""
        return msgspec.structs.replace(end, reason=self._parts.failures.failure or end.reason)

    def gap(self) -> Gap:
        """Return where the run is, for a trace that lacks records."""
        decider, now = self._parts.decider, self._parts.clock.now()
        return record_gap(now, decider.policy, decider.ledger, decider.leases.plain())
