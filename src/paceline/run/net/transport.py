# SPDX-License-Identifier: BSD-3-Clause
"""The transport contract: how gradients and parameters move between a worker and a server.

Theory of operation
    worker                              server
    WorkerEnd                           PeerEnd, one per worker; TensorStore, one per server

                                        store.new_buffer()       memory for one version
                                        peer.open_slot(welcome)  memory for the worker's gradients
    open_slot() -> its views      <-
                                        peer.publish(assignment, buffer)
    fetch(assignment) -> views    <-                             the version to compute with
    announce(report)              ->    Announcement from receive_nowait()
    sends the gradient            <-    announcement.admit(), or withdraw()
                                  ->    the report from receive_nowait()
                                        peer.delivered(report) -> the gradient, complete
    close(), or death             ->    PeerLost from receive_nowait()

    A gradient is *announced* by its report and *delivered* when all of it can be read on the
    server. Where memory is shared the two coincide: the server receives the report without an
    announcement. Elsewhere the worker sends nothing before the server admits it, and stops when
    the server withdraws it. A view that `delivered` returned stays valid until the worker gets its
    next assignment; a version that was published stays unchanged until the worker has reported on
    it, and the parameters that the next assignment doesn't load stay unchanged for longer.

Both ends also carry the control messages, because an assignment must never overtake the memory it
refers to. No file descriptor, address or socket appears in this interface. One contract suite,
tests/run/net/test_transport.py, runs over all implementations.

The server's calls never block: what can't be sent immediately waits in a bounded outbox, and a peer
that stops reading counts as lost.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from paceline.run.net.messages import (
    Assignment,
    FromServer,
    FromWorker,
    GradientReport,
    RunEnded,
    StateReply,
    StateUpload,
    Welcome,
)
from paceline.run.system import System
from paceline.run.tensors.layout import Views
from paceline.run.tensors.version_buffers import BufferStore, ParameterBuffer

__all__ = [
    "NOTHING_MOVED",
    "Announcement",
    "Connections",
    "Delivered",
    "Moved",
    "OpenedSlot",
    "PeerEnd",
    "Pool",
    "ServerConnections",
    "TensorStore",
    "WorkerEnd",
]


class OpenedSlot(NamedTuple):
    """The memory that a worker gets when it joins."""

    slot: Views  # for its gradients
    constants: list[Tensor]  # parameters that no optimizer steps; read only


class Moved(NamedTuple):
    """How many bytes of payloads a connection has moved; none where memory is shared."""

    to_worker: int = 0
    to_server: int = 0


NOTHING_MOVED = Moved()


@dataclass(frozen=True, eq=False)
class Announcement:
    """A gradient that a worker has computed and not sent."""

    report: GradientReport

    admit: Callable[[], None]
    """Let the worker send it. Its report is received when all of it has arrived."""

    withdraw: Callable[[], None]
    """Have nothing more of it sent. Its report won't be received."""

    host: str = ""
    """Where the worker runs, if others may share the link of its host."""

    pool: "Pool | None" = None
    """What adds up the gradients of that host before they travel; None: each travels alone."""


class Pool(Protocol):
    """Has gradients of one host's workers sent as one sum."""

    def ask(self, workers: Sequence[int], reports: Sequence[GradientReport]) -> Any:
        """Have the sum of these gradients sent; return what `stop` takes."""

    def stop(self, asked: Any) -> None:
        """Have nothing more sent of a sum."""


class Delivered(NamedTuple):
    """A gradient that has arrived."""

    slot: Views | None  # None: it is part of the sum in the slot of another worker
    host: int | None = None  # the host whose sum it is part of; None: it came alone


class TensorStore(BufferStore, Protocol):
    """The server's memory that workers can see."""

    def close(self) -> None:
        """Release the memory; views that are still in use stay valid."""


class PeerEnd(Protocol):
    """The server's end of the transport to one worker. Every method may raise PeerLost."""

    @property
    def pid(self) -> int | None:
        """The worker's process, if it is on this host."""

    def receive_nowait(self) -> Iterator[FromWorker | Announcement]:
        """Yield the messages that have arrived; raises ProtocolError if one is malformed."""

    def send(self, message: object) -> None:
        """Send a control message."""

    def cancel(self, turn: int) -> None:
        """Tell the worker that this turn won't count, and have nothing more of it sent."""

    def take_moved(self) -> Moved:
        """Return how many bytes were moved since the last call."""

    def open_slot(self, welcome: Welcome) -> Views:
        """Welcome the worker and give it a slot; raises SpecError if there is no memory for it."""

    def publish(self, message: Assignment | RunEnded, buffer: ParameterBuffer) -> None:
        """Let the worker fetch the version in this buffer, and send the message."""

    def delivered(self, report: GradientReport) -> Delivered:
        """Return the gradient that the report announced."""

    def send_state(self, state: Any, what: str) -> None:
        """Answer a StateRequest; raises SpecError if the state can't be sent."""

    def receive_state(self, upload: StateUpload) -> Any:
        """Return the uploaded state; raises ProtocolError if it isn't one."""

    def close(self) -> None:
        """Close the connection."""


class WorkerEnd(Protocol):
    """A worker's end of the transport. Every method may raise PeerLost."""

    @property
    def shares_clock(self) -> bool:
        """Whether the server and this process have the same time.monotonic()."""

    def send(self, message: object) -> None:
        """Send a control message."""

    def receive(self) -> FromServer:
        """Wait for the next message."""

    def wait_readable(self, timeout_s: float) -> bool:
        """Return whether there is something to receive within this time."""

    def open_slot(self) -> OpenedSlot:
        """Return the memory that came with the welcome."""

    def fetch(self, message: Assignment | RunEnded) -> Views | None:
        """Return the version that the message names; the same buffer is the same object.

        None: the turn was cancelled before all of the version had arrived.
        """

    def announce(self, report: GradientReport) -> None:
        """Tell the server that the gradient in the slot is complete."""

    def send_state(self, optimizer: int, state: Any, has_begun: bool) -> None:
        """Upload the state of an optimizer; raises SpecError if it can't be sent."""

    def receive_state(self, reply: StateReply) -> Any:
        """Return the state that came with the reply; None if none did."""

    def close(self) -> None:
        """Close the connection."""


class Connections(Protocol):
    """Where a server's peers come from: the listener, or a network inside this process."""

    stop_wanted: bool

    @property
    def system(self) -> System:
        """The system whose clock `wait` uses."""

    def wait(self, timeout_s: float | None) -> list[Any]:
        """Wait until a peer has news, or for this long; return the peers that do."""

    def close(self, peer: Any, reason: str = "") -> None:
        """Close a connection; if there is a reason, send it first."""

    def shut_down(self) -> None:
        """Close everything."""


class ServerConnections(Connections, Protocol):
    """Connections of a server process, which signals can stop."""

    def wait_among(self, peers: Sequence[Any], timeout_s: float) -> None:
        """Wait until one of these peers has news, or for this long; only their data is moved."""

    def stop_on(self, *signals: int) -> None:
        """Let these signals set `stop_wanted` and wake up `wait`."""
