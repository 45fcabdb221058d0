# SPDX-License-Identifier: BSD-3-Clause
"""Requests of a worker to the server that wait for an answer, and what is sent without one."""

from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol

from torch import Tensor

from paceline.errors import PeerLost, ProtocolError
from paceline.leases import Use
from paceline.run.net import messages
from paceline.run.worker.connection import ServerConnection
from paceline.run.worker.states import Connection, WorkerEvent, WorkerState

__all__ = ["Requests"]


class Receiver(Protocol):
    """Who handles what arrives instead of the answer."""

    def handle_notice(self, message: messages.FromServer) -> bool:
        """Handle a message that the server may send at any time; return whether it is one."""

    def keep_for_later(self, message: messages.Assignment) -> None:
        """Keep an assignment that arrives before the last turn is closed."""

    def rejoin(self) -> None:
        """Join the server that replaces the lost one."""


class Requests:
    """A worker's requests."""

    def __init__(self, server: ServerConnection, state: WorkerState, receiver: Receiver) -> None:
        self._server = server
        self._state = state
        self._receiver = receiver

    def optimizer_state(self, optimizer: int) -> dict[str, Any]:
        """Return the state of the server's optimizer."""
        request = messages.StateRequest("optimizer", optimizer)
        state: dict[str, Any] = self._ask_for_state(lambda: self._server.end.send(request))
        return state

    def load_optimizer_state(
        self, optimizer: int, state: dict[str, Any], *, has_begun: bool
    ) -> None:
        """Load a state into the server's optimizer; `has_begun`: this worker has stepped."""
        self._ask_for_state(lambda: self._server.end.send_state(optimizer, state, has_begun))

    def averages(self) -> list[list[Tensor]]:
        """Return the moving average of the parameters, by optimizer."""
        request = messages.StateRequest("average")
        averages: list[list[Tensor]] = self._ask_for_state(lambda: self._server.end.send(request))
        return averages

    def stop(self) -> None:
        """End the run for all workers."""
        self._ask_for_state(lambda: self._server.end.send(messages.StopRun()))

    def lease(self, stream: int) -> tuple[int, tuple[int, ...]] | None:
        """Ask for one more batch; return it and the samples done. None: the run has ended."""
        request = messages.LeaseRequest(stream)
        try:
            reply = self._ask(lambda: self._server.end.send(request), messages.LeaseReply)
        except PeerLost:
            if not self._state.is_over:
                raise
            return None
        return None if self._state.is_over else (reply.lease.numbers[0], reply.stream_samples)

    def return_batches(self, use: Use, *, skipped: bool) -> None:
        """Tell the server that this worker no longer holds these batches."""
        with suppress(PeerLost):  # the next message will notice
            self._server.end.send(messages.BatchesReturned(use, skipped))

    def _ask_for_state(self, send: Callable[[], None]) -> Any:
        return self._ask(send, messages.StateReply, self._receive_state)

    def _receive_state(self, reply: messages.StateReply) -> Any:
        return self._server.end.receive_state(reply)  # of the server that has answered

    def _ask(
        self, send: Callable[[], None], kind: type, read: Callable[[Any], Any] = lambda reply: reply
    ) -> Any:
        """Send a request to this server, or to the next one if it is lost; return the answer."""
        while True:
            if self._state.connection is Connection.LOST:
                self._receiver.rejoin()
            try:
                send()
                return read(self._wait_for(kind))
            except PeerLost as error:
                self._state.apply(WorkerEvent.SERVER_LOST)
                if self._state.is_over:
                    raise PeerLost(f"lost the server: {error}") from None

    def _wait_for(self, kind: type) -> messages.FromServer:
        while not isinstance(message := self._server.end.receive(), kind):
            if isinstance(message, messages.Assignment):
                self._receiver.keep_for_later(message)
            elif not self._receiver.handle_notice(message):
                raise ProtocolError(f"expected the answer to a request, got {message!r}")
        return message
