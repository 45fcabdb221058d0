# SPDX-License-Identifier: BSD-3-Clause
"""Bad peers are shown out with a reason, and the run goes on as if they had never come."""

import struct

import pytest
import torch
from msgspec.structs import replace

from paceline.release import RELEASE
from paceline.run.net import messages
from paceline.run.tensors.state_spec import OptionChange, StateSpec
from paceline.trace.schema import Left
from server_harness import kept_open, serve


def framed(body: bytes) -> bytes:
    return struct.pack("<I", len(body)) + body


# --------------------------------------------------------------------------------------- strangers

HELLO = messages.Hello(messages.PROTOCOL, bytes(32))
A_FRAME = "a frame must have 1 to 256 bytes, one of "

STRANGERS = {
    "speaks another protocol altogether": ([b"GET / HTTP/1.1\r\n\r\n"], A_FRAME + "542393671"),
    "announces a huge frame": ([b"\xff\xff\xff\xff"], A_FRAME + "4294967295"),
    "announces an empty frame": ([bytes(4)], A_FRAME + "0"),
    "sends garbage in a frame": ([framed(b"\xff" * 100)], "expected a message of a stranger"),
    "sends a pickle": ([framed(b"\x80\x04N.")], "expected a message of a stranger"),
    "has no token": (
        [messages.Join(9, RELEASE, StateSpec((), (), (), ()))],
        "expected a message ",
    ),
    "has a wrong token": ([HELLO, messages.Proof(bytes(32))], "it has another token"),
    "says hello twice": ([HELLO, HELLO], "it said hello twice"),
    "proves itself before hello": ([messages.Proof(bytes(32))], "it wants to prove itself before"),
    "speaks a newer protocol": ([messages.Hello(99, bytes(32))], "it speaks protocol 99, the run "),
    "has a nonce that is too short": ([framed(b"\x93\x01\x01\xc4\x01x")], "expected a message of "),
}


@pytest.mark.parametrize("who", STRANGERS)
def test_a_stranger_is_refused_that(unharmed, who):
    things, reason = STRANGERS[who]

    def intrude(scene):
        assert scene.come(token=None).say(*things).end().startswith(reason)

    _, said = unharmed(intrude)
    assert f"refused a stranger: broke the rules: {reason}" in said


@pytest.mark.parametrize("data", [b"", b"\x10", framed(b"x" * 200)[:-1], framed(b"\xff")[:2]])
def test_a_stranger_that_stops_in_the_middle_of_a_word_is_let_go(unharmed, data):
    def intrude(scene):
        assert scene.come(token=None).say(data).hang_up().end() == ""

    _, said = unharmed(intrude)
    assert "refused" not in said


def test_strangers_that_stay_and_say_nothing_harm_nobody(unharmed):
    """They are still here when the run ends."""
    unharmed(lambda scene: [scene.come(token=None) for _ in range(20)])


def test_a_stranger_cannot_fill_the_server_with_descriptors(unharmed):
    def intrude(scene):
        stranger = scene.come(token=None)
        reason = stranger.say(b"\xff\x00\x00\x00", fds=(0, 0, 0, 0)).end()
        assert reason == "more memory came along than belongs to any message"

    unharmed(intrude)


# -------------------------------------------------------------------- those that know the token

EARLY = {
    "a gradient": messages.GradientReport(1, 0, 0, 1, 0.0, 1.0),
    "that it gives up": messages.AbandonReport(1, 0.0),
    "what it wants": messages.StateRequest("optimizer", 0),
    "a state": messages.StateUpload(0, b"\x80"),
}


@pytest.mark.parametrize("what", EARLY)
def test_who_sends_before_it_has_joined(unharmed, what):
    def intrude(scene):
        assert scene.come().say(EARLY[what]).end() == "it must join before anything else"

    unharmed(intrude)


def without_bias(contents):
    [one] = contents.optimizers
    return replace(contents, optimizers=(replace(one, parameters=one.parameters[:1]),))


def with_wider_weight(contents):
    [one] = contents.optimizers
    wide = replace(one.parameters[0], shape=(1, 4), stride=(4, 1))
    return replace(contents, optimizers=(replace(one, parameters=(wide, *one.parameters[1:])),))


def with_kind(contents, kind):
    return replace(contents, optimizers=(replace(contents.optimizers[0], kind=kind),))


FOREIGN = {
    "a number that is taken": (
        lambda c: messages.Join(1, RELEASE, c),
        "there is a worker 1 already; give this one another number",
    ),
    "another release": (
        lambda c: messages.Join(9, "0.0.1", c),
        f"it has Paceline 0.0.1, the run has {RELEASE}",
    ),
    "another optimizer": (
        lambda c: messages.Join(9, RELEASE, with_kind(c, "Adam")),
        "its script is not that of the run: of its optimizers one is Adam, in the run it is SGD",
    ),
    "fewer parameters": (
        lambda c: messages.Join(9, RELEASE, without_bias(c)),
        "its script is not that of the run: it has 1 parameters, the run has 2",
    ),
    "another shape": (
        lambda c: messages.Join(9, RELEASE, with_wider_weight(c)),
        "its script is not that of the run: of its parameters one is "
        "weight: torch.float32[1, 4], in the run it is weight: torch.float32[1, 3]",
    ),
}


@pytest.mark.parametrize("what", FOREIGN)
def test_who_joins_with(unharmed, what):
    make, reason = FOREIGN[what]

    def intrude(scene):
        assert scene.come().say(make(scene.contents)).end() == reason

    _, said = unharmed(intrude)
    assert f"refused a stranger: broke the rules: {reason}" in said


# -------------------------------------------------------------------------- those that have joined


def report(**fields):
    """A report that lies in these fields."""
    return lambda raw, work: raw.gradient(work, torch.ones(1, 3), torch.ones(1), **fields)


JOINED = {
    "joins again": (
        lambda raw, work: messages.Join(9, RELEASE, StateSpec((), (), (), ())),
        "worker 9 has joined already",
    ),
    "says hello again": (lambda raw, work: HELLO, "expected a message of a worker"),
    "sends garbage": (lambda raw, work: framed(b"\xff"), "expected a message of a worker"),
    "announces a huge frame": (lambda raw, work: b"\xff" * 4, "a frame must have 1 to 16777216"),
    "reports a turn it never had": (report(turn=5), "nobody waits for turn"),
    "reports turn 0": (report(turn=0), "nobody waits for turn"),
    "reports another version": (report(version=0), "the worker was asked for version 1"),
    "reports a version of the future": (report(version=7), "the worker was asked for version 1"),
    "sets what it likes in a report that is void": (
        report(turn=5, options=(OptionChange(0, 0, "lr", 9.0),)),
        "nobody waits for turn",
    ),
    "sets what it likes as it gives up a turn it never had": (
        lambda raw, work: messages.AbandonReport(5, 0.0, 0, (OptionChange(0, 0, "lr", 9.0),)),
        "nobody waits for turn",
    ),
    "gives up a turn it never had": (
        lambda raw, work: messages.AbandonReport(5, 0.0),
        "nobody waits for turn",
    ),
    "claims that it was cancelled": (
        report(cancelled=True, sq_norm=None),
        "nobody has cancelled turn 1",
    ),
    "steps an optimizer that is not there": (report(optimizer=1), "there is no optimizer 1"),
    "has a parameter too many": (report(unused=(0, 2)), "there is no parameter 2"),
    "sets a group that is not there": (
        report(options=(OptionChange(0, 0, "lr", 0.5), OptionChange(0, 1, "lr", 9.0))),
        "no such parameter group",
    ),
    "sets an optimizer that is not there": (
        report(options=(OptionChange(1, 0, "lr", 9.0),)),
        "no such parameter group",
    ),
    "sets the parameters of a group": (
        report(options=(OptionChange(0, 0, "params", 1),)),
        "the parameters of a group can't be changed",
    ),
    "wants an optimizer that is not there": (
        lambda raw, work: messages.StateRequest("optimizer", 1),
        "there is no optimizer 1",
    ),
    "wants an average that nobody keeps": (
        lambda raw, work: messages.StateRequest("average"),
        "this run keeps no average of the weights",
    ),
    "gives a state without memory": (
        lambda raw, work: messages.StateUpload(0, b"\x80"),
        "a message came without the memory that belongs to it",
    ),
}


@pytest.mark.parametrize("what", JOINED)
def test_a_worker_is_shown_out_that(unharmed, what):
    make, reason = JOINED[what]

    def intrude(scene):
        raw = scene.come().join(9, scene.contents)
        assert raw.say(make(raw, raw.get_work())).end().startswith(reason)

    served, said = unharmed(intrude)
    [left] = [r for r in served.trace.records if isinstance(r, Left) and r.worker == 9]
    assert left.reason.startswith(f"broke the rules: {reason}")
    assert f"worker 9 left: broke the rules: {reason}" in said


def test_nobody_has_the_last_word_for_ever(tmp_path):
    """One that claims to have set the learning rate at a version that is far ahead."""
    rates = []

    def intrude(scene):
        for number, lr in ((9, 0.5), (10, 0.25)):
            raw = scene.come().join(number, scene.contents)
            work, option = raw.get_work(), OptionChange(0, 0, "lr", lr)
            raw.say(messages.AbandonReport(work.turn, 0.0, 2**53, (option,))).get_work()
            rates.append(scene.optimizer.param_groups[0]["lr"])
            raw.close()

    serve(intrude, tmp_path)
    assert rates == [0.5, 0.25]


def test_bad_peers_leave_nothing_open(tmp_path):
    """Whoever was shown out, whatever it had sent along."""

    def intrude(scene):
        for things, _ in STRANGERS.values():
            scene.come(token=None).say(*things).end()
        for make, _ in FOREIGN.values():
            scene.come().say(make(scene.contents)).end()
        for number, (make, _) in enumerate(JOINED.values(), start=9):
            raw = scene.come().join(number, scene.contents)
            raw.say(make(raw, raw.get_work())).end()

    before = kept_open(tmp_path)
    assert kept_open(tmp_path, intrude) == before


def test_a_gradient_that_only_claims_to_be_finite_moves_nothing(tmp_path, capsys):
    """Worker 1 is gone, and one that came in its place has a NaN in its slot, and denies it."""

    def intrude(scene):
        nan = torch.full((1, 3), torch.nan)
        raw = scene.come().join(9, scene.contents)
        raw.say(raw.gradient(raw.get_work(), nan, torch.ones(1), sq_norm=1.0))

    served = serve(intrude, tmp_path)
    assert served.failure == ""
    assert served.weights.isfinite().all()
    assert served.momentum.isfinite().all()
    lies = [9 in update.contributors for update in served.trace.updates()]
    assert lies == [False, True, False]
    assert [update.sq_norm is None for update in served.trace.updates()] == lies
    assert "update 2 was not finite: nothing was stepped" in capsys.readouterr().out
