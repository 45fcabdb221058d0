# SPDX-License-Identifier: BSD-3-Clause
"""Data connections are watched for what their peers can do, and for nothing else."""

import selectors
import socket

import pytest
import torch

from paceline.run.net.data_peer import PartPeer
from paceline.run.net.data_socket import DataSocket, send_payloads
from paceline.run.net.payload_stream import PayloadSender
from paceline.run.net.tcp import spans_of
from paceline.run.server.data_connections import DataConnections, DataKey

READ, WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE


class Bench:
    """A server's data connection in a selector, and its other end."""

    def __init__(self):
        self.selector = selectors.DefaultSelector()
        self.connections = DataConnections(self.selector)
        mine, theirs = socket.socketpair()
        self.data, self.worker = DataSocket(mine), DataSocket(theirs)
        self.peer = PartPeer("exact", "exact")
        self.connections.add(self.peer, self.data)

    def watched(self):
        """Return the events that the selector reports after an update."""
        self.connections.update()
        return sum(key.events for key in self.selector.get_map().values())

    def move(self):
        """Move what the selector reports; return the peers."""
        self.connections.update()
        found = []
        for key, events in self.selector.select(0):
            assert isinstance(key.data, DataKey)
            found.append(self.connections.move(key.data, events))
        return found

    def close(self):
        self.selector.close()
        self.peer.close()
        self.worker.close()


@pytest.fixture
def bench():
    bench = Bench()
    yield bench
    bench.close()


def send(bench, number, tensor):
    sender = PayloadSender()
    sender.add(number, spans_of([tensor]))
    send_payloads(bench.worker, sender)


def test_idle_connection_is_not_watched(bench):
    assert bench.watched() == 0
    send(bench, 1, torch.ones(4))
    assert bench.move() == []


def test_connection_is_read_while_a_payload_is_expected(bench):
    send(bench, 1, torch.ones(4))
    bench.peer.expect(1, spans_of([torch.zeros(4)]))
    assert bench.watched() == READ
    assert bench.move() == [bench.peer]
    assert bench.peer.take_arrived() == [1]
    assert bench.watched() == 0


def test_connection_is_written_while_something_is_unsent(bench):
    large = torch.zeros(4 << 20)
    bench.peer.send(1, spans_of([large]))
    assert bench.watched() == WRITE
    bench.peer.expect(1, spans_of([torch.zeros(4)]))
    assert bench.watched() == READ | WRITE
    while bench.peer.has_unsent:
        bench.move()
        bench.worker.receive_into(memoryview(bytearray(1 << 20)))
    assert bench.watched() == READ


def test_version_that_was_sent_before_the_connection_was_added_is_watched_for(bench):
    early = PartPeer("exact", "exact")
    early.send(1, spans_of([torch.zeros(4)]))
    mine, theirs = socket.socketpair()
    bench.connections.add(early, DataSocket(mine))
    assert bench.move() == [early]
    assert not early.has_unsent
    bench.connections.remove(early)
    early.close()
    theirs.close()


def test_update_returns_the_peers_that_have_changed(bench):
    bench.connections.update()
    assert bench.connections.update() == []
    bench.peer.expect(1, spans_of([torch.zeros(4)]))
    assert bench.connections.update() == [bench.peer]


def test_removed_connection_is_forgotten(bench):
    bench.peer.expect(1, spans_of([torch.zeros(4)]))
    assert bench.watched() == READ
    assert bench.peer in bench.connections
    assert bench.connections.descriptor(bench.peer) == bench.data.fileno()
    bench.connections.remove(bench.peer)
    assert bench.connections.peers == []
    assert bench.watched() == 0
    bench.peer.skip(1)  # says that it has changed
    assert bench.connections.update() == []
    bench.connections.remove(bench.peer)  # it may be closed for several reasons


def test_connection_that_was_closed_can_be_removed(bench):
    bench.peer.expect(1, spans_of([torch.zeros(4)]))
    bench.connections.update()
    bench.peer.close()
    bench.connections.remove(bench.peer)
    assert bench.peer not in bench.connections


class Hoarding(DataSocket):
    """A connection that holds bytes which a selector doesn't know about, as TLS does."""

    holds = False

    def has_unread(self):
        return self.holds


def test_bytes_that_the_connection_holds_are_moved_without_the_selector(bench):
    mine, theirs = socket.socketpair()
    data, peer = Hoarding(mine), PartPeer("exact", "exact")
    bench.connections.add(peer, data)
    data.holds = True
    bench.connections.update()
    assert not bench.connections.has_unread  # nobody can take them yet
    peer.expect(1, spans_of([torch.zeros(4)]))
    bench.connections.update()
    assert bench.connections.has_unread
    data.holds = False
    assert bench.connections.move_unread() == [peer]
    assert not bench.connections.has_unread
    bench.connections.remove(peer)
    peer.close()
    theirs.close()
