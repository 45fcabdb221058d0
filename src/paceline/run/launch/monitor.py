# SPDX-License-Identifier: BSD-3-Clause
"""What the launcher knows about its run, from its connection to the server.

The launcher connects as a worker does and asks for the progress of the run with `Watch`. It always
has one request open, which the server answers with `RunProgress` when there is news. Only
`connect`, `refresh` and `on_server_exit` may wait for the server, for about a second at most.

When the server dies, the monitor keeps what it knows. The next server counts from its own start, so
the monitor adds what earlier servers reported to its numbers.
"""

from collections import Counter
from collections.abc import Mapping, Set
from selectors import EVENT_READ, BaseSelector
from time import monotonic
from typing import NamedTuple

from paceline.errors import PeerLost, ProtocolError
from paceline.run.launch.environment import Identity
from paceline.run.net.address import dial
from paceline.run.net.channel import STRANGER_LIMIT, Channel
from paceline.run.net.handshake import Authenticator
from paceline.run.net.messages import (
    FromServer,
    RunProgress,
    Watch,
    WorkerUnavailable,
    decode_server,
)
from paceline.trace.schema import FINISHED

__all__ = ["End", "RunMonitor"]

CONNECT_S = 1.0  # for the OS to connect; takes long only if the server is flooded
RETRY_S = 0.01  # between attempts to connect; the workers start after the first that succeeds
REFRESH_S = 1.0  # for a server to answer; one that is busy may take longer
DRAIN_S = 1.0  # for the connection to close when the server has exited


class End(NamedTuple):
    """How a run ended."""

    version: int
    reason: str


class RunMonitor:
    """The progress and the end of a run."""

    def __init__(self, server: Identity, selector: BaseSelector) -> None:
        """Register with the selector whenever there is a connection, with itself as the data."""
        self.accepted: Counter[int] = Counter()  # gradients, by worker
        self.version = 0  # the highest that was ever reached
        self.left: dict[int, int] = {}  # workers that left before the end, and at which version
        self.have_scripts_ended = False  # whether that is why the run was stopped
        self.is_over = False  # whether the last update is made, or the run was stopped
        self.end: End | None = None  # not None iff the server has written everything
        self.is_serving = False  # whether the current server has answered
        self.was_served = False  # whether any server has
        self._address, self._token = server.address, server.token()
        self._selector = selector
        self._channel: Channel[FromServer] | None = None
        self._authenticator: Authenticator | None = None  # not None iff the handshake is under way
        self._retry_at: float | None = None  # not None iff there is a server to connect to
        self._base_accepted: Counter[int] = Counter()  # by earlier servers
        self._base_left: dict[int, int] = {}
        self._requests = 0  # sent to the current server
        self._answered = 0  # the newest of them that was answered

    @property
    def is_finished(self) -> bool:
        """Whether the run reached its goal."""
        return self.end is not None and self.end.reason == FINISHED

    @property
    def retry_at(self) -> float | None:
        """When to call `connect`; None: there is a connection, or no server."""
        return self._retry_at if self._channel is None else None

    # ------------------------------------------------------------------------------- the server

    def on_server_start(self) -> None:
        """Prepare for a new server process."""
        self._disconnect()
        self.is_serving = False
        self.end = None
        self._base_accepted, self._base_left = self.accepted.copy(), dict(self.left)
        self._retry_at = monotonic()

    def on_server_exit(self) -> None:
        """Receive what the server sent last, and expect nothing more from it."""
        until = monotonic() + DRAIN_S
        while self._channel is not None and self._wait(until):
            self.receive()
        self._disconnect()
        self._retry_at = None

    # --------------------------------------------------------------------------- the connection

    def connect(self) -> None:
        """Try to connect; a server that doesn't listen yet is tried again later."""
        assert self._channel is None
        self._retry_at = monotonic() + RETRY_S
        try:
            sock = dial(self._address, CONNECT_S)
            sock.setblocking(False)
            self._channel = Channel(sock, decode_server, STRANGER_LIMIT)
            self._selector.register(self._channel, EVENT_READ, self)
            self._authenticator = Authenticator(self._address, self._token)
            self._send(self._authenticator.hello())
        except PeerLost:
            self._disconnect()

    def receive(self) -> None:
        """Handle what has arrived; a connection that breaks is made again later."""
        if self._channel is None:
            return
        try:
            for message in self._channel.receive_nowait():
                if self._authenticator is not None:
                    self._send(self._authenticator.prove(message))
                    self._channel.trust(decode_server)
                    self._authenticator = None
                    self._request(waits=False)
                elif isinstance(message, RunProgress):
                    self._on_progress(message)
        except (PeerLost, ProtocolError):
            self._disconnect()

    def refresh(self) -> None:
        """Wait until the server has answered, so that everything before is known.

        A server that didn't answer the last time is busy; don't wait for it again.
        """
        if self._channel is None or self._authenticator is not None or self.is_over:
            return
        if self._answered < self._requests - 1:
            return
        self._request(waits=False)
        request, until = self._requests, monotonic() + REFRESH_S
        while self._answered < request and self._wait(until):
            self.receive()

    def report_unavailable(
        self, reasons: Mapping[int, str], completed: Set[int] = frozenset()
    ) -> bool:
        """Tell the server which workers won't be restarted, and why; return whether it was sent.

        `completed`: those of them whose scripts ended with exit code 0.
        """
        if self._channel is None or self._authenticator is not None:
            return False
        return all(
            self._send(WorkerUnavailable(worker, reason, worker in completed))
            for worker, reason in reasons.items()
        )

    def close(self) -> None:
        """Close the connection."""
        self._disconnect()
        self._retry_at = None

    def _wait(self, until: float) -> bool:
        """Wait for something to receive, until this time; return whether there is."""
        left_s = until - monotonic()
        return self._channel is not None and left_s > 0 and self._channel.wait_readable(left_s)

    def _request(self, *, waits: bool) -> None:
        self._requests += 1
        self._send(Watch(self._requests, waits))

    def _send(self, message: object) -> bool:
        """Send a message; return whether that worked.

        If it didn't, the connection stays open: what the server sent before it closed it, such as
        the end of the run, is still to be received. Then receiving fails, too.
        """
        assert self._channel is not None
        try:
            self._channel.send(message)
        except PeerLost:
            return False
        return True

    def _disconnect(self) -> None:
        if self._channel is not None:
            self._selector.unregister(self._channel)
            self._channel.close()
        self._channel = self._authenticator = None
        self._requests = self._answered = 0

    # ------------------------------------------------------------------------------ the progress

    def _on_progress(self, progress: RunProgress) -> None:
        self.is_serving = self.was_served = True
        self._answered = max(self._answered, progress.request)
        self.version = max(self.version, progress.version)
        self.accepted = self._base_accepted + Counter(progress.accepted)
        for worker in progress.here:
            self._base_left.pop(worker, None)
        self.left = {**self._base_left, **progress.left}
        self.is_over, self.have_scripts_ended = progress.is_over, progress.have_scripts_ended
        if progress.ended_at is not None:
            self.end = End(progress.ended_at, progress.end_reason)
        elif progress.request == self._requests:
            self._request(waits=True)
