# SPDX-License-Identifier: BSD-3-Clause
"""Data sockets move what they can without waiting, and say why a connection ended."""

import select
import socket
import struct
from contextlib import suppress

import pytest

from paceline.errors import PeerLost
from paceline.run.net.address import accept, dial, listen, of_socket
from paceline.run.net.data_socket import (
    AT_ONCE_BYTES,
    WAITING_BYTES,
    DataSocket,
    receive_payloads,
    send_payloads,
)
from paceline.run.net.payload_stream import (
    CHUNK_BYTES,
    Arrival,
    PayloadReceiver,
    PayloadSender,
    Span,
)

TIMEOUT_S = 10.0
HEADER_BYTES = 16


@pytest.fixture(params=["tcp", "unix"])
def pair(request):
    """A data socket, and the plain socket at its other end."""
    if request.param == "unix":
        ours, theirs = socket.socketpair()
    else:
        with listen("tcp:127.0.0.1:0") as listening:
            theirs = dial(of_socket(listening, "tcp:127.0.0.1:0"))
            select.select([listening], [], [], TIMEOUT_S)
            ours = accept(listening)
    theirs.settimeout(TIMEOUT_S)
    with theirs:
        data = DataSocket(ours)
        yield data, theirs
        data.close()


def wait_arrived(data):
    """Wait until the data socket has something to receive."""
    assert select.select([data], [], [], TIMEOUT_S)[0]


def fill(data):
    """Send until the socket takes no more; return how much it took."""
    sent, block = 0, memoryview(bytes(1 << 16))
    while count := data.send([block]):
        sent += count
    return sent


def span(size):
    return [Span(memoryview(bytearray(size)))]


def reset(sock):
    """Close a socket as the OS does for a process that is killed with unread data."""
    with suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


def test_bytes_of_several_buffers_are_sent_in_order(pair):
    data, theirs = pair
    assert data.send([memoryview(b"ab"), memoryview(b"cde")]) == 5
    assert theirs.recv(10) == b"abcde"


def test_bytes_are_received_into_the_space(pair):
    data, theirs = pair
    theirs.sendall(b"abc")
    wait_arrived(data)
    space = bytearray(b"12345")
    assert data.receive_into(memoryview(space)) == 3
    assert space == b"abc45"


def test_nothing_to_receive_is_zero_bytes(pair):
    data, _ = pair
    assert data.receive_into(memoryview(bytearray(5))) == 0


def test_full_socket_takes_zero_bytes_until_the_other_side_reads(pair):
    data, theirs = pair
    sent = fill(data)
    assert sent > 0
    assert data.send([memoryview(b"x")]) == 0
    received = 0
    while received < sent:
        received += len(theirs.recv(1 << 16))
    assert select.select([], [data], [], TIMEOUT_S)[1]
    assert data.send([memoryview(b"x")]) == 1


def test_socket_takes_a_part_of_more_than_fits(pair):
    data, _ = pair
    assert 0 < data.send([memoryview(b"header"), memoryview(bytes(1 << 26))]) < 1 << 26


def test_bytes_before_the_end_are_received_first(pair):
    data, theirs = pair
    theirs.sendall(b"abc")
    theirs.close()
    wait_arrived(data)
    assert data.receive_into(memoryview(bytearray(5))) == 3
    wait_arrived(data)
    with pytest.raises(PeerLost, match="the data connection was closed"):
        data.receive_into(memoryview(bytearray(5)))


def test_sending_to_a_closed_connection_raises_peer_lost(pair):
    data, theirs = pair
    reset(theirs)
    wait_arrived(data)
    with pytest.raises(PeerLost, match="the data connection broke: "):
        fill(data)


def test_receiving_from_a_killed_peer_raises_peer_lost(pair):
    data, theirs = pair
    data.send([memoryview(b"unread")])
    reset(theirs)
    wait_arrived(data)
    with pytest.raises(PeerLost, match=r"the data connection (broke|was closed)"):
        data.receive_into(memoryview(bytearray(5)))


def test_socket_that_was_closed_here_raises_peer_lost(pair):
    data, _ = pair
    data.close()
    data.close()
    with pytest.raises(PeerLost):
        data.send([memoryview(b"x")])
    with pytest.raises(PeerLost):
        data.receive_into(memoryview(bytearray(5)))


def test_little_waits_in_the_operating_system_where_it_cannot_be_cancelled():
    with listen("tcp:127.0.0.1:0") as listening:
        sock = dial(of_socket(listening, "tcp:127.0.0.1:0"))
        data = DataSocket(sock)
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT) == WAITING_BYTES
        data.close()


def test_peer_that_does_not_read_for_a_long_time_is_not_cut_off():
    """With this timeout, the OS would close the connection to a worker that only computes."""
    with listen("tcp:127.0.0.1:0") as listening:
        sock = dial(of_socket(listening, "tcp:127.0.0.1:0"))
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) > 0
        data = DataSocket(sock)
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 0
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        data.close()


# ---------------------------------------------------------------------------------- moving payloads


class Pipe:
    """A byte stream in memory that moves at most a few bytes per call."""

    def __init__(self, at_once):
        self._at_once = at_once
        self._bytes = bytearray()
        self.calls = 0

    def send(self, buffers):
        self.calls += 1
        data = b"".join(buffers)[: self._at_once]
        self._bytes += data
        return len(data)

    def receive_into(self, space):
        self.calls += 1
        count = min(len(space), self._at_once, len(self._bytes))
        space[:count] = self._bytes[:count]
        del self._bytes[:count]
        return count


@pytest.mark.parametrize("at_once", [1, 7, 100])
def test_payloads_move_in_any_steps(at_once):
    pipe, sender, receiver = Pipe(at_once), PayloadSender(), PayloadReceiver()
    source = Span(memoryview(bytes(range(200))))
    target = span(200)
    sender.add(1, [source])
    receiver.expect(1, target)
    send_payloads(pipe, sender)
    assert not sender
    assert list(receive_payloads(pipe, receiver)) == [Arrival(1, True)]
    assert bytes(target[0].memory) == bytes(range(200))


def test_nothing_is_sent_if_there_is_nothing_to_send():
    pipe = Pipe(100)
    send_payloads(pipe, PayloadSender())
    assert pipe.calls == 0


def test_one_call_sends_and_receives_a_limited_amount():
    """So one connection can't keep others out."""
    size = 3 * AT_ONCE_BYTES
    pipe, sender, receiver = Pipe(1 << 30), PayloadSender(), PayloadReceiver()
    sender.add(1, span(size))
    receiver.expect(1, span(size))
    send_payloads(pipe, sender)
    one_more = CHUNK_BYTES + HEADER_BYTES
    assert AT_ONCE_BYTES <= sender.sent_bytes <= AT_ONCE_BYTES + one_more
    while sender:
        send_payloads(pipe, sender)
    calls = 0
    while receiver.is_expecting:
        before = receiver.received_bytes
        list(receive_payloads(pipe, receiver))
        assert receiver.received_bytes - before <= AT_ONCE_BYTES + one_more
        calls += 1
    assert calls >= 3


def test_payload_that_the_socket_does_not_take_is_left_for_later(pair):
    data, theirs = pair
    sender = PayloadSender()
    sender.add(1, span(1 << 26))
    for _ in range(100):  # more calls than it needs to fill the socket
        send_payloads(data, sender)
    sent = sender.sent_bytes
    assert 0 < sent < 1 << 26
    assert sender
    received = 0
    while received < sent:
        received += len(theirs.recv(1 << 20))


def test_payloads_before_the_end_of_the_connection_are_received(pair):
    data, theirs = pair
    sender, receiver, arrivals = PayloadSender(), PayloadReceiver(), []
    sender.add(1, span(100))
    receiver.expect(1, span(100))
    theirs.sendall(b"".join(sender.pending()))
    theirs.close()
    with pytest.raises(PeerLost, match="the data connection was closed"):
        receive_until_lost(data, receiver, arrivals)
    assert arrivals == [Arrival(1, True)]


def receive_until_lost(data, receiver, arrivals):
    while True:
        wait_arrived(data)
        for arrival in receive_payloads(data, receiver):
            arrivals.append(arrival)
