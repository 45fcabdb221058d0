# SPDX-License-Identifier: BSD-3-Clause
"""A worker's connection to the server of its run: made, lost, and made again.

A server that is killed is started again and listens at the same address; until then a worker waits
for it. Nothing here knows what the messages mean, except how a worker joins.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic, sleep
from typing import Any

from paceline.errors import PeerLost, ProtocolError
from paceline.release import RELEASE
from paceline.run.launch.environment import Identity
from paceline.run.net import messages
from paceline.run.net.channel import Channel
from paceline.run.net.handshake import connect
from paceline.run.net.shared_memory import SharedMemoryWorker
from paceline.run.net.transport import WorkerEnd
from paceline.run.tensors.layout import Views
from paceline.run.tensors.state_spec import StateSpec
from paceline.run.worker.replica import Replica

__all__ = ["ServerConnection"]

CONNECT_TIMEOUT_S = 600.0  # a server's script may load a large data set first
SILENCE_S = 5.0  # after this long, say what we wait for


class ServerConnection:
    """The worker's end of the transport; a new one after each loss of the server."""

    def __init__(self, identity: Identity, spec: StateSpec, replica: Replica) -> None:
        assert identity.worker is not None
        self._identity = identity
        self._worker = identity.worker
        self._spec = spec
        self._replica = replica
        self._end: WorkerEnd | None = None
        # Processes that a loader forks must not hold the connection open: its end is how the
        # server learns of this worker's death.
        os.register_at_fork(after_in_child=self.close)

    def join(self) -> messages.Welcome:
        """Connect to the server, which may still be starting, and join its run.

        Raises ProtocolError if it refuses this worker, and PeerLost if none is there in time.
        """
        if self._end is not None:
            print("the server is gone; waiting for it to come back", file=sys.stderr, flush=True)
        give_up_at = monotonic() + CONNECT_TIMEOUT_S
        while True:
            self.close()
            try:
                channel = _connect(self._identity, give_up_at)
                self._end = SharedMemoryWorker(channel, self._spec)
                return self._join()
            except PeerLost:  # it died again while we joined
                if monotonic() > give_up_at:
                    raise

    def _join(self) -> messages.Welcome:
        self.send(messages.Join(self._worker, RELEASE, self._spec))
        welcome = self.receive()
        if not isinstance(welcome, messages.Welcome):
            raise ProtocolError(f"expected a welcome, got {welcome!r}")
        slot, constants = self._connected.open_slot()
        self._replica.set_slot(slot)
        self._replica.load_constants(constants)
        return welcome

    @property
    def _connected(self) -> WorkerEnd:
        assert self._end is not None, "join() comes first"
        return self._end

    @property
    def shares_clock(self) -> bool:
        """Whether the server's time.monotonic() is this process's, too."""
        return self._connected.shares_clock

    def receive(self) -> messages.FromServer:
        """Wait for the next message; raises PeerLost, or ProtocolError if we are refused."""
        with self._naming_the_worker():
            message = self._connected.receive()
        if isinstance(message, messages.Refused):
            raise ProtocolError(f"the server refused worker {self._worker}: {message.reason}")
        return message

    def wait_readable(self, timeout_s: float) -> bool:
        """Return whether there is something to receive within this time."""
        return self._connected.wait_readable(timeout_s)

    def send(self, message: object) -> None:
        """Send a message; raises PeerLost."""
        with self._naming_the_worker():
            self._connected.send(message)

    def announce(self, report: messages.GradientReport) -> None:
        """Tell the server that the gradient in the slot is complete; raises PeerLost."""
        with self._naming_the_worker():
            self._connected.announce(report)

    def fetch(self, message: messages.Assignment | messages.RunEnded) -> Views:
        """Return the version that the message names; raises PeerLost."""
        with self._naming_the_worker():
            return self._connected.fetch(message)

    def send_state(self, optimizer: int, state: Any, has_begun: bool) -> None:
        """Upload the state of an optimizer; raises PeerLost, or SpecError if it can't be sent."""
        with self._naming_the_worker():
            self._connected.send_state(optimizer, state, has_begun)

    def receive_state(self, reply: messages.StateReply) -> Any:
        """Return the state that came with the reply; None if none did."""
        return self._connected.receive_state(reply)

    def close(self) -> None:
        """Close the connection, if there is one."""
        if self._end is not None:
            self._end.close()

    @contextmanager
    def _naming_the_worker(self) -> Iterator[None]:
        try:
            yield
        except PeerLost as error:
            raise PeerLost(f"worker {self._worker} lost the server: {error}") from None


def _connect(identity: Identity, give_up_at: float) -> Channel[messages.FromServer]:
    token, pause_s, began, is_said = identity.token(), 0.01, monotonic(), False
    while True:
        try:
            return connect(identity.address, token)
        except PeerLost:
            now = monotonic()
            if now > give_up_at:
                raise
        if now - began > SILENCE_S and not is_said:
            print(f"waiting for a server at {identity.address}", file=sys.stderr, flush=True)
            is_said = True
        sleep(pause_s)
        pause_s = min(0.5, pause_s * 1.5)
