# SPDX-License-Identifier: BSD-3-Clause
"""Frames, descriptors and addresses of the control connection, over real sockets."""

import os
import secrets
import socket
import struct

import pytest

from message_examples import EXAMPLES
from paceline.errors import PeerLost, ProtocolError, SpecError
from paceline.run.net import messages
from paceline.run.net.channel import MEMBER_LIMIT, STRANGER_LIMIT, Channel, Frames, connect, listen
from paceline.run.tensors.state_spec import StateSpec

FROM_WORKER = [message for message in EXAMPLES if isinstance(message, messages.FromWorker)]


def framed(*bodies):
    return b"".join(struct.pack("<I", len(body)) + body for body in bodies)


def unix_pair():
    return socket.socketpair()


def tcp_pair():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        theirs = socket.create_connection(listener.getsockname())
        return listener.accept()[0], theirs


@pytest.fixture(params=[unix_pair, tcp_pair], ids=["unix", "tcp"])
def pair(request):
    """Our channel, trusted, and their plain socket."""
    ours, theirs = request.param()
    channel = Channel(ours, messages.decode_worker, STRANGER_LIMIT)
    channel.trust(messages.decode_worker)
    yield channel, theirs
    channel.close()
    theirs.close()


@pytest.fixture
def unix():
    """Our channel, of a stranger, and theirs, over a Unix socket."""
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


# ------------------------------------------------------------------------------------------ frames


def test_frames_are_cut_wherever_the_stream_is_split():
    bodies = [b"a", b"bc" * 40, b"d" * 300]
    stream = framed(*bodies)
    for split in range(len(stream) + 1):
        frames, found = Frames(MEMBER_LIMIT), []
        for part in (stream[:split], stream[split:]):
            frames.feed(part)
            while frames.has_one():
                found.append(frames.cut())
        assert found == bodies
        assert frames.cut() is None


def test_a_frame_without_a_body_is_refused():
    frames = Frames(STRANGER_LIMIT)
    frames.feed(framed(b""))
    with pytest.raises(ProtocolError, match="must have 1 to 256 bytes, one of 0 was announced"):
        frames.cut()


@pytest.mark.parametrize("length", [STRANGER_LIMIT + 1, MEMBER_LIMIT + 1, 2**32 - 1])
def test_a_long_frame_is_refused_when_it_is_announced(length):
    frames = Frames(STRANGER_LIMIT)
    frames.feed(struct.pack("<I", length))
    with pytest.raises(ProtocolError, match=f"one of {length} was announced"):
        frames.cut()


def test_the_limit_is_the_longest_frame_before_trust_and_after():
    ours, theirs = socket.socketpair()
    channel = Channel(ours, lambda body: body, STRANGER_LIMIT)
    longest = b"x" * STRANGER_LIMIT
    with theirs:
        theirs.sendall(framed(longest))
        assert channel.receive() == longest
        channel.trust(lambda body: body)
        theirs.sendall(framed(longest + b"x"))
        assert channel.receive() == longest + b"x"
        theirs.sendall(struct.pack("<I", MEMBER_LIMIT + 1))
        with pytest.raises(ProtocolError, match=f"1 to {MEMBER_LIMIT} bytes"):
            channel.receive()
    channel.close()


# ---------------------------------------------------------------------------------------- messages


def test_messages_arrive_one_byte_at_a_time(pair):
    channel, theirs = pair
    message = FROM_WORKER[0]
    stream = framed(messages.encode(message))
    for i in range(len(stream) - 1):
        theirs.sendall(stream[i : i + 1])
        assert channel.wait_readable(10.0)
        assert list(channel.receive_nowait()) == []
    theirs.sendall(stream[-1:])
    assert list(channel.receive_nowait()) == [message]


def test_several_messages_of_one_read_come_in_their_order(pair):
    channel, theirs = pair
    theirs.sendall(framed(*map(messages.encode, FROM_WORKER)))
    assert [channel.receive() for _ in FROM_WORKER] == FROM_WORKER
    assert not channel.wait_readable(0.0)


def test_a_message_that_was_read_already_is_readable(pair):
    """The socket alone would not tell: both came with one read."""
    channel, theirs = pair
    theirs.sendall(framed(*map(messages.encode, FROM_WORKER[:2])))
    assert channel.receive() == FROM_WORKER[0]
    assert channel.wait_readable(0.0)
    assert channel.receive() == FROM_WORKER[1]


def test_the_first_message_can_be_what_makes_the_second_legal():
    ours, theirs = socket.socketpair()
    channel = Channel(ours, messages.decode_stranger, STRANGER_LIMIT)
    join = messages.Join(0, "1", StateSpec((), (), (), ()))
    with theirs:
        theirs.sendall(framed(messages.encode(messages.Proof(bytes(32))), messages.encode(join)))
        heard = channel.receive_nowait()
        assert next(heard) == messages.Proof(bytes(32))
        channel.trust(messages.decode_worker)
        assert list(heard) == [join]
    channel.close()


def test_nothing_to_read_is_no_message(pair):
    channel, theirs = pair
    channel._sock.setblocking(False)
    assert list(channel.receive_nowait()) == []
    theirs.sendall(b"\x01")
    assert channel.wait_readable(10.0)
    assert list(channel.receive_nowait()) == []


def test_a_peer_that_closes_is_lost_even_in_the_middle_of_a_frame(pair):
    channel, theirs = pair
    theirs.sendall(framed(b"whole")[:-1])
    theirs.close()
    with pytest.raises(PeerLost, match="the connection was closed"):
        channel.receive()


def test_sending_to_a_peer_that_is_gone_says_so(pair):
    channel, theirs = pair
    theirs.close()
    with pytest.raises(PeerLost, match="the connection broke: "):
        send_many(channel, FROM_WORKER[0])  # TCP tells only at the second try


def test_a_peer_that_does_not_read_is_lost_and_nobody_waits_for_it(pair):
    channel, _ = pair
    channel._sock.setblocking(False)
    with pytest.raises(PeerLost, match="the connection broke: "):
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
    with pytest.raises(ProtocolError, match="without the memory that belongs to it"):
        ours.take_fd()


def test_a_stranger_cannot_leave_descriptors_here(unix):
    ours, theirs = unix
    before = open_fds()
    theirs.send(messages.AbandonReport(1, 0.0), *[theirs.fileno()] * 4)
    with pytest.raises(ProtocolError, match="more memory came along"):
        ours.receive()
    ours.close()
    assert open_fds() < before


def test_a_worker_cannot_pile_up_descriptors_here(unix):
    ours, theirs = unix
    ours.trust(messages.decode_worker)
    before = open_fds()
    for _ in range(2):
        theirs.send(messages.AbandonReport(1, 0.0), *[theirs.fileno()] * 4)
    ours.receive()
    with pytest.raises(ProtocolError, match="more memory came along"):
        ours.receive()
    ours.close()
    assert open_fds() < before


def test_waiting_works_with_descriptors_of_any_number(unix):
    """`select` cannot have those from 1024 on."""
    ours, theirs = unix
    high = os.dup2(ours.fileno(), 5000)
    channel = Channel(socket.socket(fileno=high), messages.decode_worker, STRANGER_LIMIT)
    assert not channel.wait_readable(0.0)
    theirs.send(FROM_WORKER[1])
    assert channel.wait_readable(10.0)
    assert channel.receive() == FROM_WORKER[1]
    channel.close()


# --------------------------------------------------------------------------------------- addresses


@pytest.mark.parametrize("kind", ["path", "name", "tcp", "tcp6"])
def test_every_kind_of_address_can_be_listened_at(kind, tmp_path):
    address = {
        "path": f"unix:{tmp_path}/server",
        "name": f"unix:@paceline-test-{secrets.token_hex(8)}",
        "tcp": "tcp:127.0.0.1:0",
        "tcp6": "tcp:[::1]:0",
    }[kind]
    if kind == "tcp6" and not os.path.exists("/proc/net/if_inet6"):
        pytest.skip("this machine has no IPv6")
    with listen(address) as listener:
        assert not listener.getblocking()
        with socket.socket(listener.family, socket.SOCK_STREAM) as sock:
            sock.connect(listener.getsockname())


@pytest.mark.parametrize(
    "address",
    [
        "",
        "unix:",
        "unix",
        "/tmp/server",
        "127.0.0.1:80",
        "tcp:",
        "tcp:host",
        "tcp:host:",
        "tcp:host:http",
        "tcp:host:-1",
        "tcp:host:65536",
        "tcp:host:²",
        "udp:host:80",
        "unix @name",
    ],
)
def test_a_bad_address_is_named(address):
    for use in (listen, lambda a: connect(a, "token")):
        with pytest.raises(SpecError, match="an address must be unix:/path, unix:@name or tcp:"):
            use(address)


def test_an_address_that_is_taken_is_named():
    address = f"unix:@paceline-test-{secrets.token_hex(8)}"
    with listen(address), pytest.raises(SpecError, match=f"cannot listen at {address}: Address al"):
        listen(address)


@pytest.mark.parametrize("name", ["unix:@", "unix:/"])
def test_an_address_that_is_too_long_says_so(name):
    address = name + "a" * 200
    with pytest.raises(SpecError, match=": AF_UNIX path too long"):
        listen(address)
    with pytest.raises(PeerLost, match=": AF_UNIX path too long"):
        connect(address, "token")


def test_who_has_little_patience_does_not_wait_for_a_server_that_has_no_time():
    """It listens, and never answers."""
    address = f"unix:@paceline-test-{secrets.token_hex(8)}"
    with listen(address), pytest.raises(PeerLost, match="the connection broke: timed out"):
        connect(address, "token", patience_s=0.01)


def test_where_nobody_listens_there_is_no_server(tmp_path):
    with pytest.raises(PeerLost, match=r"no server at unix:.*: No such file"):
        connect(f"unix:{tmp_path}/server", "token")
