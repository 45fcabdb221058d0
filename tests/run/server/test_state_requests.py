# SPDX-License-Identifier: BSD-3-Clause
"""Scripts read and load the states of the server's optimizers, and read the average weights."""

import pytest
import torch

from paceline.run.net import messages
from paceline.run.settings import Settings
from paceline.spec import RunSpec
from server_harness import serve


def serve_one(play, folder, **settings):
    """Serve a run to one worker that `play` controls."""

    def act(harness):
        peer = harness.connect().join(0, harness.spec)
        play(harness, peer, peer.receive_assignment())

    usual = {"spec": RunSpec(workers=1, steps=2), "checkpoint_every": "0"}
    return serve(act, folder, Settings(**{**usual, **settings}), alone=True)


def step(peer, turn):
    """Report a gradient; return the next turn."""
    peer.send(peer.gradient(turn, *peer.parameters.parameters[0]))
    return peer.receive_assignment()


def ask(peer, request):
    """Return the state that answers a request."""
    reply = peer.send(request).receive()
    assert isinstance(reply, messages.StateReply)
    return peer.receive_state(reply)


def test_worker_gets_the_state_of_the_optimizer(tmp_path):
    def play(harness, peer, turn):
        assert ask(peer, messages.StateRequest("optimizer", 0))["state"] == {}
        turn = step(peer, turn)
        state = ask(peer, messages.StateRequest("optimizer", 0))
        assert state["param_groups"][0]["momentum"] == 0.9
        assert set(state["state"]) == {0, 1}
        step(peer, turn)

    serve_one(play, tmp_path)


def test_worker_gets_the_average_weights(tmp_path):
    def play(harness, peer, turn):
        averages = ask(peer, messages.StateRequest("average"))
        for average, parameter in zip(averages[0], harness.model.parameters(), strict=True):
            torch.testing.assert_close(average, parameter.detach())
        step(peer, step(peer, turn))

    serve_one(play, tmp_path, ema=0.5)


def test_uploaded_state_is_loaded_and_confirmed(tmp_path):
    def play(harness, peer, turn):
        state = harness.optimizer.state_dict()
        state["param_groups"][0]["lr"] = 0.25
        peer.send_state(0, state, has_begun=False)
        assert peer.receive() == messages.StateReply(0)
        assert harness.optimizer.param_groups[0]["lr"] == 0.25
        step(peer, step(peer, turn))

    serve_one(play, tmp_path)


@pytest.mark.parametrize(("has_begun", "lr"), [(False, 0.1), (True, 0.25)])
def test_state_of_a_worker_that_joins_late_is_not_loaded(tmp_path, has_begun, lr):
    """It uploads what the others did at the beginning; the run has moved on from there."""

    def play(harness, peer, turn):
        turn = step(peer, turn)
        state = harness.optimizer.state_dict()
        state["param_groups"][0]["lr"] = 0.25
        peer.send_state(0, state, has_begun=has_begun)
        assert peer.receive() == messages.StateReply(0)
        assert harness.optimizer.param_groups[0]["lr"] == lr
        step(peer, turn)

    serve_one(play, tmp_path)


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        (messages.StateRequest("average"), "this run keeps no average of the weights"),
        (messages.StateRequest("optimizer", 3), "there is no optimizer 3"),
    ],
    ids=["average", "optimizer"],
)
def test_state_that_does_not_exist_is_refused(tmp_path, request_, reason):
    def play(harness, peer, turn):
        assert reason in peer.send(request_).wait_closed()
        late = harness.connect().join(0, harness.spec)
        step(late, step(late, late.receive_assignment()))

    serve_one(play, tmp_path)
