# SPDX-License-Identifier: BSD-3-Clause
"""The connections of a host's agent to the servers of its run.

The agent has a session of its own with every server, for versions and sums. For each worker that it
serves, it also has a control connection to the head, and a data connection for the constants and
states of that worker.

Nothing here waits, except for the answer to a join.
"""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Protocol

from paceline.errors import PeerLost, ProtocolError
from paceline.release import RELEASE
from paceline.run.net.data_socket import ByteStream, receive_payloads, send_payloads
from paceline.run.net.host_messages import (
    HostVersion,
    HostWelcome,
    JoinAsHost,
    SendSum,
    SumSpoiled,
)
from paceline.run.net.messages import FromServer, Refused, StopPayload, Welcome
from paceline.run.net.payload_stream import Arrival, Span
from paceline.run.net.shared_memory import SharedMemoryStore
from paceline.run.net.tcp import spans_of, spans_of_answer, spans_of_version
from paceline.run.net.tcp_client import ClientControl, DataLink, TcpClient
from paceline.run.net.wire_format import ErrorFeedback, HalfPrecision, codec_for
from paceline.run.server.host_sums import SpoiledSum, SumCodec, Summand, terms_of
from paceline.run.server.host_versions import HostVersions
from paceline.run.system import SYSTEM, System
from paceline.run.tensors.layout import Views
from paceline.run.tensors.partition import Part, partition
from paceline.run.tensors.state_spec import StateSpec

__all__ = ["AgentControl", "HostUplink", "HostedClient"]


class AgentControl(Protocol):
    """The agent's end of its control connection to the head."""

    def send(self, message: object) -> None:
        """Send a message."""

    def receive(self) -> FromServer:
        """Wait for the next message."""

    def receive_nowait(self) -> Iterator[FromServer]:
        """Yield the messages that have arrived."""

    def wait_readable(self, timeout_s: float) -> bool:
        """Return whether there is something to receive within this time."""

    def close(self) -> None:
        """Close the connection."""


class HostedClient(TcpClient):
    """The connection to the head for one worker of the host."""

    def __init__(
        self,
        control: ClientControl,
        stream: ByteStream,
        store: SharedMemoryStore,
        system: System = SYSTEM,
    ) -> None:
        super().__init__(control, stream, system)
        self._constants = store.constants

    def _has_payload(self, message: FromServer) -> bool:
        if isinstance(message, Welcome):
            return any(one.numel() for one in self._constants)
        return super()._has_payload(message)

    def _spans_for(self, message: FromServer) -> list[list[Span]]:
        if isinstance(message, Welcome):
            return [spans_of(self._constants)]
        return super()._spans_for(message)


@dataclass
class _Incoming:
    """A version that is being received."""

    message: HostVersion
    left: int  # parts that haven't arrived
    is_cut: bool = False


@dataclass(eq=False)
class _Link:
    """A data connection to one server."""

    link: DataLink
    sums: SumCodec
    expected: deque[tuple[int, list[Span]]] = field(default_factory=deque)  # payloads


class HostUplink:
    """The agent's own session."""

    def __init__(
        self,
        control: AgentControl,
        dial_data: Callable[[str], ByteStream],
        store: SharedMemoryStore,
        slot_of: Callable[[int], Views | None],
    ) -> None:
        """`dial_data`: opens a data connection to the server at an address; "" is the head's.

        `slot_of`: returns the slot of a worker, if there is such a worker.
        """
        self._control = control
        self._dial_data = dial_data
        self._store = store
        self._slot_of = slot_of
        self.versions = HostVersions(store)
        self._links: list[_Link] = []
        self._parts: list[Part] = []  # by link; empty: the only server has everything
        self._sum = store.new_accumulator()
        self._feedback: ErrorFeedback | None = None  # not None iff sums are rounded
        self._sum_of: int | None = None  # the first worker of the last sum, until its fate is known
        self._sending = 0  # the payload of the sum that is being sent; 0: none
        self._incoming: dict[int, _Incoming] = {}  # by payload

    def join(self, spec: StateSpec) -> None:
        """Join the run; raises ProtocolError if the head refuses this agent."""
        head = DataLink(self._dial_data(""))
        self._links.append(_Link(head, SumCodec(head.sender.codec)))
        self._control.send(JoinAsHost(RELEASE, spec))
        welcome = self._control.receive()
        if isinstance(welcome, Refused):
            raise ProtocolError(welcome.reason)
        if not isinstance(welcome, HostWelcome):
            raise ProtocolError(f"expected a welcome, got {welcome!r}")
        if welcome.servers:
            self._parts = partition(spec, 1 + len(welcome.servers), welcome.is_split)
        for address in welcome.servers:
            link = DataLink(self._dial_data(address))
            self._links.append(_Link(link, SumCodec(link.sender.codec)))
        for one in self._links:
            one.link.receiver.codec = codec_for(welcome.wire_parameters)
            one.sums = SumCodec(codec_for(welcome.wire))
            one.link.sender.codec = one.sums
        codec = codec_for(welcome.wire)
        if isinstance(codec, HalfPrecision):
            residuals = self._split(self._store.new_accumulator())
            self._feedback = ErrorFeedback(
                codec, lambda number: _joined([spans_of_version(one, number) for one in residuals])
            )

    def _split(self, whole: Views) -> list[Views]:
        """Return what each server has of it, by link."""
        return [part.of(whole) for part in self._parts] or [whole]

    # ---------------------------------------------------------------------------------- moving

    @property
    def to_receive(self) -> list[ByteStream]:
        """The data connections that may have bytes."""
        return [one.link.stream for one in self._links if one.link.receiver.is_expecting]

    @property
    def to_send(self) -> list[ByteStream]:
        """The data connections that may take bytes."""
        return [one.link.stream for one in self._links if one.link.sender]

    def move(self) -> None:
        """Do what can be done now; raises PeerLost or ProtocolError if a connection is lost."""
        while self._control.wait_readable(0.0):
            for message in self._control.receive_nowait():
                self._handle(message)
        for one in self._links:
            self._move(one)

    def compute(self) -> bool:
        """Do some work while nothing else is to be done; return whether there was any."""
        return self._feedback is not None and self._feedback.advance()

    def _handle(self, message: FromServer) -> None:
        if isinstance(message, HostVersion):
            self._begin_version(message)
        elif isinstance(message, SendSum):
            self._begin_sum(message)
        elif isinstance(message, StopPayload):
            self._stop_sum(message.payload)
        elif isinstance(message, Refused):
            raise PeerLost(message.reason)
        else:
            raise ProtocolError(f"expected no {type(message).__name__}")

    def _move(self, one: _Link) -> None:
        try:
            send_payloads(one.link.stream, one.link.sender)
        except SpoiledSum as error:
            payload = self._sending
            self._stop_sum(payload)
            self._control.send(SumSpoiled(payload, error.workers))
        while one.link.receiver.is_expecting:
            arrival = next(iter(receive_payloads(one.link.stream, one.link.receiver)), None)
            if arrival is None:
                break
            one.expected.popleft()
            self._on_arrival(arrival)
            self._expect_next(one)

    # --------------------------------------------------------------------------------- versions

    def _begin_version(self, message: HostVersion) -> None:
        incoming = _Incoming(message, 0)
        for one, part in zip(self._links, self._split(self.versions.begin(message)), strict=True):
            spans = spans_of_answer(part, message)
            if spans:
                incoming.left += 1
                one.expected.append((message.payload, spans))
                if len(one.expected) == 1:
                    self._expect_next(one)
        self._incoming[message.payload] = incoming

    def _expect_next(self, one: _Link) -> None:
        if one.expected:
            one.link.receiver.expect(*one.expected[0])

    def _on_arrival(self, arrival: Arrival) -> None:
        incoming = self._incoming[arrival.number]
        incoming.left -= 1
        incoming.is_cut |= not arrival.is_complete
        if incoming.left:
            return
        del self._incoming[arrival.number]
        if incoming.is_cut:
            self.versions.drop(incoming.message)
        else:
            self.versions.complete(incoming.message)

    # ------------------------------------------------------------------------------------- sums

    def _begin_sum(self, message: SendSum) -> None:
        slots = [self._slot_of(worker) for worker in message.workers]
        if self._feedback is not None:
            self._feedback.finish()  # from now on, the memory of the last sum changes
        by_worker = [self._split(slot) for slot in slots if slot is not None]
        if len(by_worker) < len(message.workers):
            return  # a worker has left; the head will hear of it, and ask for another sum
        totals = self._split(self._sum)
        spans = [spans_of_version(part, message.optimizer) for part in totals]
        if self._feedback is not None:
            rest = iter(self._feedback.add_to(_joined(spans), message.optimizer))
            spans = [list(islice(rest, len(own))) for own in spans]
        self._sum_of, self._sending = message.workers[0], message.payload
        ratios = [samples / message.samples[0] for samples in message.samples]
        for number, (one, own) in enumerate(zip(self._links, spans, strict=True)):
            rows = zip(message.workers, by_worker, ratios, strict=True)
            summands = [Summand(worker, parts[number], ratio) for worker, parts, ratio in rows]
            if own:
                terms = terms_of(totals[number], summands, message.optimizer)
                one.sums.begin(summands, terms)
                one.link.sender.add(message.payload, own)

    def _stop_sum(self, payload: int) -> None:
        for one in self._links:
            one.link.sender.cancel(payload)
        if payload == self._sending:
            self._sending, self._sum_of = 0, None

    def settle(self, worker: int, is_accepted: bool) -> None:
        """Note the fate of a worker's gradient: if its sum was accepted, so was its rounding."""
        if worker == self._sum_of:
            self._sum_of = None
            if self._feedback is not None:
                self._feedback.settle(is_accepted)

    def close(self) -> None:
        """Close all connections."""
        self._control.close()
        for one in self._links:
            one.link.stream.close()
        self._store.close()


def _joined(spans: list[list[Span]]) -> list[Span]:
    return list(chain.from_iterable(spans))
