# SPDX-License-Identifier: BSD-3-Clause
"""Addresses of every kind can be listened at and dialed; bad ones are refused by name."""

import errno
import os
import secrets
import socket
import struct

import pytest

from paceline.errors import PeerLost, SpecError
from paceline.run.net.address import (
    KEEP_ALIVE_S,
    VANISHED_S,
    NobodyListens,
    accept,
    bind,
    dial,
    host_of,
    is_loopback,
    is_tcp,
    listen,
    listen_on,
    local_twin,
    of_socket,
)


def new_address():
    return f"unix:@paceline-test-{secrets.token_hex(8)}"


@pytest.fixture(params=["path", "name", "tcp", "tcp6"])
def listening(request, tmp_path):
    """A listening socket and its address."""
    if request.param == "tcp6" and not os.path.exists("/proc/net/if_inet6"):
        pytest.skip("this machine has no IPv6")
    address = {
        "path": f"unix:{tmp_path}/server",
        "name": new_address(),
        "tcp": "tcp:127.0.0.1:0",
        "tcp6": "tcp:[::1]:0",
    }[request.param]
    with listen(address) as sock:
        if request.param.startswith("tcp"):
            address = address[:-1] + str(sock.getsockname()[1])
        yield sock, address


def test_every_kind_of_address_can_be_listened_at_and_dialed(listening):
    sock, address = listening
    assert not sock.getblocking()
    with dial(address) as client, accept(sock) as server:
        assert client.getblocking()
        assert not server.getblocking()
        client.sendall(b"x")
        server.settimeout(10.0)
        assert server.recv(10) == b"x"


def test_accept_returns_none_if_no_client_is_waiting(listening):
    sock, _ = listening
    assert accept(sock) is None


def test_tcp_connections_send_small_messages_immediately_and_notice_a_dead_host():
    with listen("tcp:127.0.0.1:0") as sock:
        address = f"tcp:127.0.0.1:{sock.getsockname()[1]}"
        with dial(address) as client, accept(sock) as server:
            for end in (client, server):
                assert end.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
                assert end.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
                first_s, every_s, count, sending_ms = [
                    end.getsockopt(socket.IPPROTO_TCP, option)
                    for option in (
                        socket.TCP_KEEPIDLE,
                        socket.TCP_KEEPINTVL,
                        socket.TCP_KEEPCNT,
                        socket.TCP_USER_TIMEOUT,
                    )
                ]
                assert first_s == every_s == KEEP_ALIVE_S
                assert first_s + every_s * count == VANISHED_S
                assert sending_ms == VANISHED_S * 1000


def test_only_tcp_addresses_can_be_reached_from_other_hosts():
    assert is_tcp("tcp:host:80")
    assert not is_tcp("unix:/tmp/tcp:host:80")
    assert not is_tcp("unix:@tcp:")


def test_twin_on_this_host_depends_on_the_address_and_the_token():
    twin = local_twin("tcp:host:80", "token")
    assert twin == local_twin("tcp:host:80", "token")
    assert twin not in (local_twin("tcp:host:81", "token"), local_twin("tcp:host:80", "other"))
    assert "token" not in twin


def test_twin_on_this_host_can_be_listened_at_and_dialed():
    twin = local_twin("tcp:host:80", secrets.token_hex(8))
    assert not is_tcp(twin)
    with listen(twin) as sock, dial(twin), accept(sock) as server:
        assert server.family == socket.AF_UNIX


@pytest.mark.parametrize("address", ["tcp:127.0.0.1:0", "tcp:[::1]:0"])
def test_address_of_a_socket_has_the_port_that_the_os_chose(address):
    if "::" in address and not os.path.exists("/proc/net/if_inet6"):
        pytest.skip("this machine has no IPv6")
    with bind(address) as sock:
        found = of_socket(sock, address)
        assert found == f"{address[:-2]}:{sock.getsockname()[1]}"
        assert of_socket(sock, found) == found


@pytest.mark.parametrize("address", ["unix:@name:0", "tcp:127.0.0.1:4000", "unix:/path"])
def test_address_without_a_free_choice_is_that_of_its_socket(address):
    with socket.socket() as sock:
        assert of_socket(sock, address) == address


def test_timeout_still_applies_after_dialing():
    address = new_address()
    with listen(address), dial(address, timeout_s=0.01) as client:
        assert client.gettimeout() == 0.01


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
@pytest.mark.parametrize("use", [listen, dial])
def test_bad_address_is_refused_by_name(address, use):
    with pytest.raises(SpecError) as caught:
        use(address)
    expected = "an address must be unix:/path, unix:@name or tcp:host:port"
    assert str(caught.value) == f"{expected}, got {address!r}"


def test_address_in_use_is_refused_by_name():
    address = new_address()
    with listen(address), pytest.raises(SpecError, match=f"cannot listen at {address}: Address al"):
        listen(address)


def peer_pid(client):
    """Return the process that a client is connected to, as the OS sees it."""
    credentials = client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    return struct.unpack("3i", credentials)[0]


def test_bound_address_is_taken_but_nobody_listens():
    address = new_address()
    with bind(address):
        with pytest.raises(SpecError, match=f"cannot listen at {address}: Address already in use"):
            listen(address)
        with pytest.raises(NobodyListens, match=f"no server at {address}: Connection refused"):
            dial(address)


def test_processes_can_listen_with_the_same_socket_one_after_the_other():
    address = new_address()
    with bind(address) as sock:
        first = os.fork()
        if first == 0:
            listen_on(sock)
            os._exit(0)
        os.waitpid(first, 0)
        with dial(address) as early:
            listen_on(sock)
            assert not sock.getblocking()
            with accept(sock) as server, dial(address) as late:
                assert peer_pid(early) == first
                assert peer_pid(late) == os.getpid()
                server.sendall(b"x")
                assert early.recv(10) == b"x"


@pytest.mark.parametrize("prefix", ["unix:@", "unix:/"])
def test_address_that_is_too_long_is_refused(prefix):
    address = prefix + "a" * 200
    with pytest.raises(SpecError, match=": AF_UNIX path too long"):
        listen(address)
    with pytest.raises(PeerLost, match=": AF_UNIX path too long"):
        dial(address)


def test_dialing_an_address_without_a_server_raises_peer_lost(tmp_path):
    with pytest.raises(PeerLost, match=r"no server at unix:.*: No such file") as caught:
        dial(f"unix:{tmp_path}/server")
    assert not isinstance(caught.value, NobodyListens)


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("unix:@name", True),
        ("tcp:127.0.0.1:1", True),
        ("tcp:127.9.9.9:1", True),
        ("tcp:[::1]:1", True),
        ("tcp:localhost:1", True),
        ("tcp:0.0.0.0:1", False),
        ("tcp::1", False),
        ("tcp:[::]:1", False),
        ("tcp:192.168.0.1:1", False),
        ("tcp:localhost.example.org:1", False),
    ],
)
def test_loopback_is_recognized(address, expected):
    assert is_loopback(address) == expected


def test_host_of_an_address_has_no_brackets():
    assert host_of("tcp:[::1]:80") == "::1"
    assert host_of("tcp:node7:80") == "node7"
    with pytest.raises(SpecError, match="expected an address such as tcp:host:port"):
        host_of("unix:@name")


def test_accept_says_if_this_process_has_too_many_open_files():
    listening = FullSocket()
    with pytest.raises(OSError, match="Too many open files"):
        accept(listening)
    listening.number = errno.ECONNABORTED
    assert accept(listening) is None


class FullSocket:
    """A socket that can't accept."""

    number = errno.EMFILE

    def accept(self):
        raise OSError(self.number, os.strerror(self.number))
