# SPDX-License-Identifier: BSD-3-Clause
"""A worker's end of the transport between hosts.

The worker has one buffer for the parameters, into which every version is received, and a slot for
its gradients. If the run has several servers, each sends and receives its part of them over a data
connection of its own; all messages are exchanged with the head.
"""

import os
from collections.abc import Callable, Iterable
from itertools import chain, islice

from paceline.core.events import Fate
from paceline.errors import ProtocolError
from paceline.run.net.data_socket import ByteStream
from paceline.run.net.messages import Assignment, FromServer, GradientReport, RunEnded, Welcome
from paceline.run.net.payload_stream import Span
from paceline.run.net.tcp import spans_of, spans_of_answer, spans_of_version
from paceline.run.net.tcp_client import ClientControl, DataLink, TcpClient
from paceline.run.net.transport import OpenedSlot
from paceline.run.net.wire_format import ErrorFeedback, HalfPrecision, codec_for
from paceline.run.system import SYSTEM, System
from paceline.run.tensors.layout import Layout, Views, lay_out_constants, tensors
from paceline.run.tensors.partition import Part, partition
from paceline.run.tensors.shared_region import Region
from paceline.run.tensors.state_spec import StateSpec

__all__ = ["TcpWorker"]

DialData = Callable[[str], ByteStream]
"""Opens a data connection of this session to the server at an address."""


class TcpWorker(TcpClient):
    """A worker's end of the transport."""

    shares_clock = False

    def __init__(
        self,
        control: ClientControl,
        stream: ByteStream,
        spec: StateSpec,
        dial_data: DialData | None = None,
        system: System = SYSTEM,
    ) -> None:
        """`stream`: the data connection to the head. `dial_data`: opens those to other servers."""
        super().__init__(control, stream, system)
        self._dial_data = dial_data
        self._spec = spec
        layout = self._layout = Layout.of(spec)
        self._buffer = layout.view(_new_memory(layout.size, "parameters"))
        self._slot = layout.view(_new_memory(layout.size, "slot"))
        section, size = lay_out_constants(spec)
        self._constants = tensors(section, _new_memory(size, "constants"))
        self._parts: list[Part] = []  # by link; empty: the only server has everything
        self._buffer_parts, self._slot_parts = [self._buffer], [self._slot]
        self._opened: OpenedSlot | None = None  # not None iff the worker was welcomed
        self._received: set[int] = set()  # the server's buffers from which a version has arrived
        self._cancelled: Assignment | None = None  # whose version was cancelled on its way
        self._feedback: ErrorFeedback | None = None  # not None iff gradients are rounded

    def _compute(self) -> bool:
        return self._feedback is not None and self._feedback.advance()

    def _has_payload(self, message: FromServer) -> bool:
        if isinstance(message, Welcome):
            return any(one.numel() for one in self._constants)
        return isinstance(message, Assignment | RunEnded) or super()._has_payload(message)

    def _spans_for(self, message: FromServer) -> list[list[Span]]:
        if isinstance(message, Welcome):
            return [spans_of(self._constants)]
        if not isinstance(message, Assignment | RunEnded):
            return super()._spans_for(message)
        if isinstance(message, Assignment) and self._feedback is not None:
            notice = message.notice
            self._feedback.settle(notice is not None and notice.fate is Fate.ACCEPTED)
        return [spans_of_answer(part, message) for part in self._buffer_parts]

    def _complete(self, message: FromServer, *, is_complete: bool) -> None:
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

    def _agree(self, welcome: Welcome) -> None:
        """Connect to the other servers; move numbers in the formats that the head wants."""
        if welcome.servers:
            self._parts = partition(self._spec, 1 + len(welcome.servers), welcome.is_split)
        self._buffer_parts, self._slot_parts = self._split(self._buffer), self._split(self._slot)
        for address in welcome.servers:
            assert self._dial_data is not None
            self._links.append(DataLink(self._dial_data(address)))
        for link in self._links:
            link.receiver.codec = codec_for(welcome.wire_parameters)
            link.sender.codec = codec_for(welcome.wire)
        codec = codec_for(welcome.wire)
        if isinstance(codec, HalfPrecision):
            residuals = self._layout.view(_new_memory(self._layout.size, "residuals"))
            residual_parts = self._split(residuals)
            self._feedback = ErrorFeedback(
                codec, lambda number: _joined(_gradient(residual_parts, number))
            )

    def _split(self, whole: Views) -> list[Views]:
        """Return what each server has of it, by link."""
        return [part.of(whole) for part in self._parts] or [whole]

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
        spans = _gradient(self._slot_parts, report.optimizer)
        if self._feedback is not None:
            rest = iter(self._feedback.add_to(_joined(spans), report.optimizer))
            spans = [list(islice(rest, len(own))) for own in spans]
        self._announce(spans)


def _gradient(parts: Iterable[Views], optimizer: int) -> list[list[Span]]:
    """Return what travels of a gradient to each server."""
    return [spans_of_version(part, optimizer) for part in parts]


def _joined(spans: list[list[Span]]) -> list[Span]:
    return list(chain.from_iterable(spans))


def _new_memory(size: int, what: str) -> Region:
    region, fd = Region.create(size, what)
    os.close(fd)
    return region
