# SPDX-License-Identifier: BSD-3-Clause
"""Those that the server is connected with: strangers, and workers that take part.

A stranger becomes a worker in three steps: both sides prove that they know the token, it says who
it is and what its script holds, and the server compares that with what the run holds. Until then
it costs a few hundred bytes, and a few seconds at most.
"""

import socket
import struct
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.run.net.channel import Challenger, Channel
from paceline.run.net.messages import FateNotice, FromStranger, Hello, decode_worker
from paceline.run.tensors.layout import Views
from paceline.trace.records import Measured

__all__ = ["STRANGERS_MAX", "STRANGER_PATIENCE_S", "Peer", "is_stopped", "pid_of"]

STRANGER_PATIENCE_S = 10.0  # for what takes a worker milliseconds
STRANGERS_MAX = 256


@dataclass(eq=False)
class Peer:
    """One connection of the server."""

    channel: Channel[Any]  # of FromStranger, and once it is proven, of FromWorker
    challenger: Challenger
    came_at: float
    pid: int | None = None  # where it is a process of this machine
    is_proven: bool = False
    worker: int | None = None  # not None iff it was welcomed
    slot: Views | None = None  # likewise
    places: set[int] = field(default_factory=set)  # that it has
    options_known: int | None = None  # how many changes of options it was told of; None: of nothing
    asked_at: float | None = None  # when; None: it waits
    given_to: int | None = None  # the update that its last gradient went into
    seen: FateNotice | None = None  # what became of its last gradient, if it was not told yet
    is_parked: bool = False  # it was stopped, and has left the run for as long
    is_mute: bool = False  # it was parked while it waited for work, so it has nothing to report

    def introduce(self, message: FromStranger) -> None:
        """Get to know a stranger, message by message."""
        if isinstance(message, Hello):
            self.channel.send(self.challenger.answer(message))
        else:
            self.challenger.check(message)
            self.is_proven = True
            self.channel.trust(decode_worker)

    def measured(self, compute_s: float, now: float, sq_norm: float | None = None) -> Measured:
        """What the trace has of its report; it has computed no longer than since it was asked."""
        assert self.asked_at is not None
        return Measured(self.asked_at, min(compute_s, now - self.asked_at), sq_norm=sq_norm)


def pid_of(channel: Channel[Any]) -> int | None:
    """The process at the other end, where it is on this machine and the system tells."""
    with suppress(OSError):
        credentials = channel.option(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        return struct.unpack("3i", credentials)[0] or None
    return None


def is_stopped(pid: int) -> bool:
    """Whether the process was stopped (SIGSTOP, Ctrl-Z), as the system knows."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return False
    # The state follows the name, which is in brackets and may have anything in it.
    # Not "t": that is a debugger or a profiler, whose user knows.
    return stat[stat.rfind(b")") + 2 :][:1] == b"T"
