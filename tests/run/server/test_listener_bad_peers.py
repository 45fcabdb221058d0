# SPDX-License-Identifier: BSD-3-Clause
"""Bad peers are refused with a reason, and the run continues as if they had never connected."""

import struct

import pytest
import torch
from msgspec.structs import replace

from paceline.release import RELEASE
from paceline.run.net import messages
from paceline.run.tensors.state_spec import OptionChange, StateSpec
from paceline.trace.schema import Left
from server_harness import serve, unclosed_descriptors


def framed(body: bytes) -> bytes:
    return struct.pack("<I", len(body)) + body


# ----------------------------------------------------------------------- unauthenticated clients

HELLO = messages.Hello(messages.PROTOCOL, bytes(32))
A_FRAME = "a frame must have 1 to 256 bytes, got "
FROM_A_CLIENT = "expected a message from an unauthenticated client"

STRANGERS = {
    "speaks HTTP": ([b"GET / HTTP/1.1\r\n\r\n"], A_FRAME + "542393671"),
    "announces a huge frame": ([b"\xff\xff\xff\xff"], A_FRAME + "4294967295"),
    "announces an empty frame": ([bytes(4)], A_FRAME + "0"),
    "sends garbage in a frame": ([framed(b"\xff" * 100)], FROM_A_CLIENT),
    "sends a pickle": ([framed(b"\x80\x04N.")], FROM_A_CLIENT),
    "has no token": ([messages.Join(9, RELEASE, StateSpec((), (), (), ()))], FROM_A_CLIENT),
    "has a wrong token": ([HELLO, messages.Proof(bytes(32))], "the token is wrong"),
    "says hello twice": ([HELLO, HELLO], "Hello was sent twice"),
    "proves itself before hello": ([messages.Proof(bytes(32))], "Proof was sent before Hello"),
    "speaks a newer protocol": (
        [messages.Hello(99, bytes(32))],
        f"expected version {messages.PROTOCOL} of the protocol, got 99; ",
    ),
    "has a nonce that is too short": ([framed(b"\x93\x01\x01\xc4\x01x")], FROM_A_CLIENT),
}


@pytest.mark.parametrize("what", STRANGERS)
def test_unauthenticated_client_is_refused(unharmed, what):
    things, reason = STRANGERS[what]

    def intrude(harness):
        assert harness.connect(token=None).send(*things).wait_closed().startswith(reason)

    _, printed = unharmed(intrude)
    assert f"refused a connection: {reason}" in printed


@pytest.mark.parametrize("data", [b"", b"\x10", framed(b"x" * 200)[:-1], framed(b"\xff")[:2]])
def test_unauthenticated_client_that_hangs_up_is_closed_silently(unharmed, data):
    def intrude(harness):
        assert harness.connect(token=None).send(data).shut_down_sending().wait_closed() == ""

    _, printed = unharmed(intrude)
    assert "refused" not in printed


def test_silent_connections_do_no_harm(unharmed):
    """They are still open when the run ends."""
    unharmed(lambda harness: [harness.connect(token=None) for _ in range(20)])


def test_unauthenticated_client_cannot_fill_the_server_with_descriptors(unharmed):
    def intrude(harness):
        client = harness.connect(token=None)
        reason = client.send(b"\xff\x00\x00\x00", fds=(0, 0, 0, 0)).wait_closed()
        assert reason == "got more shared memory than any message needs"

    unharmed(intrude)


# ------------------------------------------------------- clients with the token, before they join

EARLY = {
    "a gradient": messages.GradientReport(1, 0, 0, 1, 0.0, 1.0),
    "an abandoned turn": messages.AbandonReport(1, 0.0),
    "a request for a state": messages.StateRequest("optimizer", 0),
    "a state": messages.StateUpload(0, b"\x80"),
}


@pytest.mark.parametrize("what", EARLY)
def test_client_is_refused_that_sends_before_it_joins(unharmed, what):
    def intrude(harness):
        assert (
            harness.connect().send(EARLY[what]).wait_closed()
            == "a worker must join before anything else"
        )

    unharmed(intrude)


def without_bias(spec):
    [one] = spec.optimizers
    return replace(spec, optimizers=(replace(one, parameters=one.parameters[:1]),))


def with_wider_weight(spec):
    [one] = spec.optimizers
    wide = replace(one.parameters[0], shape=(1, 4), stride=(4, 1))
    return replace(spec, optimizers=(replace(one, parameters=(wide, *one.parameters[1:])),))


def with_kind(spec, kind):
    return replace(spec, optimizers=(replace(spec.optimizers[0], kind=kind),))


FOREIGN = {
    "a number that is taken": (
        lambda spec: messages.Join(1, RELEASE, spec),
        "there is already a worker 1; give this one another number",
    ),
    "another release": (
        lambda spec: messages.Join(9, "0.0.1", spec),
        f"expected Paceline {RELEASE} in a worker, got 0.0.1",
    ),
    "another optimizer": (
        lambda spec: messages.Join(9, RELEASE, with_kind(spec, "Adam")),
        "the worker's script differs from the server's: its optimizers differ: it has Adam, "
        "the run has SGD",
    ),
    "fewer parameters": (
        lambda spec: messages.Join(9, RELEASE, without_bias(spec)),
        "the worker's script differs from the server's: it has 1 parameters, the run has 2",
    ),
    "another shape": (
        lambda spec: messages.Join(9, RELEASE, with_wider_weight(spec)),
        "the worker's script differs from the server's: its parameters differ: it has "
        "weight: torch.float32[1, 4], the run has weight: torch.float32[1, 3]",
    ),
}


@pytest.mark.parametrize("what", FOREIGN)
def test_worker_is_refused_that_joins_with(unharmed, what):
    make, reason = FOREIGN[what]

    def intrude(harness):
        assert harness.connect().send(make(harness.spec)).wait_closed() == reason

    _, printed = unharmed(intrude)
    assert f"refused a connection: {reason}" in printed


# ----------------------------------------------------------------------- workers that have joined


def report(**fields):
    """Return a report with these fields changed."""
    return lambda peer, assignment: peer.gradient(
        assignment, torch.ones(1, 3), torch.ones(1), **fields
    )


JOINED = {
    "joins again": (
        lambda peer, assignment: messages.Join(9, RELEASE, StateSpec((), (), (), ())),
        "worker 9 has joined already",
    ),
    "says hello again": (lambda peer, assignment: HELLO, "expected a message from a worker"),
    "sends garbage": (lambda peer, assignment: framed(b"\xff"), "expected a message from a worker"),
    "announces a huge frame": (
        lambda peer, assignment: b"\xff" * 4,
        "a frame must have 1 to 16777216",
    ),
    "reports a turn it never had": (report(turn=5), "no report is due for turn"),
    "reports turn 0": (report(turn=0), "no report is due for turn"),
    "reports another version": (report(version=0), "the worker was asked for version 1"),
    "reports a version of the future": (report(version=7), "the worker was asked for version 1"),
    "sets an option in a report of a turn it never had": (
        report(turn=5, options=(OptionChange(0, 0, "lr", 9.0),)),
        "no report is due for turn",
    ),
    "sets an option as it abandons a turn it never had": (
        lambda peer, assignment: messages.AbandonReport(
            5, 0.0, 0, (OptionChange(0, 0, "lr", 9.0),)
        ),
        "no report is due for turn",
    ),
    "abandons a turn it never had": (
        lambda peer, assignment: messages.AbandonReport(5, 0.0),
        "no report is due for turn",
    ),
    "claims a cancelled turn that was not cancelled": (
        report(cancelled=True, sq_norm=None),
        "turn 1 was not cancelled",
    ),
    "steps an optimizer that does not exist": (report(optimizer=1), "there is no optimizer 1"),
    "has no gradient for a parameter that does not exist": (
        report(unused=(0, 2)),
        "there is no parameter 2",
    ),
    "sets an option of a group that does not exist": (
        report(options=(OptionChange(0, 0, "lr", 0.5), OptionChange(0, 1, "lr", 9.0))),
        "no such parameter group",
    ),
    "sets an option of an optimizer that does not exist": (
        report(options=(OptionChange(1, 0, "lr", 9.0),)),
        "no such parameter group",
    ),
    "sets the parameters of a group": (
        report(options=(OptionChange(0, 0, "params", 1),)),
        "the parameters of a group can't be changed",
    ),
    "requests an optimizer that does not exist": (
        lambda peer, assignment: messages.StateRequest("optimizer", 1),
        "there is no optimizer 1",
    ),
    "requests an average that the run does not keep": (
        lambda peer, assignment: messages.StateRequest("average"),
        "this run keeps no average of the weights",
    ),
    "uploads a state without memory": (
        lambda peer, assignment: messages.StateUpload(0, b"\x80"),
        "expected shared memory with a message, got none",
    ),
}


@pytest.mark.parametrize("what", JOINED)
def test_misbehaving_worker_is_disconnected(unharmed, what):
    make, reason = JOINED[what]

    def intrude(harness):
        peer = harness.connect().join(9, harness.spec)
        assert peer.send(make(peer, peer.receive_assignment())).wait_closed().startswith(reason)

    served, printed = unharmed(intrude)
    [left] = [r for r in served.trace.records if isinstance(r, Left) and r.worker == 9]
    assert left.reason.startswith(f"broke the protocol: {reason}")
    assert f"worker 9 left: broke the protocol: {reason}" in printed


def test_option_set_at_a_future_version_can_still_be_changed(tmp_path):
    """A worker claims to have set the learning rate at a version that is far ahead."""
    rates = []

    def intrude(harness):
        for number, lr in ((9, 0.5), (10, 0.25)):
            peer = harness.connect().join(number, harness.spec)
            assignment, option = peer.receive_assignment(), OptionChange(0, 0, "lr", lr)
            peer.send(
                messages.AbandonReport(assignment.turn, 0.0, 2**53, (option,))
            ).receive_assignment()
            rates.append(harness.optimizer.param_groups[0]["lr"])
            peer.close()

    serve(intrude, tmp_path)
    assert rates == [0.5, 0.25]


def test_bad_peers_leave_no_descriptor_open(tmp_path):
    def intrude(harness):
        for things, _ in STRANGERS.values():
            harness.connect(token=None).send(*things).wait_closed()
        for make, _ in FOREIGN.values():
            harness.connect().send(make(harness.spec)).wait_closed()
        for number, (make, _) in enumerate(JOINED.values(), start=9):
            peer = harness.connect().join(number, harness.spec)
            peer.send(make(peer, peer.receive_assignment())).wait_closed()

    before = unclosed_descriptors(tmp_path)
    assert unclosed_descriptors(tmp_path, intrude) == before


def test_gradient_that_is_falsely_reported_as_finite_is_not_applied(tmp_path, capsys):
    """A worker has a NaN in its slot and reports a finite norm."""

    def intrude(harness):
        nan = torch.full((1, 3), torch.nan)
        peer = harness.connect().join(9, harness.spec)
        peer.send(peer.gradient(peer.receive_assignment(), nan, torch.ones(1), sq_norm=1.0))

    served = serve(intrude, tmp_path)
    assert served.failure == ""
    assert served.weights.isfinite().all()
    assert served.momentum.isfinite().all()
    lied_in = [9 in update.contributors for update in served.trace.updates()]
    assert lied_in == [False, True, False]
    assert [update.sq_norm is None for update in served.trace.updates()] == lied_in
    assert "update 2 is not finite: the optimizer did not step" in capsys.readouterr().out
