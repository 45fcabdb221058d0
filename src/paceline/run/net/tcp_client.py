# SPDX-License-Identifier: BSD-3-Clause
"""A client's end of the transport between hosts: messages, and the payloads that some of them have.

A client has one control connection, and a data connection to each server that it exchanges tensors
with. A message from the server is received when its payload is complete on all of them. What the
client announces is sent when the server asks for it.

A client sends and receives only inside `receive` and `wait_readable`. It has no thread of its own.
"""

import os
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from paceline.errors import PeerLost, ProtocolError
from paceline.run.net.channel import Channel, wait_ready
from paceline.run.net.data_socket import ByteStream, receive_payloads, send_payloads
from paceline.run.net.messages import (
    FromServer,
    SendPayload,
    StateReply,
    StateUpload,
    StopPayload,
)
from paceline.run.net.payload_stream import PayloadReceiver, PayloadSender, Span
from paceline.run.net.tcp import spans_of
from paceline.run.system import SYSTEM, System
from paceline.run.tensors.shared_region import Region
from paceline.run.tensors.state_packing import pack, unpack

__all__ = ["ClientControl", "ControlSocket", "DataLink", "TcpClient", "Wishes"]


class Wishes(NamedTuple):
    """What a client waits for."""

    message: bool  # on the control connection
    to_receive: Sequence[ByteStream]  # that may have bytes
    to_send: Sequence[ByteStream]  # that may take bytes


class ClientControl(Protocol):
    """A client's end of a control connection."""

    def send(self, message: object) -> None:
        """Send a message."""

    def wait(self, wishes: Wishes, timeout_s: float | None) -> bool:
        """Wait until one of the wishes is met, or for this long; return whether it is a message."""

    def receive_nowait(self) -> Iterator[FromServer]:
        """Yield the messages that have arrived."""

    def close(self) -> None:
        """Close the connection."""


class ControlSocket:
    """A control connection over a socket."""

    def __init__(self, channel: Channel[FromServer]) -> None:
        self._channel = channel
        self.send = channel.send
        self.receive_nowait = channel.receive_nowait
        self.close = channel.close

    def fileno(self) -> int:
        """Return the descriptor, for a selector."""
        return self._channel.fileno()

    def wait(self, wishes: Wishes, timeout_s: float | None) -> bool:
        """Wait until one of the wishes is met, or for this long; return whether it is a message."""
        control = self._channel.fileno()
        reads = [control] * wishes.message + [one.fileno() for one in wishes.to_receive]
        if any(one.has_unread() for one in wishes.to_receive):
            timeout_s = 0.0
        writes = [one.fileno() for one in wishes.to_send]
        return control in wait_ready(reads, writes, timeout_s)


class DataLink:
    """A data connection, and what is under way on it."""

    def __init__(self, stream: ByteStream) -> None:
        self.stream = stream
        self.sender = PayloadSender()
        self.receiver = PayloadReceiver()

    def move(self) -> bool:
        """Send and receive what is possible now; return whether a payload was cut short.

        Nothing behind the expected payload is received: the next one may use the same memory.
        """
        send_payloads(self.stream, self.sender)
        if self.receiver.is_expecting:
            for arrival in receive_payloads(self.stream, self.receiver):
                return not arrival.is_complete
        return False


class _Announced(NamedTuple):
    """A payload that the server hasn't asked for yet."""

    number: int
    spans: list[list[Span]]  # by link


class _ReceivedState(NamedTuple):
    """Memory for the state that comes with a reply."""

    tree: bytearray
    fd: int


class TcpClient:
    """A client's end of the transport."""

    def __init__(self, control: ClientControl, stream: ByteStream, system: System = SYSTEM) -> None:
        """`stream`: the data connection of the session."""
        self._control = control
        self._links = [DataLink(stream)]
        self._monotonic = system.monotonic
        self._state: _ReceivedState | None = None  # of the last reply, until it is read
        self._payloads = 0  # from the server so far
        self._announcements = 0  # payloads that were announced to the server so far
        self._announced: _Announced | None = None  # the last of them, until it is asked for
        self._inbox: deque[FromServer] = deque()  # messages that wait for a payload, or behind one
        self._ready: deque[FromServer] = deque()  # messages that are complete
        self._is_expecting = False  # the first message in the inbox waits for its payload
        self._is_cut = False  # that payload was cut short
        # Not the exception itself: its traceback refers to this object, and so keeps its memory.
        self._lost_by: tuple[type[PeerLost] | type[ProtocolError], str] | None = None
        self._are_links_lost = False

    # -------------------------------------------------------------------------------- messages

    def send(self, message: object) -> None:
        """Send a control message."""
        self._control.send(message)

    def receive(self) -> FromServer:
        """Wait for the next message and its payload."""
        while not self._ready:
            if self._is_lost:
                assert self._lost_by is not None
                kind, reason = self._lost_by
                raise kind(reason)
            self._advance(None)
        return self._ready.popleft()

    def wait_readable(self, timeout_s: float) -> bool:
        """Return whether there is something to receive within this time."""
        until = self._monotonic() + timeout_s
        left_s = max(0.0, timeout_s)
        while not self._ready and not self._is_lost:
            self._advance(left_s)
            left_s = until - self._monotonic()
            if left_s <= 0:  # compared here: without a timeout it looks once, on any clock
                break
        return bool(self._ready) or self._is_lost

    @property
    def _is_lost(self) -> bool:
        """Whether the connection is gone, and nothing that was sent before can still arrive."""
        has_more = self._is_expecting or bool(self._inbox)
        return self._lost_by is not None and (self._are_links_lost or not has_more)

    def _advance(self, timeout_s: float | None) -> None:
        """Wait until something can be sent or received, or for this long, and do it."""
        self._deliver()
        if self._ready:
            return
        if self._compute():
            timeout_s = 0.0  # there may be more to do
        if self._control.wait(self.wishes, timeout_s):
            self._receive_messages()
        self._deliver()
        try:
            for link in self._links:
                self._is_cut |= link.move()
            if self._is_expecting and not any(link.receiver.is_expecting for link in self._links):
                self._pass_on()
        except (PeerLost, ProtocolError) as error:
            self._lose_links(error)

    @property
    def wishes(self) -> Wishes:
        """What this end waits for."""
        return Wishes(
            self._lost_by is None,
            [link.stream for link in self._links if link.receiver.is_expecting],
            [link.stream for link in self._links if link.sender],
        )

    def _compute(self) -> bool:
        """Do some work while nothing else is to be done; return whether there was any."""
        return False

    def _receive_messages(self) -> None:
        try:
            self._inbox.extend(self._control.receive_nowait())
        except (PeerLost, ProtocolError) as error:
            self._lost_by = type(error), str(error)

    def _lose_links(self, error: PeerLost | ProtocolError) -> None:
        """Pass on what has arrived without a payload, such as the reason for the loss."""
        only_messages = Wishes(message=True, to_receive=(), to_send=())
        while self._lost_by is None and self._control.wait(only_messages, 0.0):
            self._receive_messages()
        for message in self._inbox:
            internal = isinstance(message, SendPayload | StopPayload)
            if not internal and not self._has_payload(message):
                self._ready.append(message)
        self._inbox.clear()
        self._is_expecting = False
        self._lost_by, self._are_links_lost = self._lost_by or (type(error), str(error)), True

    def _deliver(self) -> None:
        """Pass on the messages that are complete, and begin to receive the next payload."""
        while self._inbox and not self._is_expecting:
            message = self._inbox[0]
            if isinstance(message, SendPayload | StopPayload):
                self._inbox.popleft()
                self._follow(message)
            elif not self._has_payload(message):
                self._pass_on()
            elif self._ready:
                return  # the memory may still be needed for an earlier one
            else:
                self._expect(message)

    def _expect(self, message: FromServer) -> None:
        """Begin to receive the payload of the first message."""
        self._payloads += 1
        for link, spans in zip(self._links, self._spans_for(message), strict=False):
            if spans:
                link.receiver.expect(self._payloads, spans)
        self._is_expecting, self._is_cut = True, False

    def _pass_on(self) -> None:
        """Pass on the first message, whose payload is complete or was cut short, if it has one."""
        self._is_expecting = False
        message = self._inbox.popleft()
        self._complete(message, is_complete=not self._is_cut)
        self._is_cut = False
        self._ready.append(message)

    def _follow(self, message: SendPayload | StopPayload) -> None:
        """Send the payload that the server asks for, or stop sending it."""
        announced = self._announced
        if announced is not None and announced.number == message.payload:
            self._announced = None
            if isinstance(message, SendPayload):
                for link, spans in zip(self._links, announced.spans, strict=False):
                    if spans:
                        link.sender.add(announced.number, spans)
        elif isinstance(message, StopPayload):
            for link in self._links:
                link.sender.cancel(message.payload)

    def _announce(self, spans: list[list[Span]]) -> None:
        """Note what to send on each link when the server asks for it."""
        self._announcements += 1
        self._announced = _Announced(self._announcements, spans)

    # Derived classes say which other messages have payloads, and what they do with them.

    def _has_payload(self, message: FromServer) -> bool:
        """Return whether a payload comes with a message."""
        return isinstance(message, StateReply) and message.data_bytes > 0

    def _spans_for(self, message: FromServer) -> list[list[Span]]:
        """Return where the payload of a message belongs, by link; it is received next."""
        assert isinstance(message, StateReply)
        self._forget_state()
        region, fd = Region.create(message.data_bytes, "state")
        self._state = _ReceivedState(bytearray(message.tree_bytes), fd)
        data = region.tensor(torch.uint8, region.size, 0)
        return [[Span(memoryview(self._state.tree)), *spans_of([data])]]

    def _complete(self, message: FromServer, *, is_complete: bool) -> None:
        """Called when a message is complete, or its payload was cut short."""

    # ----------------------------------------------------------------------------------- states

    def send_state(self, optimizer: int, state: Any, has_begun: bool) -> None:
        """Upload the state of an optimizer; raises SpecError if it can't be sent."""
        tree, fd = pack(state, "state of the optimizer")
        try:
            region = Region(fd)
        finally:
            os.close(fd)
        self._control.send(StateUpload(optimizer, tree, has_begun, region.size))
        self._announce([spans_of([region.tensor(torch.uint8, region.size, 0)])])

    def receive_state(self, reply: StateReply) -> Any:
        """Return the state that came with the reply; None if none did."""
        if not reply.tree_bytes:
            return None
        if self._state is None or not reply.data_bytes:
            raise ProtocolError("expected shared memory with a message, got none")
        try:
            return unpack(bytes(self._state.tree), self._state.fd)
        finally:
            self._forget_state()

    def _forget_state(self) -> None:
        if self._state is not None:
            os.close(self._state.fd)
            self._state = None

    def close(self) -> None:
        """Close all connections."""
        self._forget_state()
        self._control.close()
        for link in self._links:
            link.stream.close()
