# SPDX-License-Identifier: BSD-3-Clause
"""Messages and descriptors travel over real sockets, in order and within their limits."""

import os
import socket
import struct

import pytest

from message_examples import EXAMPLES
from paceline.errors import InternalError, PeerLost, ProtocolError
from paceline.run.net import messages
from paceline.run.net.channel import MEMBER_LIMIT, STRANGER_LIMIT, Channel, frame
from paceline.run.tensors.state_spec import StateSpec

FROM_WORKER = [message for message in EXAMPLES if isinstance(message, messages.FromWorker)]


def framed(*sent):
    return b"".join(frame(messages.encode(message)) for message in sent)


def unix_pair():
    return socket.socketpair()


def tcp_pair():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        theirs = socket.create_connection(listener.getsockname())
        return listener.accept()[0], theirs


@pytest.fixture(params=[unix_pair, tcp_pair], ids=["unix", "tcp"])
def pair(request):
    """Our channel, authenticated, and their plain socket."""
    ours, theirs = request.param()
    channel = Channel(ours, messages.decode_worker, STRANGER_LIMIT)
    channel.trust(messages.decode_worker)
    yield channel, theirs
    channel.close()
    theirs.close()


@pytest.fixture
def unix():
    """Two channels over a Unix socket; neither is authenticated."""
    ours, theirs = socket.socketpair()
    channels = (
        Channel(ours, messages.decode_worker, STRANGER_LIMIT),
        Channel(theirs, messages.decode_server, STRANGER_LIMIT),
    )
    yield channels
    for channel in channels:
        channel.close()


def send_many(channel, message):
    for _ in range(1000):
        channel.send(message)


def open_fds():
    return set(os.listdir("/proc/self/fd"))


# ---------------------------------------------------------------------------------------- messages


def test_frame_limit_grows_with_trust():
    ours, theirs = socket.socketpair()
    channel = Channel(ours, lambda body: body, STRANGER_LIMIT)
    longest = b"x" * STRANGER_LIMIT
    with theirs:
        theirs.sendall(frame(longest))
        assert channel.receive() == longest
        channel.trust(lambda body: body)
        theirs.sendall(frame(longest + b"x"))
        assert channel.receive() == longest + b"x"
        theirs.sendall(struct.pack("<I", MEMBER_LIMIT + 1))
        with pytest.raises(ProtocolError, match=f"1 to {MEMBER_LIMIT} bytes"):
            channel.receive()
    channel.close()


def test_longer_frame_than_the_limit_is_refused_before_trust(pair):
    trusted, theirs = pair
    channel = Channel(trusted._sock, messages.decode_stranger, STRANGER_LIMIT)
    theirs.sendall(struct.pack("<I", STRANGER_LIMIT + 1))
    with pytest.raises(ProtocolError, match=f"1 to {STRANGER_LIMIT} bytes"):
        channel.receive()


def test_messages_arrive_one_byte_at_a_time(pair):
    channel, theirs = pair
    message = FROM_WORKER[0]
    stream = framed(message)
    for i in range(len(stream) - 1):
        theirs.sendall(stream[i : i + 1])
        assert channel.wait_readable(10.0)
        assert list(channel.receive_nowait()) == []
    theirs.sendall(stream[-1:])
    assert list(channel.receive_nowait()) == [message]


def test_messages_of_one_read_keep_their_order(pair):
    channel, theirs = pair
    theirs.sendall(framed(*FROM_WORKER))
    assert [channel.receive() for _ in FROM_WORKER] == FROM_WORKER
    assert not channel.wait_readable(0.0)


def test_sent_message_is_one_frame(pair):
    channel, theirs = pair
    channel.send(FROM_WORKER[0])
    whole = framed(FROM_WORKER[0])
    assert theirs.recv(len(whole), socket.MSG_WAITALL) == whole


def test_message_in_the_buffer_counts_as_readable(pair):
    """The socket alone wouldn't tell, because one read returned both messages."""
    channel, theirs = pair
    theirs.sendall(framed(*FROM_WORKER[:2]))
    assert channel.receive() == FROM_WORKER[0]
    assert channel.wait_readable(0.0)
    assert channel.receive() == FROM_WORKER[1]


def test_first_message_can_make_the_second_one_legal():
    ours, theirs = socket.socketpair()
    channel = Channel(ours, messages.decode_stranger, STRANGER_LIMIT)
    join = messages.Join(0, "1", StateSpec((), (), (), ()))
    with theirs:
        theirs.sendall(framed(messages.Proof(bytes(32)), join))
        received = channel.receive_nowait()
        assert next(received) == messages.Proof(bytes(32))
        channel.trust(messages.decode_worker)
        assert list(received) == [join]
    channel.close()


def test_incomplete_input_yields_no_message(pair):
    channel, theirs = pair
    channel._sock.setblocking(False)
    assert list(channel.receive_nowait()) == []
    theirs.sendall(b"\x01")
    assert channel.wait_readable(10.0)
    assert list(channel.receive_nowait()) == []


def test_peer_that_closes_in_the_middle_of_a_frame_is_lost(pair):
    channel, theirs = pair
    theirs.sendall(frame(b"whole")[:-1])
    theirs.close()
    with pytest.raises(PeerLost, match="the connection was closed"):
        channel.receive()


def test_sending_to_a_peer_that_is_gone_raises_peer_lost(pair):
    channel, theirs = pair
    theirs.close()
    with pytest.raises(PeerLost, match="the connection broke: "):
        send_many(channel, FROM_WORKER[0])  # TCP reports it on the second attempt only


def test_blocking_send_beyond_the_timeout_raises_peer_lost(pair):
    channel, _ = pair
    channel._sock.settimeout(0.01)
    with pytest.raises(PeerLost, match="the connection broke: timed out"):
        send_many(channel, messages.StateUpload(0, bytes(2**16)))


# ------------------------------------------------------------------------------------- descriptors


def test_descriptors_travel_with_their_messages(unix):
    ours, theirs = unix
    ours.trust(messages.decode_worker)
    fds = [os.memfd_create(f"memory-{i}") for i in range(2)]
    for i, fd in enumerate(fds):
        os.write(fd, b"%d" % i)
        theirs.send(messages.StateUpload(i, b""), fd)
        os.close(fd)
    for i in range(2):
        assert ours.receive().optimizer == i
        fd = ours.take_fd()
        assert os.pread(fd, 1, 0) == b"%d" % i
        os.close(fd)
    with pytest.raises(ProtocolError, match="expected shared memory with a message"):
        ours.take_fd()


def test_descriptors_of_an_unauthenticated_client_are_closed(unix):
    ours, theirs = unix
    before = open_fds()
    theirs.send(messages.AbandonReport(1, 0.0), *[theirs.fileno()] * 4)
    with pytest.raises(ProtocolError, match="got more shared memory than any message needs"):
        ours.receive()
    ours.close()
    assert open_fds() < before


def test_worker_cannot_pile_up_descriptors(unix):
    ours, theirs = unix
    ours.trust(messages.decode_worker)
    before = open_fds()
    for _ in range(2):
        theirs.send(messages.AbandonReport(1, 0.0), *[theirs.fileno()] * 4)
    ours.receive()
    with pytest.raises(ProtocolError, match="got more shared memory than any message needs"):
        ours.receive()
    ours.close()
    assert open_fds() < before


@pytest.mark.parametrize("is_blocking", [True, False])
def test_descriptors_over_tcp_raise_an_internal_error_and_nothing_is_sent(is_blocking):
    ours, theirs = tcp_pair()
    channel = Channel(ours, messages.decode_worker, STRANGER_LIMIT)
    ours.setblocking(is_blocking)
    with theirs:
        with pytest.raises(InternalError, match="over Unix sockets only"):
            channel.send(messages.StateUpload(0, b""), theirs.fileno())
        channel.close()
        assert theirs.recv(1) == b""


def test_waiting_works_with_large_descriptor_numbers(unix):
    """`select` doesn't support numbers from 1024 on."""
    ours, theirs = unix
    high = os.dup2(ours.fileno(), 5000)
    channel = Channel(socket.socket(fileno=high), messages.decode_worker, STRANGER_LIMIT)
    assert not channel.wait_readable(0.0)
    theirs.send(FROM_WORKER[1])
    assert channel.wait_readable(10.0)
    assert channel.receive() == FROM_WORKER[1]
    channel.close()


# ------------------------------------------------------------------------------------------- peers


def test_peer_process_is_known_on_this_host_only():
    for make, pid in ((unix_pair, os.getpid()), (tcp_pair, None)):
        ours, theirs = make()
        channel = Channel(ours, messages.decode_worker, STRANGER_LIMIT)
        assert channel.peer_pid == pid
        assert channel.is_local == (pid is not None)
        channel.close()
        theirs.close()


def test_closing_twice_is_harmless(pair):
    channel, _ = pair
    channel.close()
    channel.close()
    with pytest.raises(PeerLost):
        channel.send(FROM_WORKER[0])
    with pytest.raises(PeerLost):
        channel.receive()
