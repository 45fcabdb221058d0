# SPDX-License-Identifier: BSD-3-Clause
"""When a process that has died is started again, and what is done when it is not.

Each start in a row that has brought nothing is waited for twice as long as the one before, and
after a few of them nobody tries again. What a start has brought is read from the trace of the run.
"""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from paceline.core.events import Fate
from paceline.errors import PeerLost, ProtocolError
from paceline.run.net.channel import connect
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

__all__ = ["End", "Follower", "Tries", "tell_missing"]

FIRST_PAUSE_S = 0.5
PAUSE_MAX_S = 30.0
TRIES_MAX = 5

_ANSWER_S = 1.0  # for a server that has time


class Tries:
    """How often in a row one process was started again without getting on."""

    def __init__(self) -> None:
        self.count = 0
        self._progress = 0

    def next_pause(self, progress: int) -> float | None:
        """How long to wait before it is started again; None: it was tried often enough.

        `progress` is a number that grows as the process gets on.
        """
        if progress > self._progress:
            self._progress = progress
            self.count = 0
        if self.count >= TRIES_MAX:
            return None
        self.count += 1
        return min(FIRST_PAUSE_S * 2.0 ** (self.count - 1), PAUSE_MAX_S)


class End(NamedTuple):
    """What a trace says last of a run that has ended."""

    version: int
    reason: str


class Follower:
    """Follows the trace of a run as it grows; what is in it already is of an earlier run."""

    def __init__(self, path: Path, steps: int | None) -> None:
        self.accepted: Counter[int] = Counter()  # gradients, by worker
        self.version = 0  # the highest that was ever reached
        self.left: dict[int, int] = {}  # who has left a run that goes on, and at which version
        self.is_deserted = False  # everybody had left when nobody wanted another update
        self.is_over = False  # the last update is made, or nobody wants another
        self.end: End | None = None  # not None iff everybody was told, and everything is written
        self.is_begun = False  # something was written since a server was started
        self._now = 0  # the version
        self._here: set[int] = set()  # workers
        self._is_new = not path.exists()
        self._path = path
        self._steps = steps
        self._reader = TraceReader(path)
        self._reader.skip_to_end()

    def begin(self) -> None:
        """A server is started, which goes on after the last line that is whole."""
        self.is_begun = False

    @property
    def has_begun(self) -> bool:
        """Whether a server has served, though it may have had no room to write anything."""
        return self.is_begun or (self._is_new and self._path.exists())

    @property
    def is_finished(self) -> bool:
        """Whether the run has come to its goal."""
        return self.end is not None and self.end.reason == FINISHED

    @property
    def _is_last(self) -> bool:
        return self._steps is not None and self._now >= self._steps

    def look(self) -> None:
        """Read what has come, whole lines only."""
        at = self._reader.offset
        for record in self._reader.read():
            self._take(record)
        self.is_begun |= self._reader.offset > at

    def _take(self, record: Record) -> None:
        match record:
            case Gradient():
                self.accepted[record.worker] += record.fate is Fate.ACCEPTED
            case Update():
                self._now = record.update
                self.version = max(self.version, self._now)
                self.is_over = self.is_over or self._is_last
            case Joined():
                self._here.add(record.worker)
                self.left.pop(record.worker, None)
            case Left() if not self.is_over:
                self._here.discard(record.worker)
                self.left[record.worker] = self._now
            case Stopped():
                self.is_over, self.is_deserted = True, not self._here
            case Ended():
                self.is_over, self.end = True, End(record.version, record.reason)
            case Restored():
                self._now = record.version
                self._here.clear()
                self.is_over, self.end = self._is_last, None
            case _:
                pass


def tell_missing(address: str, token: str, missing: Mapping[int, str]) -> bool:
    """Tell the server which workers nobody will start again, and why; return whether it heard."""
    try:
        channel = connect(address, token, patience_s=_ANSWER_S)
        try:
            for worker, reason in missing.items():
                channel.send(WorkerUnavailable(worker, reason))
        finally:
            channel.close()
    except PeerLost:  # it is not there yet, or has no time
        return False
    except ProtocolError:  # it will not hear of it
        return True
    return True
