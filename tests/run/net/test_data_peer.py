# SPDX-License-Identifier: BSD-3-Clause
"""A server's end of a data connection: what it expects, what has arrived, and how it is lost."""

import socket

import pytest
import torch

from paceline.errors import PeerLost
from paceline.run.net.data_peer import DataPeer, PartPeer
from paceline.run.net.data_socket import DataSocket, receive_payloads, send_payloads
from paceline.run.net.payload_stream import PayloadReceiver, PayloadSender
from paceline.run.net.tcp import spans_of
from paceline.run.net.transport import Moved

HEADER_BYTES = 16
SIZE = 64


class Link:
    """A server's end and a worker's bytes, over a real socket."""

    def __init__(self):
        mine, theirs = socket.socketpair()
        self.peer = PartPeer("exact", "exact")
        self.changes = 0
        self.peer.on_changed = self._count
        self._mine, self.worker = DataSocket(mine), DataSocket(theirs)
        self.sender, self.receiver = PayloadSender(), PayloadReceiver()

    def _count(self):
        self.changes += 1

    def attach(self):
        self.peer.attach(self._mine)
        return self

    def worker_sends(self, number, tensor, *, is_cancelled=False):
        self.sender.add(number, spans_of([tensor]))
        if is_cancelled:
            self.sender.cancel(number)
        send_payloads(self.worker, self.sender)

    def worker_receives(self, number, tensor):
        """Return whether the worker has received this payload, or it was cancelled; None: no."""
        self.receiver.expect(number, spans_of([tensor]))
        found = list(receive_payloads(self.worker, self.receiver))
        return found[0].is_complete if found else None

    def close(self):
        self.peer.close()
        self._mine.close()
        self.worker.close()


@pytest.fixture
def link():
    link = Link()
    yield link
    link.close()


def ones(value=1.0):
    return torch.full((SIZE // 4,), value)


def test_payload_arrives_where_it_is_expected_and_is_reported_once(link):
    link.attach()
    target = torch.zeros(SIZE // 4)
    link.peer.expect(1, spans_of([target]))
    link.worker_sends(1, ones(3.0))
    link.peer.receive_data()
    assert torch.equal(target, ones(3.0))
    assert link.peer.has_arrived
    assert link.peer.take_arrived() == [1]
    assert link.peer.take_arrived() == []
    assert not link.peer.has_arrived
    assert link.peer.take_moved() == Moved(0, HEADER_BYTES + SIZE)
    assert link.peer.take_moved() == Moved()


def test_nothing_is_received_until_the_head_says_where_it_belongs(link):
    link.attach()
    assert not link.peer.is_receiving
    link.peer.expect(1, spans_of([ones()]))
    assert link.peer.is_receiving
    assert link.changes == 1
    link.worker_sends(1, ones())
    link.peer.receive_data()
    assert not link.peer.is_receiving


def test_payload_behind_the_expected_one_waits(link):
    link.attach()
    first, second = torch.zeros(SIZE // 4), torch.zeros(SIZE // 4)
    link.worker_sends(1, ones(1.0))
    link.worker_sends(2, ones(2.0))
    link.peer.expect(1, spans_of([first]))
    link.peer.receive_data()
    assert link.peer.take_arrived() == [1]
    assert torch.equal(second, torch.zeros(SIZE // 4))
    link.peer.expect(2, spans_of([second]))
    link.peer.receive_data()
    assert link.peer.take_arrived() == [2]
    assert (first[0], second[0]) == (1, 2)


def test_skipped_payload_leaves_memory_alone_and_the_next_one_arrives(link):
    link.attach()
    skipped, wanted = torch.zeros(SIZE // 4), torch.zeros(SIZE // 4)
    link.peer.expect(1, spans_of([skipped]))
    link.peer.skip(1)
    link.worker_sends(1, ones(1.0))
    link.worker_sends(2, ones(2.0))
    link.peer.expect(2, spans_of([wanted]))
    link.peer.receive_data()
    assert link.peer.take_arrived() == [2]
    assert torch.equal(skipped, torch.zeros(SIZE // 4))
    assert torch.equal(wanted, ones(2.0))


def test_payload_that_is_skipped_after_it_has_arrived_is_not_reported(link):
    link.attach()
    link.peer.expect(1, spans_of([ones()]))
    link.worker_sends(1, ones())
    link.peer.receive_data()
    link.peer.skip(1)
    assert not link.peer.has_arrived
    assert link.peer.take_arrived() == []


def test_version_that_is_sent_before_the_worker_has_connected_follows_then(link):
    link.peer.send(1, spans_of([ones(5.0)]))
    assert link.peer.has_unsent
    link.attach()
    link.peer.send_data()
    assert not link.peer.has_unsent
    received = torch.zeros(SIZE // 4)
    assert link.worker_receives(1, received) is True
    assert torch.equal(received, ones(5.0))


def test_version_that_was_stopped_is_cut_short(link):
    link.peer.send(1, spans_of([ones()]))
    link.peer.stop(1)
    link.attach()
    link.peer.send_data()
    assert link.worker_receives(1, torch.zeros(SIZE // 4)) is False


def test_loss_is_raised_after_what_has_arrived_was_taken(link):
    link.attach()
    link.peer.expect(1, spans_of([ones()]))
    link.worker_sends(1, ones())
    link.peer.receive_data()
    link.worker.close()
    link.peer.expect(2, spans_of([ones()]))
    link.peer.receive_data()
    assert link.peer.take_arrived() == [1]
    assert link.peer.has_arrived
    with pytest.raises(PeerLost, match="the data connection was closed"):
        link.peer.take_arrived()


def test_loss_that_is_noticed_while_sending_is_news(link):
    link.attach()
    link.worker.close()
    link.peer.send(1, spans_of([ones()]))
    assert link.changes == 1
    assert not link.peer.has_unsent
    with pytest.raises(PeerLost, match="the data connection broke"):
        link.peer.take_arrived()


def test_worker_may_not_cancel_what_the_server_wants(link):
    link.attach()
    link.peer.expect(1, spans_of([ones()]))
    link.worker_sends(1, ones(), is_cancelled=True)
    link.peer.receive_data()
    with pytest.raises(PeerLost, match="cancelled payload 1, which the server wants"):
        link.peer.take_arrived()


def test_agent_may_cancel_a_sum(link):
    """It tells the head why, so nothing has arrived, and nothing is lost."""
    link.peer = PartPeer("exact", "exact", is_agent=True)
    link.attach()
    link.peer.expect(1, spans_of([ones()]))
    link.worker_sends(1, ones(), is_cancelled=True)
    link.peer.receive_data()
    assert link.peer.take_arrived() == []
    link.peer.expect(2, spans_of([ones()]))
    link.worker_sends(2, ones())
    link.peer.receive_data()
    assert link.peer.take_arrived() == [2]


def test_payload_of_another_number_is_a_loss(link):
    link.attach()
    link.peer.expect(1, spans_of([ones()]))
    link.worker_sends(7, ones())
    link.peer.receive_data()
    with pytest.raises(PeerLost, match="payload 7 with a chunk of 64 bytes wasn't expected"):
        link.peer.take_arrived()


def test_peer_without_a_connection_can_be_closed():
    DataPeer().close()
