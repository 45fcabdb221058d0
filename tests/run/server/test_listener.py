# SPDX-License-Identifier: BSD-3-Clause
"""The listener returns authenticated peers that have news, and no other connection."""

import gc
import os
import secrets
import signal
import weakref
from time import monotonic

import pytest

from paceline.errors import PeerLost
from paceline.run.net import messages
from paceline.run.net.address import listen
from paceline.run.server import strangers as strangers_module
from paceline.run.server.listener import Listener
from paceline.run.server.strangers import STRANGERS_MAX
from paceline.run.system import System
from server_harness import TOKEN
from strangers import RawPeer, prove

HELLO = messages.Hello(messages.PROTOCOL, bytes(32))


class Peer:
    """A fake transport end of a connection."""

    def __init__(self, channel):
        self.channel = channel


class Bench:
    """A listener, and clients in the same thread."""

    def __init__(self):
        self.address = f"unix:@paceline-test-{secrets.token_hex(8)}"
        self.printed = []
        self.listener = Listener([listen(self.address)], TOKEN, Peer, self.printed.append)
        self.clients = []

    def connect(self):
        """Return a client that has sent nothing yet."""
        self.clients.append(RawPeer(self.address))
        assert self.listener.wait(1.0) == []  # the listener accepts it
        return self.clients[-1]

    def authenticate(self):
        """Return an authenticated client and its peer."""
        client = self.connect().send(HELLO)
        assert self.listener.wait(1.0) == []
        client.send(prove(TOKEN, client.receive()))
        [peer] = self.listener.wait(1.0)
        return client, peer

    def close(self):
        self.listener.shut_down()
        for client in self.clients:
            client.close()


@pytest.fixture
def bench():
    one = Bench()
    yield one
    one.close()


def test_peer_is_returned_once_it_is_authenticated(bench):
    client, peer = bench.authenticate()
    assert isinstance(peer, Peer)
    assert list(peer.channel.receive_nowait()) == []
    client.send(messages.AbandonReport(1, 0.5))
    assert bench.listener.wait(1.0) == [peer]
    assert list(peer.channel.receive_nowait()) == [messages.AbandonReport(1, 0.5)]
    assert bench.listener.wait(0.0) == []


def test_messages_right_after_the_proof_are_not_lost(bench):
    client = bench.connect().send(HELLO)
    bench.listener.wait(1.0)
    client.send(prove(TOKEN, client.receive()), messages.AbandonReport(1, 0.5))
    [peer] = bench.listener.wait(1.0)
    assert list(peer.channel.receive_nowait()) == [messages.AbandonReport(1, 0.5)]


def test_wrong_token_is_refused_with_a_reason(bench):
    client = bench.connect().send(HELLO)
    bench.listener.wait(1.0)
    client.send(prove("another token", client.receive()))
    assert bench.listener.wait(1.0) == []
    assert client.wait_closed() == "the token is wrong"
    assert bench.printed == ["refused a connection: the token is wrong"]


def test_all_peers_with_news_are_returned(bench):
    pairs = [bench.authenticate() for _ in range(3)]
    for client, _ in pairs[1:]:
        client.send(messages.AbandonReport(1, 0.5))
    assert set(bench.listener.wait(1.0)) == {peer for _, peer in pairs[1:]}


def test_end_of_a_connection_is_news(bench):
    client, peer = bench.authenticate()
    client.close()
    assert bench.listener.wait(1.0) == [peer]
    with pytest.raises(PeerLost):
        list(peer.channel.receive_nowait())


def test_wait_returns_after_its_timeout(bench):
    began = monotonic()
    assert bench.listener.wait(0.02) == []
    assert monotonic() - began >= 0.02


def test_closed_peer_receives_the_reason_and_is_never_returned_again(bench):
    client, peer = bench.authenticate()
    client.send(messages.AbandonReport(1, 0.5))
    bench.listener.close(peer, "go away")
    assert bench.listener.wait(0.0) == []
    assert client.wait_closed() == "go away"
    bench.listener.close(peer)  # again


def test_silent_connection_is_closed_after_a_timeout(bench):
    client = bench.connect()
    active = bench.connect()
    now = monotonic() + strangers_module.STRANGER_TIMEOUT_S + 1
    bench.listener.system = System(monotonic=lambda: now)
    active.send(HELLO)  # it isn't slow: the server may have been busy
    bench.listener.wait(1.0)
    assert client.wait_closed() == "it took too long to authenticate"
    assert isinstance(active.receive(), messages.Challenge)


def test_authenticated_peer_may_be_silent_for_any_time(bench):
    client, peer = bench.authenticate()
    bench.connect()
    now = monotonic() + 1e6
    bench.listener.system = System(monotonic=lambda: now)
    bench.listener.wait(0.0)
    client.send(messages.AbandonReport(1, 0.5))
    assert bench.listener.wait(1.0) == [peer]


def test_oldest_unauthenticated_connection_is_closed_for_a_new_one(bench, monkeypatch):
    assert STRANGERS_MAX >= 64
    monkeypatch.setattr(strangers_module, "STRANGERS_MAX", 3)
    clients = [bench.connect() for _ in range(5)]
    assert [client.wait_closed() for client in clients[:2]] == ["", ""]
    for client in clients[2:]:
        client.send(HELLO)
    bench.listener.wait(1.0)
    assert all(isinstance(client.receive(), messages.Challenge) for client in clients[2:])


def test_signal_sets_stop_wanted_and_wakes_the_server_up(bench):
    before = signal.getsignal(signal.SIGUSR1)
    try:
        bench.listener.stop_on(signal.SIGUSR1)
        assert not bench.listener.stop_wanted
        os.kill(os.getpid(), signal.SIGUSR1)
        assert bench.listener.wait(20.0) == []
        assert bench.listener.stop_wanted
    finally:
        signal.signal(signal.SIGUSR1, before)


def count_descriptors():
    gc.collect()  # earlier tests may have left mappings, which hold descriptors
    return len(os.listdir("/proc/self/fd"))


def test_shut_down_closes_everything():
    before = count_descriptors()
    bench = Bench()
    client, _ = bench.authenticate()
    silent = bench.connect()
    bench.listener.shut_down()
    assert client.wait_closed() == silent.wait_closed() == ""
    assert count_descriptors() == before
    listen(bench.address).close()  # the address is free


def test_closed_peer_is_freed_without_the_garbage_collector(bench):
    """It holds the worker's slot, which is as large as the model."""
    client, peer = bench.authenticate()
    reference = weakref.ref(peer)
    gc.disable()
    try:
        client.close()
        assert bench.listener.wait(1.0) == [peer]
        bench.listener.close(peer)
        del peer
        assert reference() is None
    finally:
        gc.enable()


def test_flood_of_strangers_prints_a_few_lines(bench):
    for _ in range(100):
        client = bench.connect().send(b"garbage" * 100)
        bench.listener.wait(1.0)
        assert "a frame must have 1 to" in client.wait_closed()
    bench.listener.shut_down()
    bench.listener.shut_down = lambda: None
    assert len(bench.printed) < 20
    assert bench.printed[-1] == "refused 90 more connections"
