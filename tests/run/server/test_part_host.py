# SPDX-License-Identifier: BSD-3-Clause
"""A server that isn't the head connects to the head, and listens where workers reach it."""

import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest

from paceline.errors import PeerLost, ProtocolError, SpecError
from paceline.run.launch.environment import Identity
from paceline.run.net.address import host_of, listen, of_socket
from paceline.run.net.handshake import new_token
from paceline.run.server.part_host import _PartHost
from tcp_loopback import Tcp, state_of_size

NOWHERE = "tcp:127.0.0.1:1"


@pytest.fixture
def head():
    with closing(Tcp(state_of_size(64).spec)) as head:
        yield head


@pytest.fixture
def host_for(tmp_path):
    def host(address, token, listen_at="tcp:127.0.0.1:0"):
        token_file = tmp_path / "token"
        token_file.touch(0o600)
        token_file.write_text(token)
        who = Identity(address, token_file, tmp_path, None, server=1, listen=listen_at)
        return _PartHost(who)

    return host


def connected(head, host):
    """Return the connections of a server, while the head answers."""
    with ThreadPoolExecutor(1) as pool:
        connecting = pool.submit(host.connect)
        while not connecting.done():
            head.connections.wait(0.01)
        return connecting.result()


def test_server_has_both_connections_to_the_head_and_an_address(head, host_for):
    with closing(connected(head, host_for(head.address, head.token))) as connections:
        [peer] = head.connections._connections
        assert peer in head.connections._data
        assert host_of(connections.address) == "127.0.0.1"
        assert not connections.address.endswith(":0")
        with pytest.raises(SpecError):
            listen(connections.address)


def test_server_that_listens_everywhere_is_reached_where_the_head_sees_it(head, host_for):
    host = host_for(head.address, head.token, "tcp:0.0.0.0:0")
    with closing(connected(head, host)) as connections:
        assert host_of(connections.address) == "127.0.0.1"
        assert int(connections.address.rpartition(":")[2]) > 0


def test_no_head_is_a_loss(host_for):
    with pytest.raises(PeerLost):
        host_for(NOWHERE, new_token()).connect()


def test_head_with_another_token_is_refused(head, host_for):
    with pytest.raises(ProtocolError, match="has a different token"):
        connected(head, host_for(head.address, new_token()))


def test_short_token_is_refused_where_other_hosts_can_connect(head, host_for):
    with pytest.raises(SpecError, match="must have at least 32 letters"):
        host_for(head.address, "short", "tcp:0.0.0.0:0").connect()


def test_address_that_is_taken_is_an_error_that_leaves_no_connection(head, host_for):
    with closing(listen("tcp:127.0.0.1:0")) as taken:
        host = host_for(head.address, head.token, of_socket(taken, "tcp:127.0.0.1:0"))
        before = len(os.listdir("/proc/self/fd"))
        with pytest.raises(SpecError, match="in use"):
            connected(head, host)
        for peer in list(head.connections._connections):
            head.connections.close(peer)
        assert len(os.listdir("/proc/self/fd")) == before
