# SPDX-License-Identifier: BSD-3-Clause
"""The server's ends of the connections, and what a storm observes at them.

Nothing here changes what the server does. A peer notes which batches are leased to it, when the
server tells it of the end, and whether the server still refers to the slot of a peer that is gone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from weakref import ref

from paceline.leases import Use
from paceline.run.net.in_process import InProcessPeer, InProcessStore, PlainMemory
from paceline.run.net.messages import (
    Assignment,
    BatchesReturned,
    FromWorker,
    LeaseReply,
    RunEnded,
    Welcome,
)
from paceline.run.net.tcp import Relay, TcpPeer
from paceline.run.net.transport import Announcement, OpenedSlot
from paceline.run.tensors.layout import Views
from paceline.run.tensors.version_buffers import ParameterBuffer
from storm.streams import QueueControl, VirtualStream
from storm.world import World

__all__ = ["Leak", "Observed", "StormPeer", "StormTcpPeer"]

Batch = tuple[int, int]  # a stream, and the number of a batch in it


class Leak(AssertionError):
    """The server keeps memory that it doesn't need."""


class _Slot:
    """Tells whether the server still refers to a slot, without keeping it."""

    def __init__(self, views: Views) -> None:
        groups = [*views.parameters, *views.flats, views.buffers, views.buffer_flats]
        self._refs: list[ref[Any]] = [ref(views), *(ref(t) for group in groups for t in group)]

    @property
    def is_alive(self) -> bool:
        """Whether any of its tensors is referred to."""
        return any(one() is not None for one in self._refs)


@dataclass
class Observed:
    """What was observed at the connections of one server."""

    slots: list[_Slot] = field(default_factory=list)
    holders: dict[Batch, AnyPeer | None] = field(default_factory=dict)
    """Who holds each batch that was leased; None: nobody, so it must be leased again."""
    forgotten: set[Batch] = field(default_factory=set)
    """Batches that nobody held when a new one was leased: that one should not have been."""
    following: dict[int, int] = field(default_factory=dict)  # by stream: the next new batch
    ended_at: float | None = None  # when the server first told a worker of the end

    def sent(self, message: object, peer: AnyPeer, now: float) -> None:
        """Note what the server sends to a peer."""
        if isinstance(message, RunEnded):
            self.ended_at = now if self.ended_at is None else self.ended_at
        elif isinstance(message, Assignment):
            for use in message.leases:
                self.lease(use, peer)
        elif isinstance(message, LeaseReply):
            self.lease(message.lease, peer)

    def lease(self, use: Use, peer: AnyPeer) -> None:
        """Note that batches are leased to a peer."""
        for number in use.numbers:
            if number >= self.following.get(use.stream, 0):
                self.following[use.stream] = number + 1
                self.forgotten |= {batch for batch, holder in self.holders.items() if not holder}
            self.holders[use.stream, number] = peer
            self.forgotten.discard((use.stream, number))

    def release(self, peer: AnyPeer, use: Use | None = None) -> None:
        """Note that a peer no longer holds these batches; None: any."""
        numbers = None if use is None else {(use.stream, number) for number in use.numbers}
        for batch, holder in self.holders.items():
            if holder is peer and (numbers is None or batch in numbers):
                self.holders[batch] = None

    def check_slots(self, connections: int) -> None:
        """Check that the server has no more slots than connections; it is waiting for news."""
        self.slots = [slot for slot in self.slots if slot.is_alive]
        if len(self.slots) > connections:
            raise Leak(f"the server keeps {len(self.slots)} slots for {connections} connections")


class StormPeer(InProcessPeer):
    """The server's end of a connection."""

    def __init__(self, plain: InProcessPeer, observed: Observed, world: World) -> None:
        super().__init__(plain._inbox, plain._outbox, plain._store)
        self._observed = observed
        self._world = world

    def open_slot(self, welcome: Welcome) -> Views:
        """Welcome the worker and give it a slot.

        The two sides have their own tensors on the same memory, as real processes have. So a worker
        that keeps its tensors doesn't look like a server that does.
        """
        memory, layout = PlainMemory(self._store.layout.size), self._store.layout
        self._slot = layout.view(memory)
        self._observed.slots.append(_Slot(self._slot))
        self._put(welcome, OpenedSlot(layout.view(memory), self._store.constants))
        return self._slot

    def receive_nowait(self) -> Iterator[FromWorker]:
        """Yield the messages that have arrived."""
        for message in super().receive_nowait():
            if isinstance(message, BatchesReturned):
                self._observed.release(self, message.use)
            yield message

    def publish(self, message: Assignment | RunEnded, buffer: ParameterBuffer) -> None:
        """Let the worker fetch the version in this buffer, and send the message."""
        self._observed.sent(message, self, self._world.now)
        super().publish(message, buffer)

    def send(self, message: object) -> None:
        """Send a control message."""
        self._observed.sent(message, self, self._world.now)
        super().send(message)

    def close(self) -> None:
        """Close the connection, and don't let the queues refer to this peer any more."""
        super().close()
        self._observed.release(self)
        self._inbox.on_attached = lambda _: None


class StormTcpPeer(TcpPeer):
    """The server's end of a connection between hosts."""

    def __init__(
        self, control: QueueControl, store: InProcessStore, observed: Observed, world: World
    ) -> None:
        super().__init__(control, store)
        self._inbox = control.inbox
        self._observed = observed
        self._world = world

    def join_others(self, session: bytes, others: Relay) -> None:
        """Have the other servers do their part."""
        self._session, self._others = session, others

    def has_news(self) -> bool:
        """Return whether a message has arrived, with its payload, or the connection was closed."""
        return self._inbox.has_news() or self.has_arrived

    def can_move_data(self) -> bool:
        """Return whether the data connection can send or receive something."""
        stream = self._stream
        if not isinstance(stream, VirtualStream) or self.has_arrived:
            return False
        return stream.has_news or (self.has_unsent and stream.can_send)

    def move_data(self) -> None:
        """Send and receive what is possible now."""
        self.send_data()
        self.receive_data()

    def open_slot(self, welcome: Welcome) -> Views:
        """Welcome the worker and make a slot for it."""
        slot = super().open_slot(welcome)
        self._observed.slots.append(_Slot(slot))
        return slot

    def receive_nowait(self) -> Iterator[FromWorker | Announcement]:
        """Yield the messages that have arrived."""
        for message in super().receive_nowait():
            if isinstance(message, BatchesReturned):
                self._observed.release(self, message.use)
            yield message

    def publish(self, message: Assignment | RunEnded, buffer: ParameterBuffer) -> None:
        """Send the message and the version in this buffer."""
        self._observed.sent(message, self, self._world.now)
        super().publish(message, buffer)

    def send(self, message: object) -> None:
        """Send a control message."""
        self._observed.sent(message, self, self._world.now)
        super().send(message)

    def close(self) -> None:
        """Close both connections."""
        super().close()
        self._observed.release(self)


AnyPeer = StormPeer | StormTcpPeer
