# SPDX-License-Identifier: BSD-3-Clause
"""A worker's connection with the server of its run: made, lost, and made again.

A server that is killed is started again and listens at the same address; until then a worker waits
for it. Nothing here knows what the messages mean, but how one is welcomed.
"""

import os
import sys
from time import monotonic, sleep

from paceline.errors import PeerLost, ProtocolError
from paceline.release import RELEASE
from paceline.run.launch.environment import Identity
from paceline.run.net import messages
from paceline.run.net.channel import Channel, connect
from paceline.run.tensors.region import Region
from paceline.run.tensors.state_spec import StateSpec
from paceline.run.worker.replica import Replica

__all__ = ["ServerConnection"]

CONNECT_PATIENCE_S = 600.0  # for a server whose script loads a large data set first
SILENCE_S = 5.0  # after that we say what we wait for


class ServerConnection:
    """The way to the server."""

    def __init__(self, who: Identity, contents: StateSpec, replica: Replica) -> None:
        assert who.worker is not None
        self._who = who
        self._worker = who.worker
        self._contents = contents
        self._replica = replica
        self._channel: Channel[messages.FromServer] | None = None
        # The processes of a loader must not hold it open: its end tells the server of our death.
        os.register_at_fork(after_in_child=self.close)

    @property
    def channel(self) -> Channel[messages.FromServer]:
        """The connection; there is one from the first `join` on."""
        assert self._channel is not None
        return self._channel

    def join(self) -> messages.Welcome:
        """Reach the server, which may still be starting, and take part in its run.

        Raises ProtocolError if it will not have us, and PeerLost if there is none for too long.
        """
        if self._channel is not None:
            print("the server is gone; waiting for it to come back", file=sys.stderr, flush=True)
        give_up_at = monotonic() + CONNECT_PATIENCE_S
        while True:
            self.close()
            try:
                self._channel = _connect(self._who, give_up_at)
                return self._join()
            except PeerLost:  # it died again, while it welcomed us
                if monotonic() > give_up_at:
                    raise

    def _join(self) -> messages.Welcome:
        self.send(messages.Join(self._worker, RELEASE, self._contents))
        welcome = self.receive()
        if not isinstance(welcome, messages.Welcome):
            raise ProtocolError(f"expected to be welcomed, got {welcome!r}")
        self._replica.take_slot(self.map(self._replica.place_bytes, writable=True))
        self._replica.take_constants(self.map(self._replica.constants_bytes, writable=False))
        return welcome

    def map(self, size: int, writable: bool) -> Region:
        """Map the memory that came along with a message."""
        fd = self.channel.take_fd()
        try:
            return Region(fd, size, writable=writable)
        finally:
            os.close(fd)

    def receive(self) -> messages.FromServer:
        """Wait for the next message; raises PeerLost, and ProtocolError if we are refused."""
        try:
            message = self.channel.receive()
        except PeerLost as error:
            raise PeerLost(f"worker {self._worker} has lost the server: {error}") from None
        if isinstance(message, messages.Refused):
            raise ProtocolError(f"the server refuses worker {self._worker}: {message.reason}")
        return message

    def send(self, message: object, *fds: int) -> None:
        """Send a message; raises PeerLost."""
        try:
            self.channel.send(message, *fds)
        except PeerLost as error:
            raise PeerLost(f"worker {self._worker} has lost the server: {error}") from None

    def close(self) -> None:
        """Let go of the connection."""
        if self._channel is not None:
            self._channel.close()


def _connect(who: Identity, give_up_at: float) -> Channel[messages.FromServer]:
    token, pause_s, began, is_said = who.token(), 0.01, monotonic(), False
    while True:
        try:
            return connect(who.address, token)
        except PeerLost:
            now = monotonic()
            if now > give_up_at:
                raise
        if now - began > SILENCE_S and not is_said:
            print(f"waiting for a server at {who.address}", file=sys.stderr, flush=True)
            is_said = True
        sleep(pause_s)
        pause_s = min(0.5, pause_s * 1.5)
