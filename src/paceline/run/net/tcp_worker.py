# SPDX-License-Identifier: BSD-3-Clause
"""A worker's end of the transport between hosts.

The worker has one buffer for the parameters, into which every version is received, and a slot for
its gradients. It sends and receives only inside `receive` and `wait_readable`, which the worker
calls whenever it waits, and now and then while it computes.
"""

import os
from collections import deque
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch

from paceline.core.events import Fate
from paceline.errors import PeerLost, ProtocolError
from paceline.run.net.channel import Channel, wait_ready
from paceline.run.net.data_socket import ByteStream, receive_payloads, send_payloads
from paceline.run.net.messages import (
    Assignment,
    FromServer,
    GradientReport,
    RunEnded,
    SendPayload,
    StateReply,
    StateUpload,
    StopPayload,
    Welcome,
)
from paceline.run.net.payload_stream import PayloadReceiver, PayloadSender, Span
from paceline.run.net.tcp import spans_of, spans_of_answer, spans_of_version
from paceline.run.net.transport import OpenedSlot
from paceline.run.net.wire_format import ErrorFeedback, HalfPrecision, codec_for
from paceline.run.system import SYSTEM, System
from paceline.run.tensors.layout import Layout, Views, lay_out_constants, tensors
from paceline.run.tensors.shared_region import Region
from paceline.run.tensors.state_packing import pack, unpack
from paceline.run.tensors.state_spec import StateSpec

__all__ = ["ControlSocket", "TcpWorker"]


class WorkerControl(Protocol):
    """A worker's end of a control connection."""

    def send(self, message: object) -> None:
        """Send a message."""

    def wait(self, stream: ByteStream, wishes: "Wishes", timeout_s: float | None) -> bool:
        """Wait until one of the wishes is met, or for this long; return whether it is a message."""

    def receive_nowait(self) -> Iterator[FromServer]:
        """Yield the messages that have arrived."""

    def close(self) -> None:
        """Close the connection."""


class Wishes(NamedTuple):
    """What a worker waits for."""

    message: bool  # on the control connection
    to_receive: bool  # the stream has bytes
    to_send: bool  # the stream takes bytes


class ControlSocket:
    """A control connection over a socket."""

    def __init__(self, channel: Channel[FromServer]) -> None:
        self._channel = channel
        self.send = channel.send
        self.receive_nowait = channel.receive_nowait
        self.close = channel.close

    def wait(self, stream: ByteStream, wishes: Wishes, timeout_s: float | None) -> bool:
        """Wait until one of the wishes is met, or for this long; return whether it is a message."""
        control, data = self._channel.fileno(), stream.fileno()
        reads = [control] * wishes.message + [data] * wishes.to_receive
        if wishes.to_receive and stream.has_unread():
            timeout_s = 0.0
        return control in wait_ready(reads, [data] * wishes.to_send, timeout_s)


class _Announced(NamedTuple):
    """A payload that the server hasn't asked for yet."""

    number: int
    spans: list[Span]


class _ReceivedState(NamedTuple):
    """Memory for the state that comes with a reply."""

    tree: bytearray
    fd: int


class TcpWorker:
    """A worker's end of the transport."""

    shares_clock = False

    def __init__(
        self,
        control: WorkerControl,
        stream: ByteStream,
        spec: StateSpec,
        system: System = SYSTEM,
    ) -> None:
        """`stream`: the data connection of the session."""
        self._control = control
        self._stream = stream
        self._monotonic = system.monotonic
        layout = self._layout = Layout.of(spec)
        self._buffer = layout.view(_new_memory(layout.size, "parameters"))
        self._slot = layout.view(_new_memory(layout.size, "slot"))
        section, size = lay_out_constants(spec)
        self._constants = tensors(section, _new_memory(size, "constants"))
        self._opened: OpenedSlot | None = None  # not None iff the worker was welcomed
        self._received: set[int] = set()  # the server's buffers from which a version has arrived
        self._cancelled: Assignment | None = None  # whose version was cancelled on its way
        self._state: _ReceivedState | None = None  # of the last reply, until it is read
        self._sender = PayloadSender()
        self._receiver = PayloadReceiver()
        self._feedback: ErrorFeedback | None = None  # not None iff gradients are rounded
        self._payloads = 0  # from the server so far
        self._announcements = 0  # payloads that were announced to the server so far
        self._announced: _Announced | None = None  # the last of them, until it is asked for
        self._inbox: deque[FromServer] = deque()  # messages that wait for a payload, or behind one
        self._ready: deque[FromServer] = deque()  # messages that are complete
        # Not the exception itself: its traceback refers to this object, and so keeps its memory.
        self._lost_by: tuple[type[PeerLost] | type[ProtocolError], str] | None = None
        self._is_stream_lost = False

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
        has_more = self._receiver.is_expecting or bool(self._inbox)
        return self._lost_by is not None and (self._is_stream_lost or not has_more)

    def _advance(self, timeout_s: float | None) -> None:
        """Wait until something can be sent or received, or for this long, and do it."""
        self._deliver()
        if self._ready:
            return
        if self._feedback is not None and self._feedback.advance():
            timeout_s = 0.0  # there may be more to do
        wishes = Wishes(self._lost_by is None, self._receiver.is_expecting, bool(self._sender))
        has_message = self._control.wait(self._stream, wishes, timeout_s)
        if has_message:
            self._receive_messages()
        self._deliver()
        try:
            send_payloads(self._stream, self._sender)
            if self._receiver.is_expecting:
                for arrival in receive_payloads(self._stream, self._receiver):
                    self._complete(arrival.is_complete)
                    break  # the next payload may use the same memory
        except (PeerLost, ProtocolError) as error:
            self._lose_stream(error)

    def _receive_messages(self) -> None:
        try:
            self._inbox.extend(self._control.receive_nowait())
        except (PeerLost, ProtocolError) as error:
            self._lost_by = type(error), str(error)

    def _lose_stream(self, error: PeerLost | ProtocolError) -> None:
        """Pass on what has arrived without a payload, such as the reason for the loss."""
        only_messages = Wishes(message=True, to_receive=False, to_send=False)
        while self._lost_by is None and self._control.wait(self._stream, only_messages, 0.0):
            self._receive_messages()
        internal = (SendPayload, StopPayload)
        for message in self._inbox:
            if not isinstance(message, internal) and not self._has_payload(message):
                self._ready.append(message)
        self._inbox.clear()
        self._lost_by, self._is_stream_lost = self._lost_by or (type(error), str(error)), True

    def _deliver(self) -> None:
        """Pass on the messages that are complete, and begin to receive the next payload."""
        while self._inbox and not self._receiver.is_expecting:
            message = self._inbox[0]
            if isinstance(message, SendPayload | StopPayload):
                self._inbox.popleft()
                self._follow(message)
            elif not self._has_payload(message):
                self._complete(is_complete=True)
            elif self._ready:
                return  # the memory may still be needed for an earlier one
            else:
                self._payloads += 1
                self._receiver.expect(self._payloads, self._spans_for(message))
                if isinstance(message, Assignment) and self._feedback is not None:
                    notice = message.notice
                    self._feedback.settle(notice is not None and notice.fate is Fate.ACCEPTED)

    def _has_payload(self, message: FromServer) -> bool:
        if isinstance(message, Welcome):
            return any(one.numel() for one in self._constants)
        is_state = isinstance(message, StateReply) and message.data_bytes > 0
        return is_state or isinstance(message, Assignment | RunEnded)

    def _follow(self, message: SendPayload | StopPayload) -> None:
        """Send the payload that the server asks for, or stop sending it."""
        announced = self._announced
        if announced is not None and announced.number == message.payload:
            self._announced = None
            if isinstance(message, SendPayload):
                self._sender.add(*announced)
        elif isinstance(message, StopPayload):
            self._sender.cancel(message.payload)

    def _spans_for(self, message: FromServer) -> list[Span]:
        """Return where the payload of a message belongs."""
        if isinstance(message, Welcome):
            return spans_of(self._constants)
        if isinstance(message, StateReply):
            self._forget_state()
            region, fd = Region.create(message.data_bytes, "state")
            self._state = _ReceivedState(bytearray(message.tree_bytes), fd)
            data = region.tensor(torch.uint8, region.size, 0)
            return [Span(memoryview(self._state.tree)), *spans_of([data])]
        assert isinstance(message, Assignment | RunEnded)
        return spans_of_answer(self._buffer, message)

    def _complete(self, is_complete: bool) -> None:
        """Pass on the first message, whose payload is complete or was cancelled."""
        message = self._inbox.popleft()
        if isinstance(message, Welcome):
            self._agree(message)
            self._opened = OpenedSlot(self._slot, self._constants)
        elif isinstance(message, Assignment | RunEnded):
            if self._feedback is not None:
                self._feedback.finish()  # from now on, the script may overwrite its gradient
            self._received.add(message.buffer)
            self._cancelled = None
            if not is_complete and isinstance(message, Assignment):
                self._cancelled = message
        self._ready.append(message)

    def _agree(self, welcome: Welcome) -> None:
        """Send and receive numbers in the formats that the server wants."""
        self._receiver.codec = codec_for(welcome.wire_parameters)
        self._sender.codec = codec = codec_for(welcome.wire)
        if isinstance(codec, HalfPrecision):
            residuals = self._layout.view(_new_memory(self._layout.size, "residuals"))
            self._feedback = ErrorFeedback(codec, partial(spans_of_version, residuals))

    # ---------------------------------------------------------------------------------- tensors

    def open_slot(self) -> OpenedSlot:
        """Return the memory that came with the welcome."""
        if self._opened is None:
            raise ProtocolError("expected a slot with the server's welcome, got none")
        return self._opened

    def fetch(self, message: Assignment | RunEnded) -> Views | None:
        """Return the version that the message names; None if it was cancelled on its way."""
        if message.buffer not in self._received:
            raise ProtocolError(f"the server has not shared buffer {message.buffer}")
        return None if message is self._cancelled else self._buffer

    def announce(self, report: GradientReport) -> None:
        """Tell the server that the gradient in the slot is complete; send it when asked to."""
        self._control.send(report)
        spans = spans_of_version(self._slot, report.optimizer)
        if self._feedback is not None:
            spans = self._feedback.add_to(spans, report.optimizer)
        self._announce(spans)

    def _announce(self, spans: list[Span]) -> None:
        self._announcements += 1
        self._announced = _Announced(self._announcements, spans)

    # ----------------------------------------------------------------------------------- states

    def send_state(self, optimizer: int, state: Any, has_begun: bool) -> None:
        """Upload the state of an optimizer; raises SpecError if it can't be sent."""
        tree, fd = pack(state, "state of the optimizer")
        try:
            region = Region(fd)
        finally:
            os.close(fd)
        self._control.send(StateUpload(optimizer, tree, has_begun, region.size))
        self._announce(spans_of([region.tensor(torch.uint8, region.size, 0)]))

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
        """Close both connections."""
        self._forget_state()
        self._control.close()
        self._stream.close()


def _new_memory(size: int, what: str) -> Region:
    region, fd = Region.create(size, what)
    os.close(fd)
    return region
