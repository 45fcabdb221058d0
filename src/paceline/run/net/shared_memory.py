# SPDX-License-Identifier: BSD-3-Clause
"""The transport between processes of one host: memory that both sides map.

Slots and parameter buffers are anonymous memory (`Region`). Each descriptor is sent once over the
Unix control socket, in a separate message just before the message that needs it. After that, a
report is all it takes to deliver a gradient, and a buffer number to publish a version: no tensor is
ever copied between processes.
"""

import os
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from paceline.errors import ProtocolError
from paceline.run.net.channel import Channel
from paceline.run.net.messages import (
    Assignment,
    BufferShared,
    CancelTurn,
    FromServer,
    FromWorker,
    GradientReport,
    RunEnded,
    SlotShared,
    StateReply,
    StateUpload,
    Welcome,
)
from paceline.run.net.transport import NOTHING_MOVED, Delivered, Moved, OpenedSlot
from paceline.run.tensors.layout import Layout, Views, lay_out_constants, tensors
from paceline.run.tensors.shared_region import Region
from paceline.run.tensors.state_packing import pack, unpack
from paceline.run.tensors.state_spec import StateSpec
from paceline.run.tensors.version_buffers import ParameterBuffer

__all__ = ["SharedMemoryPeer", "SharedMemoryStore", "SharedMemoryWorker"]


class SharedMemoryStore:
    """The server's memory that workers map."""

    def __init__(self, spec: StateSpec, layout: Layout | None = None) -> None:
        self.layout = layout or Layout.of(spec)
        self.size_bytes = self.layout.size
        self._buffer_fds: list[int] = []
        self._is_closed = False
        section, size = lay_out_constants(spec)
        region, self.constants_fd = Region.create(size, "constants")
        self.constants: list[Tensor] = tensors(section, region)

    def new_buffer(self) -> ParameterBuffer:
        """Allocate a buffer that workers can map; raises SpecError if there is no memory."""
        region, fd = Region.create(self.layout.size, "parameters")
        self._buffer_fds.append(fd)
        return ParameterBuffer(len(self._buffer_fds) - 1, self.layout.view(region))

    def new_accumulator(self) -> Views:
        """Allocate memory for sums."""
        region, fd = Region.create(self.layout.size, "accumulator")
        os.close(fd)
        return self.layout.view(region)

    def buffer_fd(self, number: int) -> int:
        """Return the descriptor of a buffer; it stays the store's."""
        return self._buffer_fds[number]

    def close(self) -> None:
        """Close the descriptors; memory that is mapped stays valid."""
        if not self._is_closed:
            self._is_closed = True
            for fd in (self.constants_fd, *self._buffer_fds):
                os.close(fd)


class SharedMemoryPeer:
    """The server's end of the transport to one worker."""

    def __init__(self, channel: Channel[FromWorker], store: SharedMemoryStore) -> None:
        self._channel = channel
        self._store = store
        self._slot: Views | None = None  # not None iff the worker was welcomed
        self._known_buffers: set[int] = set()
        self.pid = channel.peer_pid

    def receive_nowait(self) -> Iterator[FromWorker]:
        """Yield the messages that have arrived."""
        return self._channel.receive_nowait()

    def send(self, message: object) -> None:
        """Send a control message."""
        self._channel.send(message)

    def cancel(self, turn: int) -> None:
        """Tell the worker that this turn won't count."""
        self._channel.send(CancelTurn(turn))

    def take_moved(self) -> Moved:
        """Return nothing: memory is shared."""
        return NOTHING_MOVED

    def open_slot(self, welcome: Welcome) -> Views:
        """Welcome the worker and give it a slot; raises SpecError if there is no memory for it."""
        layout = self._store.layout
        region, fd = Region.create(layout.size, "slot")
        try:
            self._channel.send(SlotShared(), fd, self._store.constants_fd)
        finally:
            os.close(fd)
        self._channel.send(welcome)
        self._slot = layout.view(region)
        return self._slot

    def publish(self, message: Assignment | RunEnded, buffer: ParameterBuffer) -> None:
        """Let the worker fetch the version in this buffer, and send the message."""
        if buffer.number not in self._known_buffers:
            self._known_buffers.add(buffer.number)
            self._channel.send(BufferShared(buffer.number), self._store.buffer_fd(buffer.number))
        self._channel.send(message)

    def delivered(self, report: GradientReport) -> Delivered:
        """Return the gradient that the report announced; the worker wrote it into its slot."""
        assert self._slot is not None, report
        return Delivered(self._slot)

    def send_state(self, state: Any, what: str) -> None:
        """Answer a StateRequest; raises SpecError if the state can't be sent."""
        tree, fd = pack(state, what)
        try:
            # Not in the message itself, because a tree may exceed the limit on messages.
            _, tree_fd = Region.create(len(tree), what)
            try:
                os.pwrite(tree_fd, tree, 0)
                self._channel.send(StateReply(len(tree)), tree_fd, fd)
            finally:
                os.close(tree_fd)
        finally:
            os.close(fd)

    def receive_state(self, upload: StateUpload) -> Any:
        """Return the uploaded state; raises ProtocolError if it isn't one."""
        fd = self._channel.take_fd()
        try:
            return unpack(upload.tree, fd)
        finally:
            os.close(fd)

    def close(self) -> None:
        """Close the connection."""
        self._channel.close()


class SharedMemoryWorker:
    """A worker's end of the transport."""

    def __init__(self, channel: Channel[FromServer], spec: StateSpec) -> None:
        self._channel = channel
        self._spec = spec
        self._layout = Layout.of(spec)
        self._opened: OpenedSlot | None = None
        self._buffers: dict[int, Views] = {}
        self.shares_clock = channel.is_local

    def send(self, message: object) -> None:
        """Send a control message."""
        self._channel.send(message)

    def receive(self) -> FromServer:
        """Wait for the next message; map the memory that arrives before it."""
        while True:
            message = self._channel.receive()
            if isinstance(message, SlotShared):
                self._opened = self._map_slot()
            elif isinstance(message, BufferShared):
                region = self._map(self._layout.size, writable=False)
                self._buffers[message.buffer] = self._layout.view(region)
            else:
                return message

    def wait_readable(self, timeout_s: float) -> bool:
        """Return whether there is something to receive within this time."""
        return self._channel.wait_readable(timeout_s)

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
        self._channel.send(report)

    def send_state(self, optimizer: int, state: Any, has_begun: bool) -> None:
        """Upload the state of an optimizer; raises SpecError if it can't be sent."""
        tree, fd = pack(state, "state of the optimizer")
        try:
            self._channel.send(StateUpload(optimizer, tree, has_begun), fd)
        finally:
            os.close(fd)

    def receive_state(self, reply: StateReply) -> Any:
        """Return the state that came with the reply; None if none did."""
        if not reply.tree_bytes:
            return None
        with open(self._channel.take_fd(), "rb") as tree:
            body = tree.read(reply.tree_bytes)
        fd = self._channel.take_fd()
        try:
            return unpack(body, fd)
        finally:
            os.close(fd)

    def close(self) -> None:
        """Close the connection."""
        self._channel.close()

    def _map_slot(self) -> OpenedSlot:
        slot = self._layout.view(self._map(self._layout.size, writable=True))
        section, size = lay_out_constants(self._spec)
        return OpenedSlot(slot, tensors(section, self._map(size, writable=False)))

    def _map(self, size: int, writable: bool) -> Region:
        fd = self._channel.take_fd()
        try:
            return Region(fd, size, writable=writable)
        finally:
            os.close(fd)
