# SPDX-License-Identifier: BSD-3-Clause
"""A worker that sends a state which is none is shown out, whatever lies in its memory."""

import fcntl
import os

import msgspec
import pytest

from paceline.run.net import messages
from paceline.run.tensors.region import Region
from paceline.run.tensors.state import pack
from server_harness import kept_open


def tensor_at(dtype="torch.float32", shape=(1,), offset=0):
    """A tree that says that its only tensor lies there."""
    where = msgspec.msgpack.encode((dtype, shape, offset))
    return msgspec.msgpack.encode(msgspec.msgpack.Ext(1, where))


def memory():
    """A descriptor of 64 bytes of sealed memory."""
    return Region.create(64, "test")[1]


def other_memory(size, fill=True, seal=True):
    """Memory as no worker has it."""
    fd = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    if fill:
        os.write(fd, bytes(size))
    else:
        os.ftruncate(fd, size)
    if seal:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    return fd


STATES = {
    "in memory that is too small": (
        lambda: (tensor_at(shape=(17,)), memory()),
        "a tensor of a state is outside of its memory",
    ),
    "in memory that can be taken away": (
        lambda: (tensor_at(), other_memory(64, seal=False)),
        "expected at least 64 bytes of sealed memory, got 64 bytes, not sealed",
    ),
    "in memory that is only promised": (
        lambda: (tensor_at(), other_memory(2**62, fill=False)),
        "expected at least 1 bytes of sealed memory, got 0 bytes",
    ),
    "in no memory": (
        lambda: (tensor_at(), other_memory(0)),
        "expected at least 1 bytes of sealed memory, got 0 bytes",
    ),
    "in something that is no memory": (
        lambda: (tensor_at(), os.open("/dev/zero", os.O_RDWR)),
        "cannot map a peer's memory: Invalid argument",
    ),
    "at an offset beyond": (
        lambda: (tensor_at(offset=2**40), memory()),
        "a tensor of a state is outside of its memory",
    ),
    "at an odd offset": (
        lambda: (tensor_at(offset=2), memory()),
        "a tensor of a state is misaligned or overlaps another",
    ),
    "of a shape that overflows": (
        lambda: (tensor_at(shape=(2**32, 2**32)), memory()),
        "a tensor of a state is outside of its memory",
    ),
    "of a negative shape": (lambda: (tensor_at(shape=(-1,)), memory()), "expected a state: "),
    "of no type": (
        lambda: (tensor_at(dtype="torch.nonsense"), memory()),
        "expected a state: there is no type of tensors 'torch.nonsense'",
    ),
    "that torch would crash on": (
        lambda: (tensor_at(dtype="torch.qint8"), memory()),
        "expected a state: a quantized tensor (torch.qint8) cannot travel",
    ),
    "that is no tree": (lambda: (b"\xc1", memory()), "expected a state: "),
    "that is too deep": (lambda: (b"\x91" * 100_000, memory()), "expected a state: "),
    "that is no state": (lambda: pack([1, 2], "test"), "that is not the state of an optimizer"),
    "of another optimizer": (
        lambda: pack({"state": {}, "param_groups": []}, "test"),
        "the optimizer cannot load this state: ",
    ),
    "of odd parts": (
        lambda: pack({"state": [], "param_groups": [{"params": [0, 1]}]}, "test"),
        "the optimizer cannot load this state: ",
    ),
}


@pytest.mark.parametrize("what", STATES)
def test_a_worker_is_shown_out_that_gives_a_state(unharmed, what):
    make, reason = STATES[what]

    def intrude(scene):
        raw = scene.come().join(9, scene.contents)
        raw.say(messages.AbandonReport(raw.get_work().turn, 0.0))  # a newcomer's would be ignored
        tree, fd = make()
        assert raw.say(messages.StateUpload(0, tree), fds=(fd,)).end().startswith(reason)
        os.close(fd)

    unharmed(intrude)


def test_a_state_that_cannot_travel_costs_who_asks_for_it_and_nobody_else(unharmed):
    def intrude(scene):
        state = scene.optimizer.state[scene.model.weight]
        state["odd"] = {1, 2}
        raw = scene.come().join(9, scene.contents)
        assert (
            raw.say(messages.StateRequest("optimizer"))
            .end()
            .startswith("the optimizer has a set in")
        )
        del state["odd"]

    unharmed(intrude)


def test_bad_states_leave_nothing_open(tmp_path):
    def intrude(scene):
        for make, _ in STATES.values():
            tree, fd = make()
            raw = scene.come().join(9, scene.contents)
            raw.say(messages.StateUpload(0, tree), fds=(fd, fd)).end()
            os.close(fd)

    assert kept_open(tmp_path, intrude) == kept_open(tmp_path)


def test_a_state_may_be_larger_than_a_socket_takes(unharmed):
    def intrude(scene):
        state = scene.optimizer.state[scene.model.weight]
        state["many"] = [0.5] * 500_000
        raw = scene.come().join(9, scene.contents)
        raw.get_work()
        answer = raw.say(messages.StateRequest("optimizer")).hear()
        assert answer.tree_bytes > 4_000_000
        del state["many"]

    unharmed(intrude)
