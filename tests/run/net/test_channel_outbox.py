# SPDX-License-Identifier: BSD-3-Clause
"""A server never waits for a slow reader, and loses only one that stops reading."""

import os
import secrets
import socket
from contextlib import closing
from selectors import EVENT_WRITE
from threading import Thread

import pytest

from paceline.errors import PeerLost
from paceline.run.net import channel as channel_module
from paceline.run.net import messages
from paceline.run.net.address import listen
from paceline.run.net.channel import OUTBOX_BYTES, STRANGER_LIMIT, Channel, frame
from paceline.run.net.handshake import connect, new_token
from paceline.run.server.listener import Listener

TOKEN = new_token()
SMALLEST_BUFFER = 1  # the OS rounds it up to a few kilobytes
COUNT = 300


def large(number):
    """Return a message of about 4 kB that carries a number."""
    return messages.WorkerUnavailable(number, "x" * 4096)


@pytest.fixture
def pair():
    """Our end, as a server has it, and the end of a peer that may be slow to read."""
    ours, theirs = socket.socketpair()
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SMALLEST_BUFFER)
    ours.setblocking(False)
    theirs.settimeout(10.0)
    channels = (
        Channel(ours, messages.decode_server, STRANGER_LIMIT),
        Channel(theirs, messages.decode_worker, STRANGER_LIMIT),
    )
    channels[1].trust(messages.decode_worker)
    yield channels
    for channel in channels:
        channel.close()


def fill(channel):
    """Send until the socket takes no more; return how many messages were sent."""
    blocked = []
    channel.on_blocked = lambda: blocked.append(True)
    count = 0
    while not blocked:
        channel.send(large(count))
        count += 1
    return count


def send_many(channel):
    for number in range(COUNT):
        channel.send(large(number))


def receive_many(channel):
    for _ in range(COUNT):
        channel.receive()


def read_all(ours, theirs, count):
    """Receive this many messages, flushing our end in between."""
    received = []
    for _ in range(count):
        ours.flush()
        received.append(theirs.receive())
    return received


def open_fds():
    return set(os.listdir("/proc/self/fd"))


def memory_with(content):
    fd = os.memfd_create("test")
    os.write(fd, content)
    return fd


# ------------------------------------------------------------------------------------ the channel


def test_slow_reader_gets_everything_in_order(pair):
    ours, theirs = pair
    send_many(ours)  # would raise or hang if it waited for the peer
    assert not ours.flush()
    assert read_all(ours, theirs, COUNT) == [large(number) for number in range(COUNT)]
    assert ours.flush()


def test_message_longer_than_the_socket_buffer_arrives_whole(pair):
    ours, theirs = pair
    message = messages.StateUpload(0, os.urandom(2**20))
    ours.send(message)
    received = []
    reader = Thread(target=lambda: received.append(theirs.receive()))
    reader.start()
    while not ours.flush():
        pass
    reader.join()
    assert received == [message]


def test_nothing_overtakes_the_outbox(pair):
    """Once the peer has read a little, the socket has room, but the outbox comes first."""
    ours, theirs = pair
    count = fill(ours)
    ours.send(messages.AbandonReport(1, 0.0))
    first = theirs.receive()
    ours.send(messages.AbandonReport(2, 0.0))
    received = [first, *read_all(ours, theirs, count + 1)]
    expected = [large(number) for number in range(count)]
    assert received == [
        *expected,
        messages.AbandonReport(1, 0.0),
        messages.AbandonReport(2, 0.0),
    ]


def test_descriptors_wait_in_the_outbox_with_their_messages(pair):
    ours, theirs = pair
    count = fill(ours)
    for number in range(20):
        fds = [memory_with(b"%d-%d" % (number, i)) for i in range(2)]
        ours.send(messages.StateUpload(number, b"x" * 4096), *fds)
        for fd in fds:
            os.close(fd)  # the caller's, and no longer needed
    read_all(ours, theirs, count)
    for number in range(20):
        [message] = read_all(ours, theirs, 1)
        assert message.optimizer == number
        for i in range(2):
            with open(theirs.take_fd(), "rb") as memory:
                assert os.pread(memory.fileno(), 10, 0) == b"%d-%d" % (number, i)


def test_descriptors_of_a_message_sent_in_pieces_arrive_once(pair):
    ours, theirs = pair
    message = messages.StateUpload(0, bytes(2**18))
    fd = memory_with(b"memory")
    ours.send(message, fd)
    os.close(fd)
    assert not ours.flush()
    received = []
    reader = Thread(target=lambda: received.append(theirs.receive()))
    reader.start()
    while not ours.flush():
        pass
    reader.join()
    assert received == [message]
    with open(theirs.take_fd(), "rb") as memory:
        assert os.pread(memory.fileno(), 10, 0) == b"memory"
    assert not theirs._fds


def test_owner_is_notified_that_the_channel_is_blocked(pair):
    ours, theirs = pair
    blocked = []
    ours.on_blocked = lambda: blocked.append(ours)
    ours.send(messages.AbandonReport(1, 0.0))
    assert not blocked
    send_many(ours)
    assert blocked
    read_all(ours, theirs, COUNT + 1)
    blocked.clear()
    ours.send(messages.AbandonReport(2, 0.0))
    assert not blocked


def test_flush_of_an_empty_outbox_returns_true(pair):
    ours, _ = pair
    assert ours.flush()


def test_peer_that_stops_reading_is_lost_at_the_limit(pair, monkeypatch):
    ours, _ = pair
    limit = 2**20
    monkeypatch.setattr(channel_module, "OUTBOX_BYTES", limit)
    with pytest.raises(PeerLost, match=r"it has not read the last \d+ bytes sent to it"):
        send_many(ours)
    size = len(frame(messages.encode(large(0))))
    assert limit - 2 * size < ours._outbox_bytes <= limit


def test_single_message_above_the_limit_is_sent(pair, monkeypatch):
    """The limit is for a peer that stops reading, not for large messages."""
    ours, _ = pair
    monkeypatch.setattr(channel_module, "OUTBOX_BYTES", 1000)
    ours.send(messages.StateUpload(0, bytes(2**20)))
    with pytest.raises(PeerLost, match="it has not read"):
        ours.send(messages.AbandonReport(1, 0.0))


def test_outbox_can_hold_the_longest_message():
    assert OUTBOX_BYTES >= channel_module.MEMBER_LIMIT


def test_sending_continues_after_the_outbox_was_empty(pair):
    ours, theirs = pair
    for _ in range(3):
        count = fill(ours)
        assert read_all(ours, theirs, count) == [large(number) for number in range(count)]
        assert ours.flush()
        assert ours._outbox_bytes == 0


def test_peer_that_closes_while_the_outbox_is_full_is_lost(pair):
    ours, theirs = pair
    fill(ours)
    theirs.close()
    with pytest.raises(PeerLost, match="the connection broke: "):
        ours.flush()


def test_what_a_peer_sent_before_it_broke_is_received_first(pair):
    """It shut down its receiving half, so only sending fails."""
    ours, theirs = pair
    fill(ours)
    theirs.send(messages.CancelTurn(1))
    theirs._sock.shutdown(socket.SHUT_RD)
    with pytest.raises(PeerLost, match="the connection broke: "):
        ours.flush()
    assert list(ours.receive_nowait()) == [messages.CancelTurn(1)]
    with pytest.raises(PeerLost, match="the connection broke: "):
        list(ours.receive_nowait())


def test_closing_a_full_outbox_closes_its_descriptors(pair):
    ours, theirs = pair
    before = open_fds()
    fill(ours)
    fd = memory_with(b"memory")
    for number in range(20):
        ours.send(messages.StateUpload(number, b"x" * 4096), fd, fd)
    os.close(fd)
    assert len(open_fds()) == len(before) + 40
    ours.close()
    theirs.close()
    assert open_fds() < before


def test_descriptors_that_were_sent_from_the_outbox_are_closed(pair):
    ours, theirs = pair
    before = open_fds()
    count = fill(ours)
    fd = memory_with(b"memory")
    ours.send(messages.StateUpload(0, b""), fd)
    os.close(fd)
    read_all(ours, theirs, count + 1)
    os.close(theirs.take_fd())
    assert open_fds() == before


def test_peer_is_lost_if_there_are_too_many_open_files(pair, monkeypatch):
    ours, _ = pair
    fill(ours)
    before = open_fds()
    duplicate, made = os.dup, []

    def fail_second(fd):
        if made:
            raise OSError(24, "Too many open files")
        made.append(duplicate(fd))
        return made[-1]

    monkeypatch.setattr(os, "dup", fail_second)
    with pytest.raises(PeerLost, match="cannot send to it: Too many open files"):
        ours.send(messages.StateUpload(0, b""), ours.fileno(), ours.fileno())
    assert open_fds() == before


# ----------------------------------------------------------------------------------- the listener


class Served:
    """A listener with small socket buffers, and its one peer."""

    def __init__(self):
        self.address = f"unix:@paceline-test-{secrets.token_hex(8)}"
        self.listener = Listener([listen(self.address)], TOKEN, lambda channel: channel)
        connecting = Thread(target=self._connect)
        connecting.start()
        peers = []
        while not peers:
            peers = self.listener.wait(1.0)
        connecting.join()
        [self.peer] = peers
        self.peer._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SMALLEST_BUFFER)
        assert list(self.peer.receive_nowait()) == []

    def _connect(self):
        self.client = connect(self.address, TOKEN, timeout_s=10.0)

    def close(self):
        self.client.close()
        self.listener.shut_down()


@pytest.fixture
def served():
    with closing(Served()) as served:
        yield served


def refusal(number):
    return messages.Refused(f"{number} " + "x" * 4096)


def send_refusals(peer):
    for number in range(COUNT):
        peer.send(refusal(number))


def test_listener_flushes_a_slow_reader_and_does_not_lose_it(served):
    """On a non-blocking socket, `sendall` would have lost it."""
    send_refusals(served.peer)
    received = []

    def read_slowly():
        received.extend(served.client.receive() for _ in range(COUNT))
        served.client.send(messages.AbandonReport(1, 0.5))

    reader = Thread(target=read_slowly)
    reader.start()
    reports = []
    while not reports:
        for peer in served.listener.wait(1.0):
            reports += peer.receive_nowait()
    reader.join()
    assert received == [refusal(number) for number in range(COUNT)]
    assert reports == [messages.AbandonReport(1, 0.5)]


def test_listener_does_not_spin_once_everything_is_sent(served):
    send_refusals(served.peer)
    served.listener.wait(0.0)
    assert is_watched_for_writing(served)
    for _ in range(COUNT):
        while not served.client.wait_readable(0.0):
            served.listener.wait(0.0)
        served.client.receive()
    served.listener.wait(0.0)
    assert not is_watched_for_writing(served)


def is_watched_for_writing(served):
    return bool(served.listener._selector.get_key(served.peer).events & EVENT_WRITE)


def test_listener_reports_a_slow_reader_that_died(served):
    send_refusals(served.peer)
    served.client.close()
    assert served.listener.wait(1.0) == [served.peer]
    with pytest.raises(PeerLost):
        list(served.peer.receive_nowait())
    served.listener.close(served.peer)
    assert served.listener.wait(0.0) == []


def test_listener_reports_a_reader_that_shut_down_its_receiving_half(served):
    send_refusals(served.peer)
    served.client._sock.shutdown(socket.SHUT_RD)
    while served.client._sock.recv(2**20):  # what was in the socket already
        pass
    assert served.listener.wait(1.0) == [served.peer]
    with pytest.raises(PeerLost, match="the connection broke: "):
        list(served.peer.receive_nowait())


def test_closing_a_blocked_peer_with_a_reason_does_not_wait(served):
    send_refusals(served.peer)
    served.listener.close(served.peer, "it broke the protocol")
    assert served.listener.wait(0.0) == []
    with pytest.raises(PeerLost):
        receive_many(served.client)
