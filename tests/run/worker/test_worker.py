# SPDX-License-Identifier: BSD-3-Clause
"""A real worker against a scripted server."""

import pytest
import torch

from paceline.core.events import Fate
from paceline.errors import PeerLost, ProtocolError
from paceline.leases import Use
from paceline.run.net import messages
from paceline.run.worker import worker as worker_module
from paceline.run.worker.batches import Batch
from paceline.run.worker.extra_steps import LoopEnded
from paceline.run.worker.position import Bookmark, Position, decode_position, encode_position
from paceline.run.worker.states import Connection, Turn
from scripted_server import ACCEPTED, ScriptedServer


@pytest.fixture
def server(monkeypatch):
    """A server with a worker that polls whenever it may."""
    monkeypatch.setattr(worker_module, "POLL_S", -1.0)
    return ScriptedServer()


def turn_of(server):
    return server.worker._state.turn


# ------------------------------------------------------------------------------------- one gradient


def test_gradient_is_reported_and_the_next_version_loaded(server):
    server.begin()
    server.on_report = [lambda: server.assign(2, 1, ACCEPTED)]
    server.step()
    [report] = server.reports()
    assert (report.turn, report.version, report.samples, report.cancelled) == (1, 0, 1, False)
    gradients = [p.grad for p in server.model.parameters()]
    torch.testing.assert_close(server._slot.parameters[0], gradients)
    assert report.sq_norm == pytest.approx(float(sum(g.square().sum() for g in gradients)))
    worker = server.worker
    assert (worker.version, worker.last.fate, worker.last.contributors) == (1, Fate.ACCEPTED, 1)
    assert turn_of(server) is Turn.COMPUTING


def test_cancellation_of_an_older_turn_is_ignored(server):
    server.begin(turn=2)
    server.cancel(1)
    server.on_report = [lambda: server.assign(3, 1, ACCEPTED)]
    server.step()
    assert not server.reports()[0].cancelled


def test_complete_gradient_of_a_cancelled_turn_is_reported_as_cancelled(server):
    server.begin()
    server.cancel(1)
    notice = messages.FateNotice(Fate.LATE, 0, 1, 0)
    server.on_report = [lambda: server.assign(2, 1, notice)]
    server.step()
    [report] = server.reports()
    assert report.cancelled
    assert report.sq_norm is None
    assert (server.worker.last.fate, server.worker.last.staleness) == (Fate.LATE, 1)


def test_cancelled_backward_pass_is_cut_and_abandoned(server):
    server.begin()
    server.optimizer.zero_grad()
    loss = server.loss(hook=lambda: server.cancel(1))
    server.worker.backward(loss)
    assert turn_of(server) is Turn.CUT
    assert not server.model[0].weight.grad.any(), "its gradient was never computed"
    server.on_report = [lambda: server.assign(2, 1)]
    server.worker.push(0)
    assert isinstance(server.reports()[0], messages.AbandonReport)
    assert turn_of(server) is Turn.COMPUTING


def test_plain_backward_pass_of_a_cancelled_turn_is_not_cut(server):
    server.begin()
    server.loss(hook=lambda: server.cancel(1)).backward()
    assert server.model[0].weight.grad.any()
    server.on_report = [lambda: server.assign(2, 1)]
    server.worker.push(0)
    assert isinstance(server.reports()[0], messages.GradientReport)


def test_backward_pass_after_the_cancellation_is_skipped(server):
    server.begin()
    server.cancel(1)
    server.worker.backward(server.loss())
    assert all(not p.grad.any() for p in server.model.parameters())
    server.on_report = [lambda: server.assign(2, 1)]
    server.worker.push(0)
    assert isinstance(server.reports()[0], messages.AbandonReport)


def test_nested_backward_pass_is_cut_with_the_outer_one(server):
    server.begin()

    def nested():
        server.cancel(1)
        with torch.enable_grad():
            server.worker.backward(server.loss())

    server.worker.backward(server.loss(hook=nested))
    assert turn_of(server) is Turn.CUT


def test_answer_before_the_report_is_a_protocol_error(server):
    server.begin()
    server.assign(2, 1)
    with pytest.raises(ProtocolError, match="expected no answer before a report"):
        server.step()


# ------------------------------------------------------------------------------------------ batches


def test_report_names_the_batches_that_the_gradient_was_computed_on(server):
    server.begin(leases=(Use(0, (7, 8)),), stream_samples=(2,))
    assert server.worker.leases.done == (2,)
    number = server.worker.leases.take(0)
    server.worker.batches.take(0, Batch("x", 4, number=number))
    server.on_report = [lambda: server.assign(2, 1, ACCEPTED, stream_samples=(3,))]
    server.step()
    [report] = server.reports()
    assert (report.uses, report.samples, report.new_samples) == ((Use(0, (7,)),), 4, 4)
    assert report.pulled == (1,)
    assert server.worker.leases.done == (3,)
    assert server.worker.leases.take(0) == 8


def test_abandoned_turn_hands_in_the_leases_that_were_used_up(server):
    server.begin(leases=(Use(0, (7, 8)),))
    server.worker.leases.take(0)
    server.cancel(1)
    server.worker.backward(server.loss())
    server.on_report = [lambda: server.assign(2, 1)]
    server.worker.push(0)
    assert server.reports()[0].pulled == (1,)


def test_gradient_on_batches_that_were_given_to_others_names_none(server):
    """The worker was stopped, and the server has assigned another turn since."""
    server.begin(leases=(Use(0, (7, 8)),))
    server.worker.batches.take(0, Batch("x", 4, number=server.worker.leases.take(0)))
    server.on_report = [
        lambda: server.assign(2, 1, leases=(Use(0, (9,)),), forget_leases=True),
        lambda: server.assign(3, 2, ACCEPTED),
    ]
    server.step()
    server.step()
    assert [report.uses for report in server.reports()] == [(Use(0, (7,)),), (Use(0),)]
    assert server.worker.leases.take(0) == 9


def test_leases_of_a_lost_server_are_void(server):
    server.begin(leases=(Use(0, (7, 8)),))
    server.die()
    server.on_join = [lambda: server.assign(1, 0, leases=(Use(0, (3,)),))]
    server.step()
    assert server.worker.leases.generation == 2  # it has joined twice
    assert server.worker.leases.take(0) == 3


# ------------------------------------------------------------------------------------ the run's end


def test_end_during_a_turn_cancels_it(server):
    server.begin()
    server.end(version=3)
    server.step()
    assert server.reports()[0].cancelled
    worker = server.worker
    assert (worker.is_over, worker.version, worker.last.fate) == (True, 3, Fate.LATE)
    assert worker.last.staleness == 3


def test_end_while_the_worker_waits_includes_the_fate_of_its_gradient(server):
    server.begin()
    server.on_report = [lambda: server.end(version=1, notice=ACCEPTED)]
    server.step()
    assert (server.worker.is_over, server.worker.last.fate) == (True, Fate.ACCEPTED)


def test_server_that_leaves_after_the_end_does_not_matter(server):
    server.begin()
    server.end(version=1)
    server.die()
    server.step()
    assert server.worker.is_over


def test_after_the_end_steps_do_nothing_and_parameters_may_change(server):
    server.begin()
    server.on_report = [server.end]
    server.step()
    before = server._buffer.views.parameters[0][0].clone()
    with torch.no_grad():
        server.model[0].weight.add_(1.0)
    server.received.clear()
    server.worker.backward(server.loss())
    server.worker.push(0)
    assert server.received == []
    assert torch.equal(server._buffer.views.parameters[0][0], before), "the server's are untouched"


# ------------------------------------------------------------------------------------ a lost server


def test_turn_of_a_lost_server_is_not_reported_to_the_next_one(server):
    server.begin()
    server.die()
    server.on_join = [lambda: server.assign(1, 0)]
    server.step()
    assert server.reports() == []
    assert server.worker.last.fate is Fate.LATE
    assert turn_of(server) is Turn.COMPUTING


def test_waiting_worker_rejoins_and_continues(server):
    server.begin()
    server.on_report = [server.die]
    server.on_join = [lambda: server.assign(1, 7)]
    server.step()
    assert server.worker.version == 7
    assert server.worker.last.fate is Fate.LATE
    server.on_report = [lambda: server.assign(2, 8, ACCEPTED)]
    server.step()
    assert (len(server.reports()), server.worker.last.fate) == (2, Fate.ACCEPTED)


def test_numbers_that_were_logged_before_the_server_was_lost_are_not_sent_to_the_next_one(server):
    server.begin(version=7)
    server.on_report = [server.die]
    server.on_join = [lambda: server.assign(1, version=3)]
    server.worker.log({"loss": 7.0})
    server.step()  # the server dies while the worker waits
    server.worker.log({"loss": 7.5})  # as a script does after its step
    server.on_report = [lambda: server.assign(2, version=4, notice=ACCEPTED)]
    server.step()
    server.worker.log({"loss": 3.5})
    server.on_report = [server.end]
    server.step()
    assert [report.scalars for report in server.reports()] == [{"loss": 7.0}, {}, {"loss": 3.5}]


def test_numbers_of_a_void_turn_are_not_sent(server):
    """The server was lost, and the worker has joined the next one, before its step."""
    server.begin()
    server.die()
    server.on_join = [lambda: None]
    server.on_request = [lambda: (server.send_state({}), server.assign(1, version=3))]
    server.worker.requests.optimizer_state(0)
    server.loss().backward()
    server.worker.log({"loss": 7.0})
    server.worker.push(0)
    server.on_report = [server.end]
    server.step()
    assert [report.scalars for report in server.reports()] == [{}]


def test_worker_rejoins_as_often_as_servers_are_lost(server):
    server.begin()
    server.on_report = [server.die]
    server.on_join = [server.die, server.die, lambda: server.assign(1, 4)]
    server.step()
    assert server.worker.version == 4
    assert [type(message) for message in server.received].count(messages.Join) == 3


def test_run_may_end_with_the_next_server(server):
    server.begin()
    server.die()
    server.on_join = [lambda: server.end(version=5)]
    server.step()
    assert (server.worker.is_over, server.worker.version) == (True, 5)


def test_worker_moves_to_the_position_that_the_next_server_knows(server):
    stream = FakeStream()
    server.worker.position.add(stream)
    server.begin()
    randomness = decode_position(server.worker.position.encode()).randomness
    position = encode_position(Position((Bookmark(2, 5),), randomness))
    server.welcome = messages.Welcome(2, "", 0, True, True, True, position)
    server.die()
    server.on_join = [lambda: server.assign(1, 0)]
    server.step()
    assert stream.at == Bookmark(2, 5)


class FakeStream:
    """A stream that only knows its position."""

    at = Bookmark(0, 0)
    can_go_back = True

    def bookmark(self):
        return self.at

    def move_to(self, bookmark, before_first):
        self.at = bookmark


# ----------------------------------------------------------------------------- states on the server


def test_state_request_does_not_affect_the_current_turn(server):
    server.begin()
    server.on_request = [lambda: server.send_state({"step": 3})]
    assert server.worker.optimizer_state(0) == {"step": 3}
    server.on_report = [lambda: server.assign(2, 1, ACCEPTED)]
    server.step()
    assert not server.reports()[0].cancelled


def test_cancellation_that_arrives_before_a_state_counts(server):
    server.begin()

    def answer():
        server.cancel(1)
        server.send_state([])

    server.on_request = [answer]
    server.worker.requests.averages()
    assert turn_of(server) is Turn.CANCELLED


def test_state_is_requested_again_from_the_next_server(server):
    server.begin()
    server.on_request = [server.die, lambda: server.send_state({"step": 4})]
    assert server.worker.optimizer_state(0) == {"step": 4}
    assert turn_of(server) is Turn.VOID
    server.on_join = []
    server.assign(1, 6)
    server.step()
    assert server.reports() == []
    assert server.worker.version == 6


@pytest.mark.parametrize("is_before_the_state", [True, False])
def test_next_servers_assignment_waits_until_the_void_turn_is_closed(server, is_before_the_state):
    """It may arrive before the state, or in the backward pass of the void turn."""
    server.begin()
    server.on_request = [server.die, lambda: server.send_state({})]
    if is_before_the_state:
        server.on_join = [lambda: server.assign(1, 6)]
    server.worker.optimizer_state(0)
    if not is_before_the_state:
        server.assign(1, 6)
    server.worker.backward(server.loss())
    assert (turn_of(server), server.worker.version) == (Turn.VOID, 0)
    server.worker.push(0)
    assert server.reports() == []
    assert (turn_of(server), server.worker.version) == (Turn.COMPUTING, 6)


def test_state_of_a_server_that_left_after_the_end_cannot_be_requested(server):
    server.begin()
    server.on_report = [server.end]
    server.step()
    server.die()
    with pytest.raises(PeerLost, match="lost the server"):
        server.worker.requests.averages()
    assert server.worker._state.connection is Connection.ENDED


def test_unexpected_answer_to_a_state_request_is_a_protocol_error(server):
    server.begin()
    server.on_request = [lambda: server._peer.send(server.welcome)]
    with pytest.raises(ProtocolError, match="expected the answer to a request, got Welcome"):
        server.worker.requests.averages()


def test_refusal_after_the_welcome_is_an_error(server):
    refused = pytest.raises(ProtocolError, match="the server refused worker 0: it broke the rules")
    server.begin()
    server.on_request = server.on_report = [lambda: server.refuse("it broke the rules")] * 2
    with refused:
        server.worker.requests.averages()
    with refused:
        server.step()
    server.assign(2, 1)
    server.worker.begin()
    server.refuse("it broke the rules")
    with refused:
        server.step()


# ---------------------------------------------------------------------------------------- positions


def positions(server):
    found = [one for one in server.received if isinstance(one, messages.PositionReport)]
    return [(one.checkpoint, decode_position(one.position).bookmarks) for one in found]


def test_position_request_is_answered_with_the_beginning_of_the_turn(server):
    stream = FakeStream()
    server.worker.position.add(stream)
    server.begin()
    stream.at = Bookmark(0, 1)
    server.request_position(8)
    server.on_report = [lambda: server.assign(2, 1, ACCEPTED)]
    server.step()
    assert positions(server) == [(8, (Bookmark(0, 0),))]


def test_position_wanted_with_an_assignment_is_that_of_the_new_turn(server):
    stream = FakeStream()
    server.worker.position.add(stream)
    server.begin()
    stream.at = Bookmark(0, 1)
    server.on_report = [lambda: server.assign(2, 1, ACCEPTED, position_wanted=9)]
    server.step()
    assert positions(server) == [(9, (Bookmark(0, 1),))]


@pytest.mark.parametrize("notice", [None, ACCEPTED])
def test_position_at_the_end_follows_the_last_accepted_gradient(server, notice):
    stream = FakeStream()
    server.worker.position.add(stream)
    server.begin()
    stream.at = Bookmark(0, 1)
    server.on_report = [lambda: server.end(1, notice, position_wanted=9)]
    server.step()
    assert positions(server) == [(9, (Bookmark(0, 1 if notice else 0),))]


def test_position_wanted_at_the_end_of_an_open_turn_is_sent_immediately(server):
    stream = FakeStream()
    server.worker.position.add(stream)
    server.begin()
    stream.at = Bookmark(0, 1)
    server.end(1, position_wanted=9)
    server.worker.backward(server.loss())
    assert positions(server) == [(9, (Bookmark(0, 0),))]
    server.worker.push(0)
    assert len(positions(server)) == 1


# ----------------------------------------------------------------------------------- ending the run


def test_stop_returns_when_the_run_has_ended_with_its_last_version(server):
    server.begin()
    server.on_request = [lambda: (server.end(3), server.send_reply())]
    server.worker.stop()
    assert server.received == [messages.StopRun()]
    assert (server.worker.is_over, server.worker.version) == (True, 3)
    server.worker.stop()  # once is enough
    assert server.received == [messages.StopRun()]


def test_step_after_a_stop_reports_a_gradient_that_is_not_wanted(server):
    server.begin()
    server.on_request = [lambda: (server.end(3), server.send_reply())]
    server.worker.stop()
    server.step()
    [report] = server.reports()
    assert report.cancelled
    assert server.worker.last.fate is Fate.LATE


def test_stop_is_sent_to_the_server_that_replaces_a_lost_one(server):
    server.begin()
    server.on_join = [lambda: server.assign(2, 1)]
    server.on_request = [server.die, lambda: (server.end(1), server.send_reply())]
    server.worker.stop()
    assert [type(message) for message in server.received] == [
        messages.StopRun,
        messages.Join,
        messages.StopRun,
    ]
    assert (server.worker.is_over, server.worker.version) == (True, 1)


def test_stop_returns_if_the_server_is_gone_after_the_end(server):
    server.begin()
    server.on_request = [lambda: (server.end(3), server.die())]
    server.worker.stop()
    assert server.worker.is_over


def test_worker_0_waits_for_the_end_of_the_run_when_its_script_ends(server):
    server.begin()
    server.on_request = [lambda: server.end(3, position_wanted=2)]
    server.worker.leave()
    [ended, position] = server.received
    assert ended == messages.ScriptEnded()
    assert isinstance(position, messages.PositionReport)
    assert server.worker.is_over


def test_other_workers_do_not_wait_when_their_script_ends(server):
    server.begin()
    server.worker.number = 1
    server.worker.leave()
    assert server.received == [messages.ScriptEnded()]


def test_worker_whose_script_ends_does_not_wait_for_another_server(server):
    server.begin()
    server.on_request = [server.die]
    server.worker.leave()
    assert server.received == [messages.ScriptEnded()]


def test_script_that_ends_after_the_run_reports_nothing(server):
    server.begin()
    server.on_report = [lambda: server.end(1, ACCEPTED)]
    server.step()
    server.received.clear()
    server.worker.leave()
    assert server.received == []


def test_loop_that_goes_on_after_the_end_ends_with_its_second_extra_step(server, capsys):
    server.begin()
    server.on_report = [lambda: server.end(1, ACCEPTED)]
    server.step()
    server.step()
    with pytest.raises(LoopEnded):
        server.step()
    assert capsys.readouterr().err.startswith("the run ended at update 1")


# ------------------------------------------------------- versions that were cancelled on their way


def cancel_on_the_way(server, turn, version=0, notice=None, **fields):
    """Assign a turn and cancel it before its version has arrived."""
    end = server.worker._server.end
    fetch = end.fetch

    def fetch_nothing(message):
        if isinstance(message, messages.Assignment) and message.turn == turn:
            end.fetch = fetch
            return None
        return fetch(message)

    end.fetch = fetch_nothing
    server.assign(turn, version, notice, **fields)
    server.cancel(turn)


def test_turn_whose_version_was_cancelled_on_its_way_is_abandoned(server):
    server.begin()
    cancelled = messages.FateNotice(Fate.CANCELLED, 1, 0, 0)
    server.on_report = [
        lambda: cancel_on_the_way(server, 2, 1, ACCEPTED),
        lambda: server.assign(3, 2, cancelled),
    ]
    server.step()
    gradient, abandoned = server.reports()
    assert gradient.turn == 1
    assert isinstance(abandoned, messages.AbandonReport)
    assert (abandoned.turn, abandoned.version) == (2, 1)
    assert server.worker.version == 2
    assert turn_of(server) is Turn.COMPUTING
    assert server.worker._assignment.turn == 3


def test_script_sees_the_fate_of_its_own_gradient_not_of_the_turn_that_was_cancelled(server):
    server.begin()
    cancelled = messages.FateNotice(Fate.CANCELLED, 1, 0, 0)
    server.on_report = [
        lambda: cancel_on_the_way(server, 2, 1, ACCEPTED),
        lambda: cancel_on_the_way(server, 3, 2, cancelled),
        lambda: server.assign(4, 3, cancelled),
    ]
    server.step()
    assert server.worker.last.fate is Fate.ACCEPTED
    assert [report.turn for report in server.reports()] == [1, 2, 3]


def test_fate_that_is_unknown_is_not_that_of_the_turn_that_was_cancelled(server):
    """The next server doesn't know the gradient of the lost one."""
    server.begin()
    cancelled = messages.FateNotice(Fate.CANCELLED, 1, 0, 0)
    server.on_join = [lambda: cancel_on_the_way(server, 1)]
    server.on_report = [server.die, lambda: server.assign(2, 0, cancelled)]
    server.step()
    assert server.worker.last.fate is Fate.LATE


def test_parameters_stay_while_a_version_is_cancelled_on_its_way(server):
    server.begin()
    before = [p.detach().clone() for p in server.model.parameters()]

    def end():
        server.end(version=1)

    server.on_report = [lambda: cancel_on_the_way(server, 2, 1, ACCEPTED), end]
    server.step()
    assert server.worker.is_over
    assert (server.worker.version, server.worker.last.fate) == (1, Fate.ACCEPTED)
    for parameter, value in zip(server.model.parameters(), before, strict=True):
        assert torch.equal(parameter, value)


def test_first_version_may_be_cancelled_on_its_way(server):
    server.on_report = [lambda: server.assign(2, 1)]
    cancel_on_the_way(server, 1)
    server.worker.begin()
    assert (server.worker.version, turn_of(server)) == (1, Turn.COMPUTING)


def test_position_that_a_cancelled_turn_asked_for_is_that_of_the_next_turn(server):
    server.begin()
    server.on_report = [
        lambda: cancel_on_the_way(server, 2, 1, ACCEPTED, position_wanted=5),
        lambda: server.assign(3, 2),
    ]
    server.step()
    sent = [type(message).__name__ for message in server.received]
    assert sent == ["GradientReport", "AbandonReport", "PositionReport"]
    assert server.received[-1].checkpoint == 5


def test_leases_that_came_with_a_cancelled_turn_are_kept(server):
    server.begin()
    server.on_report = [
        lambda: cancel_on_the_way(server, 2, 1, ACCEPTED, leases=(Use(0, (7,)),)),
        lambda: server.assign(3, 2, leases=(Use(0, (8,)),)),
    ]
    server.step()
    assert [server.worker.leases.take(0) for _ in range(2)] == [7, 8]


def test_server_that_is_lost_during_a_cancelled_turn_is_replaced(server):
    server.begin()

    def lose():
        cancel_on_the_way(server, 2, 1, ACCEPTED)
        server.on_report = [server.die]

    server.on_report = [lose]
    server.on_join = [lambda: server.assign(1, 0)]
    server.step()
    assert server.worker._state.connection is Connection.JOINED
    assert turn_of(server) is Turn.COMPUTING
    assert (server.worker.version, server.worker.last.fate) == (0, Fate.ACCEPTED)
