# SPDX-License-Identifier: BSD-3-Clause
"""The transport inside one process: messages in queues, tensors in plain memory.

Use it in tests and simulations of the real server and the real worker: it has no sockets or
descriptors, and nothing depends on the OS. Messages are encoded and validated as on a socket, so a
message that can't be sent over one fails here, too. `InProcessNetwork` replaces the listener: the
server waits on it, workers connect to it, and the two may be in different threads.

Memory that another transport would share (slots, buffers, states) is attached to the message that
needs it, so it can't arrive later than that message.
"""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from numbers import Integral, Real
from threading import Condition
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from paceline.errors import PeerLost, ProtocolError, SpecError
from paceline.run.net.channel import OUTBOX_BYTES
from paceline.run.net.messages import (
    Assignment,
    CancelTurn,
    FromServer,
    FromWorker,
    GradientReport,
    Refused,
    RunEnded,
    StateReply,
    StateUpload,
    Welcome,
    decode_server,
    decode_worker,
    encode,
)
from paceline.run.net.transport import Delivered, Moved, OpenedSlot
from paceline.run.system import SYSTEM, System
from paceline.run.tensors.layout import Layout, Views, dtype_of, lay_out_constants, tensors
from paceline.run.tensors.state_spec import StateSpec
from paceline.run.tensors.version_buffers import ParameterBuffer

__all__ = [
    "InProcessNetwork",
    "InProcessPeer",
    "InProcessStore",
    "InProcessWorker",
    "PlainMemory",
    "Queue",
    "Waiting",
]

T = TypeVar("T")


class PlainMemory:
    """Memory of this process that a layout can view as tensors, several times."""

    def __init__(self, size: int) -> None:
        self._bytes = bytearray(size)

    def tensor(self, dtype: torch.dtype, count: int, offset: int) -> Tensor:
        """Return a flat tensor on this memory, with its own storage."""
        if count == 0:
            return torch.empty(0, dtype=dtype)
        return torch.frombuffer(self._bytes, dtype=dtype, count=count, offset=offset)


class InProcessStore:
    """The server's memory."""

    def __init__(self, spec: StateSpec, layout: Layout | None = None) -> None:
        self.layout = layout or Layout.of(spec)
        self.size_bytes = self.layout.size
        self.buffers: list[ParameterBuffer] = []
        section, size = lay_out_constants(spec)
        self.constants: list[Tensor] = tensors(section, PlainMemory(size))

    def new_buffer(self) -> ParameterBuffer:
        """Allocate a buffer that workers can see."""
        self.buffers.append(ParameterBuffer(len(self.buffers), self.new_accumulator()))
        return self.buffers[-1]

    def new_accumulator(self) -> Views:
        """Allocate memory for sums."""
        return self.layout.view(PlainMemory(self.layout.size))

    def close(self) -> None:
        """Forget the buffers."""
        self.buffers.clear()


class _SentState(NamedTuple):
    """A state that is attached to a message; None is a state, too."""

    value: Any


class Waiting(Protocol):
    """How the two sides wait for each other: a `threading.Condition`, or one on a virtual clock."""

    def __enter__(self) -> Any: ...

    def __exit__(self, *error: Any) -> Any: ...

    def wait_for(self, is_met: Callable[[], bool], timeout: float | None = None) -> bool:
        """Wait until this is met, or for this long; return whether it is."""

    def notify_all(self) -> None:
        """Have those that wait look again."""


class Queue(Generic[T]):
    """One direction of a connection."""

    def __init__(
        self,
        changed: Waiting,
        decode: Callable[[bytes], T],
        on_attached: Callable[[Any], None] = lambda _: None,
    ) -> None:
        self._changed = changed
        self._decode = decode
        self._bodies: deque[tuple[bytes, Any]] = deque()
        self._bytes = 0
        self.on_attached = on_attached
        """Called with a message's attachment, just before the message is returned."""
        self.is_closed = False

    def put(self, message: object, attachment: Any = None, limit: int | None = None) -> None:
        """Send a message; raises PeerLost if more than `limit` bytes are unread."""
        body = encode(message)
        with self._changed:
            if self.is_closed:
                raise PeerLost("the connection was closed")
            if limit is not None and self._bodies and self._bytes + len(body) > limit:
                raise PeerLost(f"it has not read the last {self._bytes} bytes sent to it")
            self._bodies.append((body, attachment))
            self._bytes += len(body)
            self._changed.notify_all()

    def has_news(self) -> bool:
        """Return whether there is a message, or the connection was closed."""
        return bool(self._bodies) or self.is_closed

    def wait(self, timeout_s: float | None) -> bool:
        """Wait for news, or for this long; return whether there is any."""
        with self._changed:
            return self._changed.wait_for(self.has_news, timeout_s)

    def take(self) -> T | None:
        """Return the next message; None if there is none. Raises PeerLost at the end."""
        with self._changed:
            if self._bodies:
                body, attachment = self._bodies.popleft()
                self._bytes -= len(body)
            elif self.is_closed:
                raise PeerLost("the connection was closed")
            else:
                return None
        message = self._decode(body)
        self.on_attached(attachment)
        return message

    def close(self) -> None:
        """Close it; messages that were sent before can still be taken."""
        with self._changed:
            self.is_closed = True
            self._changed.notify_all()


class InProcessPeer:
    """The server's end of the transport to one worker."""

    pid: int | None = None

    def __init__(
        self, inbox: Queue[FromWorker], outbox: Queue[FromServer], store: InProcessStore
    ) -> None:
        self._inbox = inbox
        self._inbox.on_attached = self._on_attached
        self._outbox = outbox
        self._store = store
        self._slot: Views | None = None
        self._state: _SentState | None = None  # attached to the message that was received last

    def _on_attached(self, attachment: Any) -> None:
        self._state = attachment

    def has_news(self) -> bool:
        """Return whether a message has arrived or the connection was closed."""
        return self._inbox.has_news()

    def receive_nowait(self) -> Iterator[FromWorker]:
        """Yield the messages that have arrived."""
        message = self._inbox.take()
        while message is not None:
            yield message
            with suppress(PeerLost):  # reported by the next call
                message = self._inbox.take()
                continue
            return

    def send(self, message: object) -> None:
        """Send a control message."""
        self._put(message)

    def _put(self, message: object, attachment: Any = None) -> None:
        self._outbox.put(message, attachment, OUTBOX_BYTES)

    def cancel(self, turn: int) -> None:
        """Tell the worker that this turn won't count."""
        self._put(CancelTurn(turn))

    def take_moved(self) -> Moved:
        """Return nothing: memory is shared."""
        return Moved()

    def open_slot(self, welcome: Welcome) -> Views:
        """Welcome the worker and give it a slot."""
        self._slot = self._store.new_accumulator()
        self._put(welcome, OpenedSlot(self._slot, self._store.constants))
        return self._slot

    def publish(self, message: Assignment | RunEnded, buffer: ParameterBuffer) -> None:
        """Let the worker fetch the version in this buffer, and send the message."""
        self._put(message, buffer)

    def delivered(self, report: GradientReport) -> Delivered:
        """Return the gradient that the report announced."""
        assert self._slot is not None, report
        return Delivered(self._slot)

    def send_state(self, state: Any, what: str) -> None:
        """Answer a StateRequest; raises SpecError if the state can't be sent."""
        self._put(StateReply(1), _SentState(_copied(state, what)))

    def receive_state(self, upload: StateUpload) -> Any:
        """Return the uploaded state; raises ProtocolError if none came with the message."""
        del upload
        return _state_in(self._state)

    def close(self) -> None:
        """Close the connection."""
        self._inbox.close()
        self._outbox.close()


class InProcessWorker:
    """A worker's end of the transport."""

    shares_clock = True

    def __init__(self, inbox: Queue[FromServer], outbox: Queue[FromWorker]) -> None:
        self._inbox = inbox
        self._inbox.on_attached = self._on_attached
        self._outbox = outbox
        self._opened: OpenedSlot | None = None
        self._buffers: dict[int, Views] = {}
        self._state: _SentState | None = None  # attached to the message that was received last

    def _on_attached(self, attachment: Any) -> None:
        self._state = attachment if isinstance(attachment, _SentState) else None
        if isinstance(attachment, OpenedSlot):
            self._opened = attachment
        elif isinstance(attachment, ParameterBuffer):
            self._buffers[attachment.number] = attachment.views

    def send(self, message: object) -> None:
        """Send a control message."""
        self._outbox.put(message)

    def receive(self) -> FromServer:
        """Wait for the next message."""
        self._inbox.wait(None)
        message = self._inbox.take()
        assert message is not None
        return message

    def wait_readable(self, timeout_s: float) -> bool:
        """Return whether there is something to receive within this time."""
        return self._inbox.wait(timeout_s)

    def open_slot(self) -> OpenedSlot:
        """Return the memory that came with the welcome."""
        if self._opened is None:
            raise ProtocolError("expected a slot with the server's welcome, got none")
        return self._opened

    def fetch(self, message: Assignment | RunEnded) -> Views:
        """Return the version that the message names."""
        try:
            return self._buffers[message.buffer]
        except KeyError:
            raise ProtocolError(f"the server has not shared buffer {message.buffer}") from None

    def announce(self, report: GradientReport) -> None:
        """Tell the server that the gradient in the slot is complete."""
        self._outbox.put(report)

    def send_state(self, optimizer: int, state: Any, has_begun: bool) -> None:
        """Upload the state of an optimizer; raises SpecError if it can't be sent."""
        copy = _SentState(_copied(state, "state of the optimizer"))
        self._outbox.put(StateUpload(optimizer, b"", has_begun), copy)

    def receive_state(self, reply: StateReply) -> Any:
        """Return the state that came with the reply; None if none did."""
        return _state_in(self._state) if reply.tree_bytes else None

    def close(self) -> None:
        """Close the connection."""
        self._inbox.close()
        self._outbox.close()


class InProcessNetwork:
    """Connections between a server and workers in one process.

    It has the interface of the server's `Listener`.
    """

    def __init__(
        self,
        store: InProcessStore,
        changed: Waiting | None = None,
        system: System = SYSTEM,
    ) -> None:
        """`changed`: how both sides wait, if not with threads."""
        self.system = system
        self._store = store
        self._changed = changed or Condition()
        self._peers: list[InProcessPeer] = []
        self._is_shut_down = False
        self.stop_wanted = False

    def connect(self) -> InProcessWorker:
        """Return a worker's end of a new connection; raises PeerLost if the server is gone."""
        to_server: Queue[FromWorker] = self.new_queue(decode_worker)
        to_worker: Queue[FromServer] = self.new_queue(decode_server)
        with self._changed:
            if self._is_shut_down:
                raise PeerLost("the server has shut down")
            self._peers.append(InProcessPeer(to_server, to_worker, self._store))
        return InProcessWorker(to_worker, to_server)

    def new_queue(self, decode: Callable[[bytes], T]) -> Queue[T]:
        """Return one direction of a new connection."""
        return Queue(self._changed, decode)

    def wait(self, timeout_s: float | None) -> list[InProcessPeer]:
        """Wait until a peer has news, or for this long; return the peers that do."""
        with self._changed:
            self._changed.wait_for(lambda: any(peer.has_news() for peer in self._peers), timeout_s)
            return [peer for peer in self._peers if peer.has_news()]

    def close(self, peer: InProcessPeer, reason: str = "") -> None:
        """Close a connection; if there is a reason, send it first."""
        if reason:
            with suppress(PeerLost):
                peer.send(Refused(reason))
        peer.close()
        with self._changed:
            if peer in self._peers:
                self._peers.remove(peer)

    def shut_down(self) -> None:
        """Close all connections."""
        with self._changed:
            self._is_shut_down = True
        for peer in list(self._peers):
            self.close(peer)


def _state_in(attached: _SentState | None) -> Any:
    if attached is None:
        raise ProtocolError("expected shared memory with a message, got none")
    return attached.value


def _copied(value: Any, what: str) -> Any:
    """Return a state as another process would receive it; raises SpecError if it can't be sent."""
    if isinstance(value, Tensor):
        dtype_of(str(value.dtype))  # raises if it can't be sent
        if value.layout is not torch.strided:
            raise SpecError(f"cannot send the {what}: it contains a sparse tensor")
        return value.detach().clone()
    if isinstance(value, dict):
        return {_copied(key, what): _copied(item, what) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_copied(item, what) for item in value]
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, Real):  # a NumPy number, for example
        return int(value) if isinstance(value, Integral) else float(value)
    raise SpecError(f"cannot send the {what}: it contains a {type(value).__qualname__}")
