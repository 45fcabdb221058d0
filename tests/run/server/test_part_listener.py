# SPDX-License-Identifier: BSD-3-Clause
"""A data connection that comes before the head has named its session waits, but not forever."""

import secrets
import socket
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from paceline.errors import PeerLost, ProtocolError
from paceline.run.net import server_messages as between
from paceline.run.net.address import listen, of_socket
from paceline.run.net.channel import MEMBER_LIMIT, Channel
from paceline.run.net.data_peer import PartPeer
from paceline.run.net.data_socket import DataSocket, send_payloads
from paceline.run.net.handshake import connect, connect_data
from paceline.run.net.messages import decode_server, decode_worker
from paceline.run.net.payload_stream import PayloadSender
from paceline.run.net.tcp import spans_of
from paceline.run.net.tcp_client import ControlSocket, TcpClient
from paceline.run.server import part_listener
from paceline.run.server.part_listener import EARLY_S, HeadLink, PartListener
from paceline.run.system import SYSTEM
from server_harness import TOKEN

TIMEOUT_S = 20.0
SESSION = bytes(31) + b"1"


class Bench:
    """A listener with a head, and a clock that stands still unless a test moves it."""

    def __init__(self):
        self.now = 100.0
        (mine, theirs), (data, self.head_data) = socket.socketpair(), socket.socketpair()
        self.head = Channel(theirs, decode_worker, MEMBER_LIMIT)
        control = ControlSocket(Channel(mine, decode_server, MEMBER_LIMIT))
        stream = DataSocket(data)
        listening = listen("tcp:127.0.0.1:0")
        self.address = of_socket(listening, "tcp:127.0.0.1:0")
        self.listener = PartListener(
            [listening],
            self.address,
            TOKEN,
            HeadLink(control, stream, TcpClient(control, stream)),
            replace(SYSTEM, monotonic=lambda: self.now),
        )
        self.pool = ThreadPoolExecutor(4)
        self.sockets = []

    def dial(self, session=SESSION):
        """Begin to open a data connection."""
        return self.pool.submit(self._dial, session)

    def _dial(self, session):
        self.sockets.append(DataSocket(connect_data(self.address, TOKEN, session, TIMEOUT_S)))
        return self.sockets[-1]

    def until(self, is_met):
        """Let the listener work until this is met; return the peers that had news."""
        found = []
        while not is_met():
            found += self.listener.wait(0.01)
        return found

    def new_peer(self, session=SESSION):
        """Expect a data connection; return the peer that gets it."""
        peer = PartPeer("exact", "exact")
        self.listener.expect(session, peer)
        return peer

    def close(self):
        self.listener.close()
        self.pool.shutdown()
        for one in [*self.sockets, self.head, self.head_data]:
            one.close()


@pytest.fixture
def bench():
    bench = Bench()
    yield bench
    bench.close()


def send(sock, number, tensor):
    sender = PayloadSender()
    sender.add(number, spans_of([tensor]))
    send_payloads(sock, sender)


def test_data_connection_of_a_session_that_was_named_is_attached(bench):
    peer = bench.new_peer()
    dialing = bench.dial()
    bench.until(dialing.done)
    target = torch.zeros(4)
    peer.expect(1, spans_of([target]))
    send(dialing.result(), 1, torch.ones(4))
    assert bench.listener.wait(TIMEOUT_S) == [peer]
    assert peer.take_arrived() == [1]
    assert torch.equal(target, torch.ones(4))


def test_data_connection_that_comes_first_waits_for_its_session(bench):
    dialing = bench.dial()
    bench.until(lambda: bench.listener._early)
    assert not dialing.done()
    peer = bench.new_peer()
    bench.until(dialing.done)
    assert not bench.listener._early
    peer.expect(1, spans_of([torch.zeros(4)]))
    send(dialing.result(), 1, torch.ones(4))
    assert bench.listener.wait(TIMEOUT_S) == [peer]


def test_data_connection_whose_session_is_never_named_is_closed(bench):
    dialing = bench.dial()
    bench.until(lambda: bench.listener._early)
    bench.now += EARLY_S - 0.001
    bench.listener.wait(0.0)
    assert bench.listener._early
    bench.now += 0.002
    bench.until(dialing.done)
    assert not bench.listener._early
    with pytest.raises(PeerLost):
        dialing.result()


def test_second_data_connection_that_waits_for_a_session_is_refused(bench):
    first = bench.dial()
    bench.until(lambda: bench.listener._early)
    second = bench.dial()
    bench.until(second.done)
    with pytest.raises(ProtocolError, match="the session of this data connection is unknown"):
        second.result()
    bench.new_peer()
    bench.until(first.done)
    first.result()


def test_only_so_many_data_connections_may_wait(bench, monkeypatch):
    monkeypatch.setattr(part_listener, "EARLY_MAX", 1)
    bench.dial()
    bench.until(lambda: bench.listener._early)
    other = bench.dial(secrets.token_bytes(32))
    bench.until(other.done)
    with pytest.raises(ProtocolError, match="unknown"):
        other.result()
    bench.new_peer()  # the first one gets what it has waited for
    bench.until(lambda: not bench.listener._early)


def test_worker_that_has_given_up_waiting_is_no_error(bench):
    channel = bench.pool.submit(lambda: connect_to_early(bench)).result
    bench.until(lambda: bench.listener._early)
    channel().close()
    peer = bench.new_peer()
    bench.listener.wait(0.0)
    peer.expect(1, spans_of([torch.zeros(4)]))
    found = bench.until(lambda: peer.has_arrived or peer not in bench.listener._data)
    assert found in ([], [peer])


def connect_to_early(bench):
    """Return a data connection that doesn't wait for the answer."""
    from paceline.run.net.handshake import Authenticator, _connect

    return _connect(
        bench.address, Authenticator(bench.address, TOKEN, "data", SESSION), TIMEOUT_S, None
    )


def test_worker_that_takes_this_server_for_the_head_is_refused(bench):
    connecting = bench.pool.submit(connect, bench.address, TOKEN, TIMEOUT_S)
    bench.until(connecting.done)
    channel = connecting.result()
    receiving = bench.pool.submit(channel.receive)
    bench.until(receiving.done)
    assert receiving.result().reason == (
        "this server isn't the head of its run; connect to the head"
    )
    channel.close()


def test_news_of_the_head_end_the_wait(bench):
    bench.head.send(between.CollectPart())
    assert bench.listener.wait(TIMEOUT_S) == []
    assert bench.listener.head.receive() == between.CollectPart()


def test_end_of_a_data_connection_is_news(bench):
    peer = bench.new_peer()
    dialing = bench.dial()
    bench.until(dialing.done)
    dialing.result().close()
    peer.expect(1, spans_of([torch.zeros(4)]))
    assert bench.listener.wait(TIMEOUT_S) == [peer]
    with pytest.raises(PeerLost, match="the data connection was closed"):
        peer.take_arrived()
    bench.listener.close_peer(peer)
    assert bench.listener.wait(0.0) == []


def test_loss_that_is_noticed_while_sending_is_news(bench):
    peer = bench.new_peer()
    dialing = bench.dial()
    bench.until(dialing.done)
    bench.until(lambda: peer in bench.listener._data)
    dialing.result().close()
    found = []
    number = 0
    while not found:
        number += 1
        peer.send(number, spans_of([torch.ones(1 << 16)]))
        found = bench.listener.wait(0.0)
    assert found == [peer]


def test_peer_that_was_closed_is_not_waited_for(bench):
    peer = bench.new_peer()
    bench.listener.close_peer(peer)
    bench.dial()
    bench.until(lambda: bench.listener._early)
    assert peer not in bench.listener._data
    bench.new_peer()  # another worker's session may have come late, too
    bench.until(lambda: not bench.listener._early)
