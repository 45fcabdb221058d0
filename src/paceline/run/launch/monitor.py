# SPDX-License-Identifier: BSD-3-Clause
"""What the launcher knows about the progress and the end of its run."""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from paceline.core.events import Fate
from paceline.errors import PeerLost, ProtocolError
from paceline.run.net.handshake import connect
from paceline.run.net.messages import WorkerUnavailable
from paceline.trace.reader import TraceReader
from paceline.trace.schema import (
    FINISHED,
    Ended,
    Gradient,
    Joined,
    Left,
    Record,
    Restored,
    Stopped,
    Update,
)

__all__ = ["End", "RunMonitor", "report_unavailable"]

CONNECT_S = 1.0  # how long to wait for the server to answer


class End(NamedTuple):
    """How a run ended."""

    version: int
    reason: str


class RunMonitor:
    """Follows a run by its trace; lines of an earlier run in the same folder are skipped."""

    def __init__(self, path: Path, steps: int | None) -> None:
        self.accepted: Counter[int] = Counter()  # gradients, by worker
        self.version = 0  # the highest that was ever reached
        self.left: dict[int, int] = {}  # workers that left before the end, and at which version
        self.is_deserted = False  # whether all workers had left when the run was stopped
        self.is_over = False  # whether the last update is made
        self.end: End | None = None  # not None iff the server has written everything
        self.is_serving = False  # whether the current server has written anything
        self._current = 0  # version
        self._samples = 0  # in accepted gradients
        self._samples_wanted: int | None = None
        self._here: set[int] = set()  # workers
        self._is_new = not path.exists()
        self._path = path
        self._steps = steps
        self._reader = TraceReader(path)
        self._reader.skip_to_end()

    def on_server_start(self) -> None:
        """A new server process starts."""
        self.is_serving = False

    @property
    def was_served(self) -> bool:
        """Whether any server got as far as serving, even if it had no space to write anything."""
        return self.is_serving or (self._is_new and self._path.exists())

    @property
    def is_finished(self) -> bool:
        """Whether the run reached its goal."""
        return self.end is not None and self.end.reason == FINISHED

    @property
    def _is_last(self) -> bool:
        has_samples = self._samples_wanted is not None and self._samples >= self._samples_wanted
        return has_samples or (self._steps is not None and self._current >= self._steps)

    def update(self) -> None:
        """Read what is new."""
        offset = self._reader.offset
        records = self._reader.read()
        if self._samples_wanted is None and self._reader.header is not None:
            self._samples_wanted = self._reader.header.samples
        for record in records:
            self._on_record(record)
        self.is_serving |= self._reader.offset > offset

    def _on_record(self, record: Record) -> None:
        match record:
            case Gradient():
                if record.fate is Fate.ACCEPTED:
                    self.accepted[record.worker] += 1
                    self._samples += record.samples
            case Update():
                self._current = record.update
                self.version = max(self.version, self._current)
                self.is_over = self.is_over or self._is_last
            case Joined():
                self._here.add(record.worker)
                self.left.pop(record.worker, None)
            case Left() if not self.is_over:
                self._here.discard(record.worker)
                self.left[record.worker] = self._current
            case Stopped():
                self.is_over, self.is_deserted = True, not self._here
            case Ended():
                self.is_over, self.end = True, End(record.version, record.reason)
            case Restored():
                self._current, self._samples = record.version, record.samples
                self._samples_wanted = record.header.samples
                self._here.clear()
                self.is_over, self.end = self._is_last, None
            case _:
                pass


def report_unavailable(address: str, token: str, reasons: Mapping[int, str]) -> bool:
    """Tell the server which workers won't be restarted, and why; return whether it was reached."""
    try:
        channel = connect(address, token, timeout_s=CONNECT_S)
        try:
            for worker, reason in reasons.items():
                channel.send(WorkerUnavailable(worker, reason))
        finally:
            channel.close()
    except PeerLost:  # not there yet, or busy: try again later
        return False
    except ProtocolError:  # it refuses: trying again won't help
        return True
    return True
