# SPDX-License-Identifier: BSD-3-Clause
"""What only the shared-memory transport does: send descriptors, each once, and leak none.

`test_transport.py` tests what all transports do.
"""

import gc
import os
import socket

import pytest
import torch
import torch._dynamo  # an optimizer loads it, and it sets an environment variable
from torch import nn

from paceline.errors import PeerLost, ProtocolError, SpecError
from paceline.run.net import messages
from paceline.run.net.channel import STRANGER_LIMIT, Channel
from paceline.run.net.shared_memory import (
    SharedMemoryPeer,
    SharedMemoryStore,
    SharedMemoryWorker,
)
from paceline.run.tensors import shared_region as region_module
from paceline.run.tensors.layout import gather
from paceline.run.tensors.shared_region import Region

WELCOME = messages.Welcome(2, "", 0, False, False)


class Connected:
    """Both ends of a connection over a socket pair, without authentication."""

    def __init__(self):
        model = nn.Linear(3, 1)
        self.spec = gather([model], [torch.optim.SGD(model.parameters(), lr=0.1)]).spec
        self.store = SharedMemoryStore(self.spec)
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        theirs.settimeout(10.0)
        self.server_channel = Channel(ours, messages.decode_worker, STRANGER_LIMIT)
        self.server_channel.trust(messages.decode_worker)
        self.worker_channel = Channel(theirs, messages.decode_server, STRANGER_LIMIT)
        self.worker_channel.trust(messages.decode_server)
        self.peer = SharedMemoryPeer(self.server_channel, self.store)
        self.worker = SharedMemoryWorker(self.worker_channel, self.spec)

    def assign(self, turn, buffer):
        message = messages.Assignment(turn, turn, buffer.number, (turn,), 0.0)
        self.peer.publish(message, buffer)

    def close(self):
        self.worker.close()
        self.peer.close()
        self.store.close()


@pytest.fixture
def connected():
    connected = Connected()
    yield connected
    connected.close()


def open_descriptors():
    gc.collect()  # a mapping holds a descriptor until it is collected
    return len(os.listdir("/proc/self/fd"))


def raw_messages(connected, count):
    """Receive without the transport, which hides the messages that share memory."""
    return [connected.worker_channel.receive() for _ in range(count)]


def test_memory_is_shared_just_before_the_message_that_needs_it(connected):
    buffer = connected.store.new_buffer()
    connected.peer.open_slot(WELCOME)
    connected.assign(1, buffer)
    kinds = [type(message) for message in raw_messages(connected, 4)]
    assert kinds == [
        messages.SlotShared,
        messages.Welcome,
        messages.BufferShared,
        messages.Assignment,
    ]


def test_buffer_is_shared_once_with_each_worker(connected):
    first, second = connected.store.new_buffer(), connected.store.new_buffer()
    for turn, buffer in enumerate((first, second, first, second, first)):
        connected.assign(turn, buffer)
    received = raw_messages(connected, 7)
    shared = [m.buffer for m in received if isinstance(m, messages.BufferShared)]
    assert shared == [0, 1]
    assert sum(isinstance(m, messages.Assignment) for m in received) == 5


def test_server_and_worker_see_the_same_memory(connected):
    """Nothing is copied: a write on one side is visible on the other at once."""
    buffer = connected.store.new_buffer()
    theirs = connected.peer.open_slot(WELCOME)
    connected.assign(1, buffer)
    connected.worker.receive()
    views = connected.worker.fetch(connected.worker.receive())
    slot = connected.worker.open_slot().slot
    for value in (1.0, 2.0):
        buffer.views.parameters[0][0].fill_(value)
        assert views.parameters[0][0].tolist() == [[value] * 3]
        slot.parameters[0][1].fill_(value)
        assert theirs.parameters[0][1].tolist() == [value]


def test_no_descriptor_stays_open(connected):
    before = open_descriptors()
    other = Connected()
    other.peer.open_slot(WELCOME)
    buffers = [other.store.new_buffer() for _ in range(3)]
    for turn in range(9):
        other.assign(turn, buffers[turn % 3])
        other.peer.send_state({"a": torch.ones(3)}, "state")
        other.worker.send_state(0, {"a": torch.ones(3)}, has_begun=True)
    other.worker.receive()
    for _ in range(9):
        other.worker.fetch(other.worker.receive())
        other.worker.receive_state(other.worker.receive())
    uploads = 0
    while uploads < 9:
        for upload in other.peer.receive_nowait():
            other.peer.receive_state(upload)
            uploads += 1
    other.close()
    del other, buffers, upload
    assert open_descriptors() == before


def test_no_descriptor_stays_open_when_the_worker_reads_nothing(connected):
    before = open_descriptors()
    other = Connected()
    other.peer.open_slot(WELCOME)
    other.server_channel._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
    buffers = [other.store.new_buffer() for _ in range(50)]
    for turn, buffer in enumerate(buffers):
        other.assign(turn, buffer)
        other.peer.send_state({"a": torch.ones(3)}, "state")
    other.close()
    del other, buffers, buffer
    assert open_descriptors() == before


def test_no_descriptor_stays_open_when_the_worker_is_lost(connected):
    buffer = connected.store.new_buffer()
    connected.worker.close()
    before = open_descriptors()
    for send in (
        lambda: connected.peer.open_slot(WELCOME),
        lambda: connected.assign(1, buffer),
        lambda: connected.peer.send_state({"a": torch.ones(3)}, "state"),
    ):
        with pytest.raises(PeerLost):
            send()
    assert open_descriptors() == before


def test_slot_that_does_not_fit_into_memory_is_refused(connected, monkeypatch):
    monkeypatch.setattr(region_module, "spare_bytes", lambda: 10)
    before = open_descriptors()
    with pytest.raises(SpecError, match="slot"):
        connected.peer.open_slot(WELCOME)
    with pytest.raises(SpecError, match="parameters"):
        connected.store.new_buffer()
    assert open_descriptors() == before
    monkeypatch.undo()
    connected.peer.open_slot(WELCOME)
    assert connected.worker.receive() == WELCOME


@pytest.mark.parametrize("message", [messages.SlotShared(), messages.BufferShared(0)])
def test_shared_message_without_a_descriptor_breaks_the_protocol(connected, message):
    connected.server_channel.send(message)
    with pytest.raises(ProtocolError, match="expected shared memory with a message"):
        connected.worker.receive()


@pytest.mark.parametrize("message", [messages.SlotShared(), messages.BufferShared(0)])
def test_memory_that_is_too_small_breaks_the_protocol(connected, message):
    region, fd = Region.create(8, "test")
    del region
    connected.server_channel.send(message, fd, fd)
    os.close(fd)
    with pytest.raises(ProtocolError, match="expected at least"):
        connected.worker.receive()


def test_memory_that_could_shrink_breaks_the_protocol(connected):
    fd = os.memfd_create("test")
    os.truncate(fd, 2**16)
    connected.server_channel.send(messages.BufferShared(0), fd)
    os.close(fd)
    with pytest.raises(ProtocolError, match="not sealed"):
        connected.worker.receive()


@pytest.mark.parametrize("message", [messages.SlotShared(), messages.BufferShared(0)])
def test_worker_cannot_share_memory(connected, message):
    connected.worker.send(message)
    with pytest.raises(ProtocolError, match="expected a message from a worker"):
        list(connected.peer.receive_nowait())


def test_worker_maps_the_parameters_read_only(connected):
    """Writing to them would kill this process, so ask the OS."""
    buffer = connected.store.new_buffer()
    connected.assign(1, buffer)
    views = connected.worker.fetch(connected.worker.receive())
    address = views.parameters[0][0].data_ptr()
    assert permissions_at(address) == "r--s"
    connected.peer.open_slot(WELCOME)
    connected.worker.receive()
    slot = connected.worker.open_slot().slot
    assert permissions_at(slot.parameters[0][0].data_ptr()) == "rw-s"


def permissions_at(address):
    with open("/proc/self/maps", encoding="utf-8") as maps:
        for line in maps:
            area, permissions, *_ = line.split()
            begin, end = (int(number, 16) for number in area.split("-"))
            if begin <= address < end:
                return permissions
    raise AssertionError(f"nothing is mapped at {address:x}")


def test_process_of_the_peer_is_known(connected):
    assert connected.peer.pid == os.getpid()
