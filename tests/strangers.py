# SPDX-License-Identifier: BSD-3-Clause
"""Peers that keep no rules: what the links of a run must stand.

`Raw` says whatever it is told to, at any moment, and tells what it hears. It works in a test as
well as in a worker's script.
"""

import hmac
import os
import socket
from typing import Any

import torch
from torch import Tensor

from paceline.errors import PeerLost
from paceline.release import RELEASE
from paceline.run.net import messages
from paceline.run.net.channel import MEMBER_LIMIT, Channel, connect
from paceline.run.tensors.layout import Layout
from paceline.run.tensors.region import Region
from paceline.run.tensors.state_spec import StateSpec

__all__ = ["Raw", "prove"]

PATIENCE_S = 20.0  # so that a test that waits for an answer in vain fails and does not hang


def prove(token: str, challenge: messages.Challenge, nonce: bytes = bytes(32)) -> messages.Proof:
    """What a stranger that has this token answers."""
    return messages.Proof(
        hmac.digest(token.encode(), b"worker" + nonce + challenge.nonce, "sha256")
    )


class Raw:
    """A peer of the server that keeps no rules."""

    def __init__(self, address: str, token: str | None = None) -> None:
        """With a token it is proven at once."""
        if token is not None:
            self._channel = connect(address, token)
            self._socket = self._channel._sock
        else:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self._socket.connect(b"\0" + address.removeprefix("unix:@").encode())
            self._channel = Channel(self._socket, messages.decode_server, MEMBER_LIMIT)
        self._socket.settimeout(PATIENCE_S)
        self._places: dict[int, Any] = {}

    def say(self, *things: object, fds: tuple[int, ...] = ()) -> "Raw":
        """Send messages, or bytes as they are; descriptors go with the first."""
        for thing in things:
            if isinstance(thing, bytes):
                socket.send_fds(self._socket, [thing], list(fds))
            else:
                self._channel.send(thing, *fds)
            fds = ()
        return self

    def hear(self) -> Any:
        """The next message of the server."""
        return self._channel.receive()

    def hang_up(self) -> "Raw":
        """Nothing more will be said."""
        self._socket.shutdown(socket.SHUT_WR)
        return self

    def end(self) -> str:
        """Wait until the server has closed the connection; the reason that it gave, if any."""
        reason = ""
        try:
            while True:
                message = self.hear()
                if isinstance(message, messages.Refused):
                    reason = message.reason
        except PeerLost:
            self.close()
        return reason

    def close(self) -> None:
        """Go away."""
        self._channel.close()

    # ---------------------------------------------------------------- being a worker, by the rules

    def join(self, worker: int, contents: StateSpec) -> "Raw":
        """Join as this worker, and see the slot as tensors."""
        self.say(messages.Join(worker, RELEASE, contents))
        assert isinstance(self.hear(), messages.Welcome)
        layout = Layout.of(contents)
        fd, constants = self._channel.take_fd(), self._channel.take_fd()
        self.slot = layout.view(Region(fd, layout.size))
        self._layout = layout
        os.close(fd)
        os.close(constants)
        return self

    def get_work(self) -> messages.Assignment | messages.RunEnded:
        """Wait for work or the end; the parameters are in `at` then."""
        while not isinstance(message := self.hear(), messages.Assignment | messages.RunEnded):
            assert isinstance(message, messages.CancelTurn)
        if message.place_is_new:
            fd = self._channel.take_fd()
            self._places[message.place] = self._layout.view(
                Region(fd, self._layout.size, writable=False)
            )
            os.close(fd)
        self.at = self._places[message.place]
        return message

    def gradient(
        self, work: messages.Assignment, *values: Tensor, **fields: Any
    ) -> messages.GradientReport:
        """Put these into the slot; the report to send."""
        for view, value in zip(self.slot.parameters[0], values, strict=False):
            view.copy_(value)
        sq_norm = float(sum(torch.square(v).sum() for v in values))
        usual = {"turn": work.turn, "version": work.version, "optimizer": 0, "samples": 1}
        return messages.GradientReport(**{**usual, "compute_s": 0.0, "sq_norm": sq_norm, **fields})
