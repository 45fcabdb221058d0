# SPDX-License-Identifier: BSD-3-Clause
"""A server's ends to the agent of a host, and to the workers that the agent serves.

The agent exchanges tensors for all of them: a version travels to the host once, however many of its
workers want it, and the gradients that count travel as one sum. So a host's traffic doesn't grow
with the number of its workers.

Each worker keeps a control connection of its own, so it joins, reports, is told its fate and dies
like any other. Two things differ. Its versions are published through the agent; and its gradient
is announced, but asked for together with others (`HostPeer.ask`). The sum of a group arrives as one
`HostSum`. It is in the agent's slot, which counts as the slot of the group's first worker.
"""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

import msgspec

from paceline.errors import InternalError, PeerLost
from paceline.run.net.host_messages import HostVersion, HostWelcome, SendSum, SumSpoiled
from paceline.run.net.messages import (
    AbandonReport,
    Assignment,
    FromWorker,
    GradientReport,
    RunEnded,
    Welcome,
)
from paceline.run.net.tcp import NO_OTHERS, ControlEnd, Relay, TcpPeer, spans_of_answer
from paceline.run.net.transport import Announcement, Delivered, Moved
from paceline.run.tensors.layout import Views
from paceline.run.tensors.version_buffers import BufferStore, ParameterBuffer

__all__ = ["HostPeer", "HostSum", "HostedPeer"]


@dataclass(frozen=True, eq=False)
class HostSum:
    """The gradients of some workers of a host, which travel as one sum."""

    host: "HostPeer"
    payload: int
    workers: tuple[int, ...]  # in ascending order
    reports: tuple[GradientReport, ...]

    def report_of(self, worker: int) -> GradientReport:
        """Return the report of one of the workers."""
        return self.reports[self.workers.index(worker)]


@dataclass(frozen=True)
class _Published:
    """A version that the agent has, or is about to have."""

    payload: int
    version: int
    is_last: bool


class HostPeer(TcpPeer):
    """The server's end to the agent of a host."""

    def __init__(
        self,
        control: ControlEnd,
        store: BufferStore,
        session: bytes = b"",
        others: Relay = NO_OTHERS,
        host: str = "",
    ) -> None:
        super().__init__(control, store, session, others, host)
        self._newest: _Published | None = None
        self._readers: dict[HostedPeer, int] = {}  # the payload that each worker may be using
        self._asked: HostSum | None = None  # that was asked for and hasn't arrived
        self._in_slot: HostSum | None = None  # the last that has arrived
        self.hosted: set[HostedPeer] = set()
        """The ends to the workers of this host."""

    @property
    def slot(self) -> Views:
        """The memory for the sums of this host."""
        assert self._slot is not None, "the agent was welcomed"
        return self._slot

    @property
    def name(self) -> str:
        """Identifies the host, for as long as this connection lasts."""
        return self._session.hex()

    def welcome(self, welcome: HostWelcome) -> None:
        """Accept the agent; raises SpecError if a server has no memory for its slot."""
        _, others = self._open(welcome, None)
        self._control.send(msgspec.structs.replace(welcome, **others._asdict()))

    # --------------------------------------------------------------------------------- versions

    def publish_to(
        self, worker: "HostedPeer", message: Assignment | RunEnded, buffer: ParameterBuffer
    ) -> None:
        """Let a worker fetch a version, which travels unless the agent has it already."""
        is_last = isinstance(message, RunEnded)
        optimizer = None if isinstance(message, RunEnded) else message.optimizer
        wanted, newest = (message.version, is_last), self._newest
        if optimizer is not None:
            self._send_version(message.version, buffer, optimizer=optimizer, worker=worker.number)
        elif newest is not None and (newest.version, newest.is_last) == wanted:
            self._readers[worker] = newest.payload
        else:
            payload = self._send_version(message.version, buffer, is_last=is_last)
            self._newest = _Published(payload, message.version, is_last)
            self._readers[worker] = payload

    def _send_version(
        self,
        version: int,
        buffer: ParameterBuffer,
        *,
        optimizer: int | None = None,
        is_last: bool = False,
        worker: int | None = None,
    ) -> int:
        """Send a version, or the parameters of one optimizer to one worker; return its payload."""
        if not self.is_attached:
            raise PeerLost("the agent of its host has no data connection")
        payload = next(self._sent)
        keep = set(self._readers.values())
        if worker is not None and self._newest is not None:
            keep.add(self._newest.payload)
        message = HostVersion(payload, version, optimizer, is_last, worker, tuple(sorted(keep)))
        self._control.send(message)
        self._send_payload(payload, spans_of_answer(buffer.views, message))
        self._others.publish(self._number, payload, message)
        return payload

    def done_reading(self, worker: "HostedPeer") -> None:
        """Note that a worker doesn't use its version any more."""
        self._readers.pop(worker, None)

    def forget(self, worker: "HostedPeer") -> None:
        """Note that a worker is gone.

        What nobody else wants isn't sent any more: its memory may change from now on.
        """
        self.hosted.discard(worker)
        payload = self._readers.pop(worker, None)
        if payload is not None and payload not in self._readers.values():
            self._sender.cancel(payload)
            self._others.stop(self._number, payload)
            if self._newest is not None and self._newest.payload == payload:
                self._newest = None

    # ------------------------------------------------------------------------------------- sums

    def ask(self, workers: Sequence[int], reports: Sequence[GradientReport]) -> HostSum:
        """Have the agent send the sum of these gradients; the slot must be free."""
        if self._asked is not None:
            raise InternalError("a host sends one sum at a time")
        pairs = sorted(zip(workers, reports, strict=True), key=lambda pair: pair[0])
        ordered = tuple([worker for worker, _ in pairs])
        own = tuple([report for _, report in pairs])
        payload = self._announce()
        self._asked = HostSum(self, payload, ordered, own)
        self._in_slot = None
        self._expect(self._asked, payload, own[0].optimizer)
        samples = tuple([report.samples for report in own])
        self._control.send(SendSum(payload, own[0].optimizer, ordered, samples))
        return self._asked

    def stop(self, asked: HostSum) -> None:
        """Have nothing more sent of a sum, which was asked for or has arrived."""
        if self._asked is asked:
            self._asked = None
            with suppress(PeerLost):  # receiving tells
                self._stop(asked, asked.payload)

    def take(self, arrived: HostSum) -> None:
        """Note that a sum is in the slot."""
        self._asked, self._in_slot = None, arrived

    def spoilers(self, message: SumSpoiled) -> list[int]:
        """Return the workers that spoil the sum that was asked for; none if it isn't wanted."""
        asked = self._asked
        if asked is None or message.payload != asked.payload:
            return []
        return [worker for worker in message.workers if worker in asked.workers]

    @property
    def slot_worker(self) -> int | None:
        """The worker in whose name the sum in the slot was delivered; None: there is none."""
        return None if self._in_slot is None else self._in_slot.workers[0]

    def _on_cancelled(self, payload: int) -> None:
        """Wait for the message that says why the agent has cancelled a sum."""

    def delivered_of(self, worker: int) -> Delivered:
        """Return a worker's gradient, which is part of the sum that arrived last."""
        assert self._in_slot is not None
        assert worker in self._in_slot.workers
        is_first = worker == self._in_slot.workers[0]
        return Delivered(self._slot if is_first else None, self._number)


class HostedPeer(TcpPeer):
    """The server's end to a worker that an agent serves."""

    def __init__(
        self, control: ControlEnd, store: BufferStore, session: bytes, host: HostPeer
    ) -> None:
        super().__init__(control, store, session, host=host.name)
        self.agent = host
        self.number = -1  # of the worker, once it is welcomed

    def open_slot(self, welcome: Welcome) -> Views:
        """Welcome the worker; its slot is the agent's."""
        self.number = welcome.worker
        self.agent.hosted.add(self)
        self._control.send(welcome)
        self._send_constants()
        return self.agent.slot

    def publish(self, message: Assignment | RunEnded, buffer: ParameterBuffer) -> None:
        """Send the message, and the version through the agent."""
        self.agent.publish_to(self, message, buffer)
        self._control.send(message)

    def receive_nowait(self) -> Iterator[FromWorker | Announcement]:
        """Yield the messages that have arrived."""
        for message in super().receive_nowait():
            is_report = isinstance(message, Announcement | GradientReport | AbandonReport)
            if is_report:
                self.agent.done_reading(self)
            yield message

    def _announcement(self, report: GradientReport) -> Announcement:
        return Announcement(report, _not_alone, _nothing, self._host, self.agent)

    def delivered(self, report: GradientReport) -> Delivered:
        """Return the gradient that the report announced."""
        del report
        return self.agent.delivered_of(self.number)

    def take_moved(self) -> Moved:
        """Return how many bytes were moved, with those of the host that weren't counted yet."""
        own, shared = super().take_moved(), self.agent.take_moved()
        return Moved(own.to_worker + shared.to_worker, own.to_server + shared.to_server)

    def close(self) -> None:
        """Close the connections of this worker."""
        self.agent.forget(self)
        super().close()


def _not_alone() -> None:
    raise InternalError("the gradient of a hosted worker travels in a sum")


def _nothing() -> None:
    """Withdraw a gradient that the agent was never asked for."""
