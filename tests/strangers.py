# SPDX-License-Identifier: BSD-3-Clause
"""Peers that break the rules, for tests of what a server must withstand.

`RawPeer` sends anything at any time and returns what it receives. It works in a test as well as in
a worker's script.
"""

import hmac
import socket
from typing import Any

import torch
from torch import Tensor

from paceline.errors import PeerLost
from paceline.release import RELEASE
from paceline.run.net import messages
from paceline.run.net.address import is_tcp
from paceline.run.net.channel import MEMBER_LIMIT, Channel
from paceline.run.net.data_socket import DataSocket
from paceline.run.net.handshake import connect, connect_data
from paceline.run.net.shared_memory import SharedMemoryWorker
from paceline.run.net.tcp_client import ControlSocket
from paceline.run.net.tcp_worker import TcpWorker
from paceline.run.net.transport import WorkerEnd
from paceline.run.tensors.state_spec import StateSpec

__all__ = ["TIMEOUT_S", "RawPeer", "prove"]

TIMEOUT_S = 20.0  # a test that would wait longer fails instead of hanging


def prove(token: str, challenge: messages.Challenge, nonce: bytes = bytes(32)) -> messages.Proof:
    """Return the proof of a client that has this token."""
    return messages.Proof(
        hmac.digest(token.encode(), b"control" + nonce + challenge.nonce, "sha256")
    )


class RawPeer:
    """A client of the server that doesn't have to follow the protocol."""

    def __init__(self, address: str, token: str | None = None) -> None:
        """Connect; with a token, authenticate at once."""
        self._address, self._token = address, token
        self._end: Any = None  # not None iff it has joined
        if token is not None:
            self._channel = connect(address, token)
            self._socket = self._channel._sock
        else:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self._socket.connect(b"\0" + address.removeprefix("unix:@").encode())
            self._channel = Channel(self._socket, messages.decode_server, MEMBER_LIMIT)
        self._socket.settimeout(TIMEOUT_S)

    def send(self, *things: object, fds: tuple[int, ...] = ()) -> "RawPeer":
        """Send messages, or bytes as they are; descriptors go with the first."""
        for thing in things:
            if isinstance(thing, bytes):
                socket.send_fds(self._socket, [thing], list(fds))
            else:
                self._channel.send(thing, *fds)
            fds = ()
        return self

    def receive(self) -> Any:
        """Return the next message of the server."""
        return self._channel.receive()

    def shut_down_sending(self) -> "RawPeer":
        """Close the sending half of the connection."""
        self._socket.shutdown(socket.SHUT_WR)
        return self

    def wait_closed(self) -> str:
        """Wait until the server closes the connection; return the reason it gave, if any."""
        reason = ""
        try:
            while True:
                message = self.receive()
                if isinstance(message, messages.Refused):
                    reason = message.reason
        except PeerLost:
            self.close()
        return reason

    def close(self) -> None:
        """Close the connection."""
        self._channel.close()
        if self._end is not None:
            self._end.close()

    # -------------------------------------------------------------- being a worker, by the rules

    def join(
        self, worker: int, spec: StateSpec, ahead: tuple[int, ...] = (), **fields: bytes
    ) -> "RawPeer":
        """Join as this worker, which wants to hold batches; its slot is in `slot`."""
        self._end = self._open_end(spec)
        self.send(messages.Join(worker, RELEASE, spec, ahead, **fields))
        assert isinstance(self._end.receive(), messages.Welcome)
        self.slot = self._end.open_slot().slot
        return self

    def _open_end(self, spec: StateSpec) -> WorkerEnd:
        if not is_tcp(self._address):
            return SharedMemoryWorker(self._channel, spec)
        assert self._token is not None
        data = connect_data(self._address, self._token, self._channel.session, TIMEOUT_S)
        return TcpWorker(ControlSocket(self._channel), DataSocket(data), spec)

    def announce(self, report: messages.GradientReport) -> None:
        """Report the gradient in the slot; over TCP, `poll` and `receive_assignment` send it."""
        self._end.announce(report)

    def poll(self) -> bool:
        """Send and receive what is possible at once; return whether there is a message."""
        return self._end.wait_readable(0.0)

    def receive_assignment(self) -> messages.Assignment | messages.RunEnded:
        """Wait for an assignment or the end; the parameters are in `parameters` then."""
        while not isinstance(
            message := self._end.receive(), messages.Assignment | messages.RunEnded
        ):
            assert isinstance(message, messages.CancelTurn)
        self.parameters = self._end.fetch(message)
        return message

    def receive_state(self, reply: messages.StateReply) -> Any:
        """Return the state that this reply announces."""
        return self._end.receive_state(reply)

    def send_state(self, optimizer: int, state: dict[str, Any], *, has_begun: bool) -> None:
        """Upload a state; `has_begun`: this worker has stepped."""
        self._end.send_state(optimizer, state, has_begun)

    def gradient(
        self, assignment: messages.Assignment, *values: Tensor, **fields: Any
    ) -> messages.GradientReport:
        """Put these values into the slot; return the report to send."""
        for view, value in zip(self.slot.parameters[0], values, strict=False):
            view.copy_(value)
        sq_norm = float(sum(torch.square(v).sum() for v in values))
        usual = {
            "turn": assignment.turn,
            "version": assignment.version,
            "optimizer": 0,
            "samples": 1,
        }
        return messages.GradientReport(**{**usual, "compute_s": 0.0, "sq_norm": sq_norm, **fields})
