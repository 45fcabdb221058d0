# SPDX-License-Identifier: BSD-3-Clause
"""Data connections of a simulated host, and what the TCP transport needs around them.

A stream takes as many bytes as fit, and delivers them some time later in pieces of any size, as TCP
does. Only the sockets are simulated: payloads, messages and both ends are the real ones.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

from paceline.errors import PeerLost
from paceline.run.net.channel import OUTBOX_BYTES
from paceline.run.net.data_socket import ByteStream
from paceline.run.net.in_process import Queue
from paceline.run.net.tcp_client import Wishes
from storm.world import World

__all__ = ["CHUNK_BYTES", "QueueControl", "VirtualStream", "WorkerQueues", "connected_streams"]

CHUNK_BYTES = 48  # of a payload, so that even small models have several
CAPACITIES = (40, 200, 10_000)  # bytes that a stream takes before any of them are received
SLOWNESS_S = (0.0, 0.0, 0.002, 0.02)  # that a piece takes on a slow link, after the one before it


class _Pipe:
    """One direction of a stream."""

    def __init__(self, world: World, delay_max_s: float) -> None:
        self._world = world
        self._delay_max_s = delay_max_s
        self._capacity = world.random.choice(CAPACITIES)
        self._slowness_s = world.random.choice(SLOWNESS_S)
        self._pieces: deque[tuple[float, bytes]] = deque()  # when each arrives
        self._last_at = 0.0  # when the last of them does
        self._ends_at: float | None = None  # when the end arrives; not None iff it is closed

    @property
    def is_closed(self) -> bool:
        """Whether nothing can be sent any more."""
        return self._ends_at is not None

    @property
    def is_full(self) -> bool:
        """Whether it takes nothing now; a closed one takes an attempt."""
        in_flight = sum(len(piece) for _, piece in self._pieces)
        return self._ends_at is None and in_flight >= self._capacity

    @property
    def has_news(self) -> bool:
        """Whether bytes or the end have arrived."""
        if self._pieces:
            return self._pieces[0][0] <= self._world.now
        return self._ends_at is not None and self._ends_at <= self._world.now

    def send(self, data: bytes) -> int:
        """Send a part of these bytes; return how many."""
        self._world.touch()
        if self._ends_at is not None:
            raise PeerLost("the data connection broke: it was cut")
        room = self._capacity - sum(len(piece) for _, piece in self._pieces)
        count = min(len(data), room)
        if count > 1 and self._world.random.random() < 0.5:
            count = self._world.random.randint(1, count)
        if count > 0:
            self._pieces.append((self._arrival(), data[:count]))
        return max(0, count)

    def receive_into(self, space: memoryview) -> int:
        """Receive a part of what has arrived; return how many bytes."""
        self._world.touch()
        if not self.has_news:
            return 0
        if not self._pieces:
            raise PeerLost("the data connection was closed")
        arrival, piece = self._pieces.popleft()
        count = min(len(space), len(piece))
        space[:count] = piece[:count]
        if count < len(piece):
            self._pieces.appendleft((arrival, piece[count:]))
        return count

    def _arrival(self) -> float:
        delay_s = self._world.random.random() ** 3 * self._delay_max_s
        self._last_at = max(self._last_at, self._world.now) + self._slowness_s
        self._last_at = max(self._last_at, self._world.now + delay_s)
        self._world.at(self._last_at)
        return self._last_at

    def close(self) -> None:
        """Close it; what was sent before still arrives."""
        if self._ends_at is None:
            self._ends_at = self._arrival()

    def lose(self) -> None:
        """Lose some of the bytes that haven't arrived."""
        for _ in range(self._world.random.randint(0, len(self._pieces))):
            self._pieces.pop()


class VirtualStream:
    """One end of a data connection."""

    def __init__(self, outgoing: _Pipe, incoming: _Pipe) -> None:
        self._outgoing = outgoing
        self._incoming = incoming

    def fileno(self) -> int:
        """Return nothing that a selector could use."""
        return -1

    @property
    def is_closed(self) -> bool:
        """Whether either side has closed it."""
        return self._outgoing.is_closed or self._incoming.is_closed

    @property
    def can_send(self) -> bool:
        """Whether it takes bytes, or is closed."""
        return not self._outgoing.is_full

    @property
    def has_news(self) -> bool:
        """Whether it has bytes, or has ended."""
        return self._incoming.has_news

    def send(self, buffers: list[memoryview]) -> int:
        """Send a part of these bytes; return how many, 0 if none can be sent now."""
        return self._outgoing.send(b"".join(buffers))

    def receive_into(self, space: memoryview) -> int:
        """Receive a part of this many bytes; return how many, 0 if there are none now."""
        return self._incoming.receive_into(space)

    def close(self) -> None:
        """Close both directions; what was sent before still arrives."""
        self._outgoing.close()
        self._incoming.close()

    def lose(self) -> None:
        """Lose some of the bytes under way, in both directions."""
        self._outgoing.lose()
        self._incoming.lose()


def connected_streams(world: World, delay_max_s: float) -> tuple[VirtualStream, VirtualStream]:
    """Return both ends of a new data connection."""
    there, back = _Pipe(world, delay_max_s), _Pipe(world, delay_max_s)
    return VirtualStream(there, back), VirtualStream(back, there)


class QueueControl:
    """The server's end of a control connection."""

    def __init__(self, inbox: Queue[Any], outbox: Queue[Any]) -> None:
        self.inbox = inbox
        self.outbox = outbox

    def send(self, message: object) -> None:
        """Send a message."""
        self.outbox.put(message, None, OUTBOX_BYTES)

    def receive_nowait(self) -> Iterator[Any]:
        """Yield the messages that have arrived; raise PeerLost only if there is none."""
        message = self.inbox.take()
        while message is not None:
            yield message
            message = self.inbox.take() if self.inbox.has_message() else None

    def wait_readable(self, timeout_s: float) -> bool:
        """Return whether there is something to receive now."""
        assert timeout_s == 0
        return self.inbox.has_news()

    def close(self) -> None:
        """Close the connection."""
        self.inbox.close()
        self.outbox.close()


class WorkerQueues(QueueControl):
    """A worker's end of a control connection."""

    def __init__(self, inbox: Queue[Any], outbox: Queue[Any], world: World) -> None:
        super().__init__(inbox, outbox)
        self._world = world

    def send(self, message: object) -> None:
        """Send a message."""
        self.outbox.put(message)

    def wait(self, wishes: Wishes, timeout_s: float | None) -> bool:
        """Wait until one of the wishes is met, or for this long; return whether it is a message."""

        def is_met() -> bool:
            return (
                (wishes.message and self.inbox.has_news())
                or any(one.has_news for one in _virtual(wishes.to_receive))
                or any(one.can_send for one in _virtual(wishes.to_send))
            )

        self._world.wait_for(is_met, timeout_s)
        return wishes.message and self.inbox.has_news()


def _virtual(streams: Sequence[ByteStream]) -> list[VirtualStream]:
    return [one for one in streams if isinstance(one, VirtualStream)]
