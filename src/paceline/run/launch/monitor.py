# SPDX-License-Identifier: BSD-3-Clause
"""What the launcher knows about its run, from its connection to the server.

The launcher connects as a worker does and asks for the progress of the run with `Watch`. It always
has one request open, which the server answers with `RunProgress` when there is news. Only
`connect`, `refresh` and `on_server_exit` may wait for the server, for about a second at most.

When the server dies, the monitor keeps what it knows. The next server counts from its own start, so
the monitor adds what earlier servers reported to its numbers.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Set
from contextlib import suppress
from math import inf
from typing import NamedTuple

from paceline.errors import PeerLost, ProtocolError
from paceline.run.launch.watch_channel import ServerEnd
from paceline.run.net.messages import RunProgress, Watch, WorkerUnavailable
from paceline.run.system import SYSTEM, System
from paceline.trace.schema import FINISHED, STOPPED, Ended

__all__ = ["End", "RunMonitor"]

RETRY_S = 0.01  # between attempts to connect; the workers start after the first that succeeds
REFRESH_S = 1.0  # for a server to answer; one that is busy may take longer
DRAIN_S = 1.0  # for the connection to close when the server has exited


class End(NamedTuple):
    """How a run ended."""

    version: int
    reason: str


class RunMonitor:
    """The progress and the end of a run."""

    def __init__(
        self,
        dial: Callable[[], ServerEnd],
        system: System = SYSTEM,
        pause_s: Callable[[], float] = lambda: RETRY_S,
    ) -> None:
        """`dial` connects to the server; it raises PeerLost if there is none.

        `pause_s` returns how long to wait before the attempt after this one.
        """
        self.accepted: Counter[int] = Counter()  # gradients, by worker
        self.version = 0  # the highest that was ever reached
        self.left: dict[int, int] = {}  # workers that left before the end, and at which version
        self.have_scripts_ended = False  # whether that is why the run was stopped
        self.is_over = False  # whether the last update is made, or the run was stopped
        self.is_saving = False  # whether the server writes the result, so that it doesn't answer
        self.is_told = False  # whether workers know that the run is over
        self.over_since: float | None = None
        """Since when the run is over and only its workers keep it from ending; None: it isn't."""
        self.here: tuple[int, ...] = ()  # the workers that are in the run
        self.computing: dict[int, float] = {}  # see `RunProgress`
        self.end: End | None = None  # not None iff the server has written everything
        self.started_at = -inf  # when the current server did
        self.heard_at = -inf  # when the last report arrived
        self.waiting_s: dict[int, float] = {}  # for how long the run has waited for workers
        self.is_serving = False  # whether the current server has answered
        self.was_served = False  # whether any server has
        self._dial = dial
        self._now = system.monotonic
        self._pause_s = pause_s
        self._server: ServerEnd | None = None  # not None iff there is a connection
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
    def has_failed(self) -> bool:
        """Whether the server ended the run because it failed."""
        return self.end is not None and self.end.reason not in (FINISHED, STOPPED)

    @property
    def retry_at(self) -> float | None:
        """When to call `connect`; None: there is a connection, or no server."""
        return self._retry_at if self._server is None else None

    # ------------------------------------------------------------------------------- the server

    def on_server_start(self) -> None:
        """Prepare for a new server process."""
        self._disconnect()
        self.is_serving = self.is_saving = self.is_told = False
        self.started_at = self._now()
        self.over_since = self.end = None
        self.here, self.waiting_s = (), {}
        self._base_accepted, self._base_left = self.accepted.copy(), dict(self.left)
        self._retry_at = self.started_at

    def on_server_exit(self, written: Ended | None = None) -> None:
        """Receive what the server sent last, and expect nothing more from it.

        `written`: the end in its trace, which counts even if the report of it was lost.
        """
        # A connection that was never accepted doesn't close: it waits for the next server.
        until = self._now() + (DRAIN_S if self._answered else 0.0)
        while self._server is not None and self._wait(until):
            self.receive()
        self._disconnect()
        self._retry_at = None
        if written is not None and self.end is None:
            self.end = End(written.version, written.reason)
            self.have_scripts_ended = written.reason == STOPPED  # why else, without a signal?

    # --------------------------------------------------------------------------- the connection

    def connect(self) -> None:
        """Try to connect; a server that doesn't listen yet is tried again later."""
        assert self._server is None
        with suppress(PeerLost):
            self._server = self._dial()
            self._request(waits=False)
        self._retry_at = self._now() + self._pause_s()

    def receive(self) -> None:
        """Handle what has arrived; a connection that breaks is made again later."""
        if self._server is None:
            return
        try:
            for message in self._server.receive_nowait():
                if isinstance(message, RunProgress):
                    self._on_progress(message)
        except (PeerLost, ProtocolError):
            self._disconnect()

    def refresh(self) -> None:
        """Wait until the server has answered, so that everything before is known.

        A server that didn't answer the last time is busy; don't wait for it again.
        """
        if not self._answered or self._answered < self._requests - 1 or self.is_over:
            return
        self._request(waits=False)
        request, until = self._requests, self._now() + REFRESH_S
        while self._answered < request and self._wait(until):
            self.receive()

    def ask(self) -> None:
        """Ask for a report now, unless the last such request is still open."""
        if self._answered and self._answered >= self._requests - 1:
            self._request(waits=False)

    def report_unavailable(
        self, reasons: Mapping[int, str], completed: Set[int] = frozenset()
    ) -> bool:
        """Tell the server which workers won't be restarted, and why; return whether it was sent.

        `completed`: those of them whose scripts ended with exit code 0.
        """
        if not self._answered:  # there is no connection, or it isn't authenticated yet
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
        left_s = max(0.0, until - self._now())
        return self._server is not None and self._server.wait_readable(left_s)

    def _request(self, *, waits: bool) -> None:
        self._requests += 1
        self._send(Watch(self._requests, waits))

    def _send(self, message: object) -> bool:
        """Send a message; return whether that worked.

        If it didn't, the connection stays open: what the server sent before it closed it, such as
        the end of the run, is still to be received. Then receiving fails, too.
        """
        assert self._server is not None
        try:
            self._server.send(message)
        except PeerLost:
            return False
        return True

    def _disconnect(self) -> None:
        if self._server is not None:
            self._server.close()
        self._server = None
        self._requests = self._answered = 0

    # ------------------------------------------------------------------------------ the progress

    def _on_progress(self, progress: RunProgress) -> None:
        self.is_serving = self.was_served = True
        self.heard_at = self._now()
        self._answered = max(self._answered, progress.request)
        self.version = max(self.version, progress.version)
        self.accepted = self._base_accepted + Counter(progress.accepted)
        self.here = progress.here
        for worker in progress.here:
            self._base_left.pop(worker, None)
        self.left = {**self._base_left, **progress.left}
        self.is_over, self.have_scripts_ended = progress.is_over, progress.have_scripts_ended
        self.is_saving, self.waiting_s = progress.is_saving, progress.waiting_s
        self.is_told, self.computing = progress.is_told, progress.computing
        if not (self.is_told or (self.is_over and not self.is_saving)):
            self.over_since = None
        elif self.over_since is None:
            self.over_since = self.heard_at
        if progress.ended_at is not None:
            self.end = End(progress.ended_at, progress.end_reason)
        elif progress.request == self._requests:
            self._request(waits=True)
