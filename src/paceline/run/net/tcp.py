# SPDX-License-Identifier: BSD-3-Clause
"""The transport between hosts: a control connection, and a data connection for what is large.

Each side has its own memory. Parameters, gradients and states travel as payloads of the message
that needs them, and a message is received when its payload is complete. Because payloads have a
connection of their own, a cancellation overtakes them.

Both ends are written for any channel and any byte stream, so a simulation can use them with its own
connections.
"""

import os
from collections import deque
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import count
from typing import Any, NamedTuple, Protocol

import msgspec
import torch
from torch import Tensor

from paceline.errors import PeerLost, ProtocolError, SpecError
from paceline.run.net.data_peer import DataPeer
from paceline.run.net.host_messages import HostVersion, HostWelcome
from paceline.run.net.messages import (
    Assignment,
    CancelTurn,
    FromWorker,
    GradientReport,
    RunEnded,
    SendPayload,
    StateReply,
    StateUpload,
    StopPayload,
    Welcome,
)
from paceline.run.net.payload_stream import Span
from paceline.run.net.transport import Announcement, Delivered, Moved
from paceline.run.net.wire_format import codec_for
from paceline.run.tensors.layout import Views, flat
from paceline.run.tensors.shared_region import Region
from paceline.run.tensors.state_packing import pack, unpack
from paceline.run.tensors.version_buffers import BufferStore, ParameterBuffer

__all__ = [
    "NO_OTHERS",
    "OtherAddresses",
    "Relay",
    "TcpPeer",
    "VersionMessage",
    "spans_of",
    "spans_of_answer",
    "spans_of_version",
    "what_travels",
]


class ControlEnd(Protocol):
    """The server's end of a control connection."""

    def send(self, message: object) -> None:
        """Send a message."""

    def receive_nowait(self) -> Iterator[FromWorker]:
        """Yield the messages that have arrived."""

    def wait_readable(self, timeout_s: float) -> bool:
        """Return whether there is something to receive within this time."""

    def close(self) -> None:
        """Close the connection."""


def spans_of(tensors: Sequence[Tensor], may_round: bool = False) -> list[Span]:
    """Return the memory of dense tensors; empty ones have none."""
    return [
        Span(flat(one).view(torch.uint8).numpy().data, str(one.dtype) if may_round else "")
        for one in tensors
        if one.numel()
    ]


def spans_of_version(views: Views, optimizer: int | None, may_round: bool = True) -> list[Span]:
    """Return what travels of a version or a gradient: of one optimizer, or of all."""
    parameters = views.flats if optimizer is None else views.flats[optimizer : optimizer + 1]
    flats = [one for own in parameters for one in own]
    return spans_of(flats, may_round) + spans_of([*views.buffer_flats, *views.counter_flats])


VersionMessage = Assignment | RunEnded | HostVersion
"""The messages with which a version travels."""


def spans_of_answer(views: Views, message: VersionMessage) -> list[Span]:
    """Return what travels of the version with a message; the last one is never rounded."""
    optimizer, is_last = what_travels(message)
    return spans_of_version(views, optimizer, may_round=not is_last)


def what_travels(message: VersionMessage) -> tuple[int | None, bool]:
    """Return whose parameters travel with a message (None: all), and whether it is the last one."""
    if isinstance(message, RunEnded):
        return None, True
    return message.optimizer, isinstance(message, HostVersion) and message.is_last


class OtherAddresses(NamedTuple):
    """Where the other servers of a run are, and what they have."""

    servers: tuple[str, ...] = ()
    is_split: tuple[bool, ...] = ()  # which optimizers they have parts of


class Relay(Protocol):
    """Has the other servers of a run do their part of what the head's end to a worker does."""

    def open(
        self, peer: "TcpPeer", session: bytes, worker: int | None
    ) -> tuple[int, OtherAddresses]:
        """Expect data connections of this session; raises SpecError if a server has no memory.

        `worker`: its number; None: the peer is the agent of a host. Returns the number of the peer
        in later calls, and where the other servers are.
        """

    def publish(self, peer: int, payload: int, message: VersionMessage) -> None:
        """Send their parts of a version."""

    def stop(self, peer: int, payload: int) -> None:
        """Send nothing more of them."""

    def expect(self, peer: int, payload: int, optimizer: int) -> int:
        """Receive their parts of a gradient; return how many there are.

        `part_arrived` of the peer is called for each.
        """

    def skip(self, peer: int, payload: int) -> None:
        """Don't receive their parts of a gradient any more."""

    def close(self, peer: int) -> None:
        """Close the data connections of a peer."""


class _NoOthers:
    """The only server of a run has everything."""

    def open(
        self, peer: "TcpPeer", session: bytes, worker: int | None
    ) -> tuple[int, OtherAddresses]:
        del peer, session, worker
        return 0, OtherAddresses()

    def publish(self, peer: int, payload: int, message: VersionMessage) -> None: ...

    def stop(self, peer: int, payload: int) -> None: ...

    def expect(self, peer: int, payload: int, optimizer: int) -> int:
        del peer, payload, optimizer
        return 0

    def skip(self, peer: int, payload: int) -> None: ...

    def close(self, peer: int) -> None: ...


NO_OTHERS = _NoOthers()


class TcpPeer(DataPeer):
    """The server's end of the transport to one worker."""

    pid: int | None = None  # the worker may be on another host

    def __init__(
        self,
        control: ControlEnd,
        store: BufferStore,
        session: bytes = b"",
        others: Relay = NO_OTHERS,
        host: str = "",
    ) -> None:
        """`session`: of the control connection. `others`: the other servers of the run.

        `host`: where the worker runs, if others may run there, too.
        """
        super().__init__()
        self._host = host
        self._control = control
        self._store = store
        self._session = session
        self._others = others
        self._number = 0  # of this peer at the other servers
        self._sent = count(1)  # numbers of payloads to the worker
        self._announced = 0  # payloads from the worker so far
        self._awaited = 0  # the last of them, until it is here or withdrawn; 0: none
        self._parts_left = 0  # of the awaited payload, on all servers
        self._version_payload: tuple[int, int] | None = None  # of which turn, and its number
        self._slot: Views | None = None  # not None iff the worker was welcomed
        self._incoming: object = None  # what is received when its payload is complete
        self._uploaded = -1  # descriptor of an uploaded state that wasn't read; -1: none
        self._arrived: deque[Any] = deque()  # messages whose payload is complete

    # -------------------------------------------------------------------------- data connection

    @property
    def has_arrived(self) -> bool:
        """Whether `receive_nowait` has something that came over the data connection."""
        return bool(self._arrived) or super().has_arrived

    def _on_arrival(self, payload: int) -> None:
        self.part_arrived(payload)

    def count_moved(self, moved: Moved) -> None:
        """Count what another server has moved since it reported the last time."""
        self._moved = Moved(
            self._moved.to_worker - moved.to_worker, self._moved.to_server - moved.to_server
        )

    def part_arrived(self, payload: int) -> None:
        """Note that one server has received its part of a payload."""
        if payload != self._awaited:  # it was withdrawn meanwhile
            return
        self._parts_left -= 1
        if not self._parts_left:
            if self._incoming is not None:
                self._arrived.append(self._incoming)
            self._incoming, self._awaited = None, 0
            self.on_changed()

    def _send_next(self, spans: list[Span]) -> int:
        """Send a payload; return its number."""
        if self._stream is None:
            raise PeerLost("it has no data connection")
        number = next(self._sent)
        self._send_payload(number, spans)
        return number

    # -------------------------------------------------------------------------------- messages

    def receive_nowait(self) -> Iterator[FromWorker | Announcement]:
        """Yield the messages that have arrived, with their payloads."""
        has_news = bool(self._arrived)
        while self._arrived:
            yield self._arrived.popleft()
        for message in self._control.receive_nowait():
            has_news = True
            if isinstance(message, GradientReport) and not message.cancelled:
                yield self._announcement(message)
            elif isinstance(message, StateUpload) and message.data_bytes:
                self._await_upload(message, self._announce())
            else:
                yield message
        if self._lost_by and not has_news and not self._control.wait_readable(0.0):
            raise PeerLost(self._lost_by)  # everything that the worker sent before is received

    def _announcement(self, report: GradientReport) -> Announcement:
        number = self._announce()
        admit = partial(self._admit, report, number)
        stop = partial(self._stop, report, number)
        return Announcement(report, admit, stop, self._host)

    def _announce(self) -> int:
        """Return the number of a payload that the worker has announced."""
        if self._awaited:
            raise ProtocolError("a payload was announced before the last one was sent")
        self._announced += 1
        self._awaited = self._announced
        return self._announced

    def send(self, message: object) -> None:
        """Send a control message."""
        self._control.send(message)

    def cancel(self, turn: int) -> None:
        """Tell the worker that this turn won't count, and stop sending it the version."""
        self._control.send(CancelTurn(turn))
        if self._version_payload is not None and self._version_payload[0] == turn:
            number = self._version_payload[1]
            self._sender.cancel(number)
            self._others.stop(self._number, number)

    def open_slot(self, welcome: Welcome) -> Views:
        """Welcome the worker and make a slot for it; raises SpecError if there is no memory."""
        slot, others = self._open(welcome, welcome.worker)
        self._control.send(msgspec.structs.replace(welcome, **others._asdict()))
        self._send_constants()
        return slot

    def _open(
        self, welcome: Welcome | HostWelcome, worker: int | None
    ) -> tuple[Views, OtherAddresses]:
        """Make slots on all servers; return the one of this server, and where the others are."""
        slot = self._slot = self._store.new_accumulator()
        self._sender.codec = codec_for(welcome.wire_parameters)
        self._receiver.codec = codec_for(welcome.wire)
        self._number, others = self._others.open(self, self._session, worker)
        return slot, others

    def _send_constants(self) -> None:
        constants = spans_of(self._store.constants)
        if constants:
            self._send_next(constants)

    def publish(self, message: Assignment | RunEnded, buffer: ParameterBuffer) -> None:
        """Send the message and the version in this buffer."""
        self._control.send(message)
        number = self._send_next(spans_of_answer(buffer.views, message))
        self._others.publish(self._number, number, message)
        if isinstance(message, Assignment):
            self._version_payload = message.turn, number

    def _admit(self, report: GradientReport, payload: int) -> None:
        """Let the worker send a gradient that it has announced."""
        self._expect(report, payload, report.optimizer)
        self._control.send(SendPayload(payload))

    def _expect(self, incoming: object, payload: int, optimizer: int) -> None:
        """Receive a gradient into the slots of all servers, and then this."""
        assert self._slot is not None
        self._receiver.expect(payload, spans_of_version(self._slot, optimizer))
        self._incoming = incoming
        self._parts_left = 1 + self._others.expect(self._number, payload, optimizer)

    def _stop(self, incoming: object, payload: int) -> None:
        """Have nothing more sent of a gradient."""
        if incoming in self._arrived:
            self._arrived.remove(incoming)
        self._receiver.skip()
        self._incoming, self._awaited = None, 0
        self._others.skip(self._number, payload)
        self._control.send(StopPayload(payload))

    def delivered(self, report: GradientReport) -> Delivered:
        """Return the gradient that the report announced."""
        assert self._slot is not None, report
        return Delivered(self._slot)

    # --------------------------------------------------------------------------------- states

    def send_state(self, state: Any, what: str) -> None:
        """Answer a StateRequest; raises SpecError if the state can't be sent."""
        tree, fd = pack(state, what)
        try:
            region = Region(fd)
        finally:
            os.close(fd)
        data = region.tensor(torch.uint8, region.size, 0)
        self._control.send(StateReply(len(tree), region.size))
        self._send_next([Span(memoryview(tree)), *spans_of([data])])

    def _await_upload(self, message: StateUpload, payload: int) -> None:
        try:
            region, fd = Region.create(message.data_bytes, "uploaded state")
        except SpecError as error:  # the worker decides how much it is
            raise ProtocolError(str(error)) from None
        self._forget_upload()
        self._uploaded = fd
        data = region.tensor(torch.uint8, region.size, 0)
        self._receiver.expect(payload, spans_of([data]))
        self._incoming, self._parts_left = message, 1
        self._control.send(SendPayload(payload))

    def receive_state(self, upload: StateUpload) -> Any:
        """Return the uploaded state; raises ProtocolError if it isn't one."""
        if self._uploaded < 0 or not upload.data_bytes:
            raise ProtocolError("expected shared memory with a message, got none")
        try:
            return unpack(upload.tree, self._uploaded)
        finally:
            self._forget_upload()

    def _forget_upload(self) -> None:
        if self._uploaded >= 0:
            os.close(self._uploaded)
            self._uploaded = -1

    def close(self) -> None:
        """Close both connections."""
        self._control.close()
        self._forget_upload()
        super().close()
        if self._slot is not None:
            self._others.close(self._number)
            self._slot = None
