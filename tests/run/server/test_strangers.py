# SPDX-License-Identifier: BSD-3-Clause
"""Strangers have little memory, little time, and a small share of the server's processor time."""

import errno
import select
import socket
from itertools import count

import pytest

from paceline.errors import PeerLost
from paceline.run.net import messages
from paceline.run.net.address import listen
from paceline.run.net.channel import MEMBER_LIMIT, Channel
from paceline.run.net.tls import client_context, server_context, wrap_client
from paceline.run.server import strangers as strangers_module
from paceline.run.server.refusals import Refusals
from paceline.run.server.strangers import RESUMES_S, SAVED_S, SHARE, STRANGER_TIMEOUT_S, Strangers
from server_harness import TOKEN
from strangers import prove

HELLO = messages.Hello(messages.PROTOCOL, bytes(32))
TIMEOUT_S = 20.0


class Bench:
    """Strangers on loopback, with clocks that stand still unless a test moves them."""

    def __init__(self, files=None):
        self.now = 100.0
        self.processor_s = 0.0
        self.printed = []
        self.listening = listen("tcp:127.0.0.1:0")
        self.strangers = Strangers(
            [self.listening],
            TOKEN,
            Refusals(self.printed.append),
            lambda: self.now,
            files and server_context(files),
            lambda: self.processor_s,
        )
        self.tls = files and client_context(files)
        self.clients = []

    def connect(self, *, tls=False):
        """Return a client, which the server hasn't accepted yet."""
        sock = socket.create_connection(self.listening.getsockname(), TIMEOUT_S)
        if tls:
            sock.setblocking(False)
            sock = wrap_client(sock, self.tls, "127.0.0.1")
        self.clients.append(Channel(sock, messages.decode_server, MEMBER_LIMIT))
        return self.clients[-1]

    def serve(self):
        """Serve what has happened; return what is authenticated now."""
        assert select.select([self.strangers], [], [], TIMEOUT_S)[0]
        return self.strangers.serve()

    def is_ready(self):
        return bool(select.select([self.strangers], [], [], 0)[0])

    def received(self, client):
        """Return what a client receives before the server hangs up, which it has done."""
        client._sock.settimeout(TIMEOUT_S)
        found = []
        try:
            while True:
                found.append(client.receive())
        except PeerLost:
            return found

    def close(self):
        self.strangers.close()
        for client in self.clients:
            client.close()


@pytest.fixture
def bench():
    one = Bench()
    yield one
    one.close()


@pytest.fixture
def tls_bench(tls_files):
    one = Bench(tls_files)
    yield one
    one.close()


def test_many_are_accepted_at_a_time_but_not_all_at_once(bench):
    for _ in range(strangers_module.EVENTS_MAX + 3):
        bench.connect()
    assert bench.serve() == []
    assert len(bench.strangers) == strangers_module.EVENTS_MAX
    bench.serve()
    assert len(bench.strangers) == strangers_module.EVENTS_MAX + 3
    assert not bench.is_ready()


def test_a_few_are_served_at_a_time_and_each_gets_its_turn(bench, monkeypatch):
    clients = [bench.connect() for _ in range(5)]
    bench.serve()
    for client in clients:
        client.send(HELLO)
    monkeypatch.setattr(strangers_module, "EVENTS_MAX", 2)
    for answered in (2, 4, 5):
        bench.serve()
        assert sum(client.wait_readable(0.0) for client in clients) == answered


def test_authenticated_one_is_handed_over_with_its_session(bench):
    client = bench.connect()
    bench.serve()
    client.send(HELLO)
    bench.serve()
    challenge = client.receive()
    client.send(prove(TOKEN, challenge))
    [found] = bench.serve()
    assert found.session == challenge.nonce
    assert (found.kind, found.of_session) == ("control", b"")
    assert len(bench.strangers) == 0
    found.channel.close()


def test_strangers_that_used_up_their_processor_time_wait(bench):
    assert bench.strangers.pause_s() == 0
    times = iter([0.0, SAVED_S + 0.001])
    bench.strangers._processor_time = lambda: next(times)
    bench.connect()
    bench.serve()
    pause_s = bench.strangers.pause_s()
    assert pause_s == pytest.approx((0.001 + RESUMES_S) / SHARE)
    bench.now += pause_s / 2
    assert bench.strangers.pause_s() == pytest.approx(pause_s / 2)
    bench.now += pause_s
    assert bench.strangers.pause_s() == 0


def test_strangers_use_their_share_of_the_processor_in_the_long_run(bench):
    """However much there is to do, they get a share of the time, plus what was saved."""
    ticks = count()
    bench.strangers._processor_time = lambda: next(ticks) * 0.001  # a millisecond for each turn
    began, turns = bench.now, 0
    while bench.now < began + 1000:
        pause_s = bench.strangers.pause_s()
        if pause_s:
            bench.now += pause_s
        else:
            bench.strangers.serve()
            turns += 1
    assert turns * 0.001 == pytest.approx(SAVED_S + SHARE * 1000, rel=0.05)


def test_time_that_was_used_for_a_worker_is_given_back(bench):
    ticks = count()
    bench.strangers._processor_time = lambda: next(ticks) * 0.001
    client = bench.connect()
    bench.serve()
    client.send(HELLO)
    bench.serve()
    client.send(prove(TOKEN, client.receive()))
    before = bench.strangers._saved_s
    [found] = bench.serve()
    # This turn took three ticks; one is given back for it, and one for the turn before.
    assert bench.strangers._saved_s == pytest.approx(before - 0.003 + 0.002)
    found.channel.close()


def test_time_that_is_saved_has_a_limit(bench):
    bench.now += 1e6
    bench.strangers.serve()
    assert bench.strangers._saved_s == SAVED_S


def test_slow_one_is_closed_although_nothing_happens(bench):
    client = bench.connect()
    bench.serve()
    assert bench.strangers.due_s() == STRANGER_TIMEOUT_S
    bench.now += STRANGER_TIMEOUT_S + 1
    assert bench.strangers.due_s() == 0
    bench.strangers.serve()
    assert bench.received(client) == [messages.Refused("it took too long to authenticate")]
    assert bench.strangers.due_s() is None


def test_one_that_sends_a_byte_at_a_time_is_closed_as_well(bench):
    client = bench.connect()
    bench.serve()
    for byte in b"\x25\x00\x00\x00\x93":
        client._sock.send(bytes([byte]))
        bench.serve()
        bench.now += STRANGER_TIMEOUT_S / 4
    bench.strangers.serve()
    assert bench.received(client) == [messages.Refused("it took too long to authenticate")]


def test_out_of_descriptors_the_oldest_stranger_makes_room(bench, monkeypatch):
    oldest = bench.connect()
    bench.serve()
    bench.connect()
    with monkeypatch.context() as patched:
        patched.setattr(strangers_module, "accept", out_of_descriptors)
        bench.serve()
    assert bench.received(oldest) == []
    bench.serve()
    assert len(bench.strangers) == 1


def test_out_of_descriptors_accepting_pauses_instead_of_spinning(bench, monkeypatch):
    bench.connect()
    with monkeypatch.context() as patched:
        patched.setattr(strangers_module, "accept", out_of_descriptors)
        bench.serve()
    assert not bench.is_ready()
    assert bench.strangers.due_s() == strangers_module.PAUSE_S
    bench.now += strangers_module.PAUSE_S
    bench.strangers.serve()
    assert bench.strangers.due_s() == STRANGER_TIMEOUT_S
    assert len(bench.strangers) == 1


def out_of_descriptors(listening):
    del listening
    raise OSError(errno.EMFILE, "Too many open files")


# ------------------------------------------------------------------------------------------ TLS


def test_tls_has_no_memory_before_the_first_byte(tls_bench):
    tls_bench.connect()
    tls_bench.serve()
    [stranger] = tls_bench.strangers._strangers.values()
    assert type(stranger.sock) is socket.socket


def test_garbage_is_refused_before_tls_begins(tls_bench):
    client = tls_bench.connect()
    client._sock.send(b"\xfe" * 100)
    tls_bench.serve()
    tls_bench.serve()
    assert "this server uses TLS" in tls_bench.printed[0]
    assert len(tls_bench.strangers) == 0


def test_garbage_inside_tls_is_refused(tls_bench):
    client = tls_bench.connect()
    client._sock.send(b"\x16\x03\x01\x00\x10" + b"\xfe" * 16)
    tls_bench.serve()
    tls_bench.serve()
    assert tls_bench.printed[0].startswith("refused a connection: TLS failed: ")
    assert len(tls_bench.strangers) == 0


def test_client_that_never_finishes_tls_is_closed_as_slow(tls_bench):
    client = tls_bench.connect(tls=True)
    client.send(HELLO)  # only begins the handshake
    tls_bench.serve()
    tls_bench.serve()
    assert not tls_bench.is_ready()
    tls_bench.now += STRANGER_TIMEOUT_S + 1
    tls_bench.strangers.serve()
    assert len(tls_bench.strangers) == 0


def test_handshake_inside_tls_never_blocks(tls_bench):
    client = tls_bench.connect(tls=True)
    client.send(HELLO)
    found, proved = [], False
    while not found:
        if tls_bench.is_ready():
            found = tls_bench.strangers.serve()
        client.flush()
        for message in client.receive_nowait():
            assert not proved
            client.send(prove(TOKEN, message))
            proved = True
    found[0].channel.close()
