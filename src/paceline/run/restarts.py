# SPDX-License-Identifier: BSD-3-Clause
"""When a process that has died is started again, and what is done when it is not.

Each start in a row that has brought nothing is waited for twice as long as the one before, and
after a few of them nobody tries again. What a start has brought is read from the trace of the run.
"""

import socket
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import msgspec

from paceline.errors import PeerLost, ProtocolError
from paceline.run.channel import connect
from paceline.run.wire import Missing

__all__ = ["Follower", "Tries", "tell_missing"]

FIRST_PAUSE_S = 0.5
PAUSE_MAX_S = 30.0
TRIES_MAX = 5

_READ_BYTES = 1 << 20
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


class _Line(msgspec.Struct):
    """As much of a line of a trace as is asked for here."""

    type: str
    worker: int = -1
    fate: str = ""
    update: int = 0


class Follower:
    """Follows the trace of a run as it grows; what is in it already is of an earlier run."""

    def __init__(self, path: Path, steps: int | None) -> None:
        self.accepted: Counter[int] = Counter()  # gradients, by worker
        self.version = 0  # the highest that was ever reached
        self.is_over = False  # the last update is made, or nobody wants another
        self._path = path
        self._steps = steps
        self._at = path.stat().st_size if path.exists() else 0
        self._rest = b""
        self._decode = msgspec.json.Decoder(_Line).decode

    def look(self) -> None:
        """Read what has come, whole lines only."""
        try:
            with self._path.open("rb", buffering=0) as file:
                file.seek(self._at)
                while data := file.read(_READ_BYTES):
                    self._at += len(data)
                    *lines, self._rest = (self._rest + data).split(b"\n")
                    for line in lines:
                        self._take(line)
        except OSError:  # there is none yet
            return

    def _take(self, line: bytes) -> None:
        try:
            record = self._decode(line)
        except msgspec.MsgspecError:  # half a line, where a server was killed
            return
        if record.type == "gradient":
            self.accepted[record.worker] += record.fate == "accepted"
        elif record.type == "update":
            self.version = max(self.version, record.update)
            self.is_over = self.is_over or record.update == self._steps
        elif record.type in ("stopped", "ended"):
            self.is_over = True
        elif record.type == "restored":
            self.is_over = False


def tell_missing(address: str, token: str, missing: Mapping[int, str]) -> bool:
    """Tell the server which workers nobody will start again, and why; return whether it heard."""
    try:
        with _little_patience():
            channel = connect(address, token)
            try:
                for worker, reason in missing.items():
                    channel.send(Missing(worker, reason))
            finally:
                channel.close()
    except PeerLost:  # it is not there yet, or has no time
        return False
    except ProtocolError:  # it will not hear of it
        return True
    return True


@contextmanager
def _little_patience() -> Iterator[None]:
    """Wait no longer than this for anything that sockets do which are made meanwhile."""
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(_ANSWER_S)
    try:
        yield
    finally:
        socket.setdefaulttimeout(before)
