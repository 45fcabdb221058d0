# SPDX-License-Identifier: BSD-3-Clause
"""Requests of a worker to a scripted server, and what may arrive before the answer."""

import pytest

from paceline.errors import PeerLost, ProtocolError
from paceline.leases import Use
from paceline.run.net import messages
from paceline.run.worker import worker as worker_module
from paceline.run.worker.states import Turn
from scripted_server import ACCEPTED, ScriptedServer


@pytest.fixture
def server(monkeypatch):
    """A server with a worker that polls whenever it may."""
    monkeypatch.setattr(worker_module, "POLL_S", -1.0)
    server = ScriptedServer()
    server.begin()
    return server


def types(server):
    return [type(message) for message in server.received]


# ------------------------------------------------------------------------------------------- leases


def test_lease_is_answered_with_a_batch_and_the_epochs(server):
    server.on_request = [lambda: server.send_lease(7, (2,))]
    assert server.worker.requests.lease(0) == (7, (2,))
    assert server.received == [messages.LeaseRequest(0)]


def test_cancellation_that_arrives_before_a_lease_counts(server):
    server.on_request = [lambda: (server.cancel(1), server.send_lease(7))]
    assert server.worker.requests.lease(0) == (7, (0,))
    assert server.worker._state.turn is Turn.CANCELLED


@pytest.mark.parametrize("answers", [True, False])
def test_there_is_no_lease_after_the_end_of_the_run(server, answers):
    """The server may answer before it leaves, or not."""
    server.on_request = [
        lambda: (server.end(3), server.send_lease(7) if answers else server.die()),
    ]
    assert server.worker.requests.lease(0) is None
    assert server.worker.is_over


def test_lease_is_requested_again_from_the_next_server(server):
    server.on_request = [server.die, lambda: server.send_lease(9, (4,))]
    assert server.worker.requests.lease(0) == (9, (4,))
    assert types(server) == [messages.LeaseRequest, messages.Join, messages.LeaseRequest]
    assert server.worker._state.turn is Turn.VOID


def test_next_servers_assignment_may_arrive_before_its_lease(server):
    server.on_join = [lambda: server.assign(1, 6)]
    server.on_request = [server.die, lambda: server.send_lease(9)]
    assert server.worker.requests.lease(0) == (9, (0,))
    assert server.worker.version == 0
    server.step()  # closes the void turn
    assert (server.reports(), server.worker.version) == ([], 6)


def test_unexpected_answer_to_a_lease_request_is_a_protocol_error(server):
    server.on_request = [server.send_reply]
    with pytest.raises(ProtocolError, match="expected the answer to a request, got StateReply"):
        server.worker.requests.lease(0)


def test_batches_are_returned_without_an_answer(server):
    server.worker.requests.return_batches(Use(0, (3, 4)), skipped=True)
    server.worker.requests.return_batches(Use(0, (5,)), skipped=False)
    assert server.received == [
        messages.BatchesReturned(Use(0, (3, 4)), True),
        messages.BatchesReturned(Use(0, (5,)), False),
    ]


def test_batches_cannot_be_returned_to_a_lost_server(server):
    server.die()
    server.worker.requests.return_batches(Use(0, (3,)), skipped=False)
    server.on_join = [lambda: server.assign(1, 2)]
    server.step()
    assert server.worker.version == 2


# ------------------------------------------------------------------------------------------- states


def test_state_and_average_are_requested(server):
    server.on_request = [lambda: server.send_state({"step": 3}), lambda: server.send_state([])]
    assert server.worker.requests.optimizer_state(0) == {"step": 3}
    assert server.worker.requests.averages() == []
    assert server.received == [
        messages.StateRequest("optimizer", 0),
        messages.StateRequest("average"),
    ]


def test_loaded_state_is_confirmed(server):
    server.send_reply()
    server.worker.requests.load_optimizer_state(0, {"state": {}}, has_begun=False)
    assert server.worker._state.turn is Turn.COMPUTING


def test_server_that_is_lost_after_the_end_is_an_error(server):
    server.on_report = [lambda: server.end(1, ACCEPTED)]
    server.step()
    server.die()
    with pytest.raises(PeerLost, match="lost the server"):
        server.worker.requests.optimizer_state(0)


def test_stop_is_requested(server):
    server.on_request = [lambda: (server.end(2), server.send_reply())]
    server.worker.requests.stop()
    assert server.worker.is_over
