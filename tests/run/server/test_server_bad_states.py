# SPDX-License-Identifier: BSD-3-Clause
"""A worker that uploads an invalid state is disconnected, whatever is in its memory."""

import fcntl
import os

import msgspec
import pytest

from paceline.run.net import messages
from paceline.run.tensors.shared_region import Region
from paceline.run.tensors.state_packing import pack
from server_harness import unclosed_descriptors


def tensor_at(dtype="torch.float32", shape=(1,), offset=0):
    """Return a tree whose only tensor is at this place."""
    where = msgspec.msgpack.encode((dtype, shape, offset))
    return msgspec.msgpack.encode(msgspec.msgpack.Ext(1, where))


def memory():
    """Return a descriptor of 64 bytes of sealed memory."""
    return Region.create(64, "test")[1]


def other_memory(size, fill=True, seal=True):
    """Return a descriptor of memory that no honest worker sends."""
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
    "in memory that can shrink": (
        lambda: (tensor_at(), other_memory(64, seal=False)),
        "expected at least 64 bytes of sealed memory, got 64 bytes, not sealed",
    ),
    "in memory that is sparse": (
        lambda: (tensor_at(), other_memory(2**62, fill=False)),
        "expected at least 1 bytes of sealed memory, got 0 bytes",
    ),
    "in no memory": (
        lambda: (tensor_at(), other_memory(0)),
        "expected at least 1 bytes of sealed memory, got 0 bytes",
    ),
    "in a device": (
        lambda: (tensor_at(), os.open("/dev/zero", os.O_RDWR)),
        "cannot map a peer's memory: Invalid argument",
    ),
    "at an offset beyond the end": (
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
    "of an unknown type": (
        lambda: (tensor_at(dtype="torch.nonsense"), memory()),
        "expected a state: unknown tensor type 'torch.nonsense'",
    ),
    "that torch would crash on": (
        lambda: (tensor_at(dtype="torch.qint8"), memory()),
        "expected a state: a quantized tensor (torch.qint8) can't be sent",
    ),
    "that is not a tree": (lambda: (b"\xc1", memory()), "expected a state: "),
    "that is too deep": (lambda: (b"\x91" * 100_000, memory()), "expected a state: "),
    "that is not a state": (
        lambda: pack([1, 2], "test"),
        "expected the state_dict() of an optimizer",
    ),
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
def test_worker_is_disconnected_that_uploads_a_state(unharmed, what):
    make, reason = STATES[what]

    def intrude(harness):
        peer = harness.connect().join(9, harness.spec)
        peer.send(
            messages.AbandonReport(peer.receive_assignment().turn, 0.0)
        )  # a late worker's first upload is ignored
        tree, fd = make()
        assert peer.send(messages.StateUpload(0, tree), fds=(fd,)).wait_closed().startswith(reason)
        os.close(fd)

    unharmed(intrude)


def test_request_for_a_state_that_cannot_be_sent_costs_only_its_worker(unharmed):
    def intrude(harness):
        state = harness.optimizer.state[harness.model.weight]
        state["odd"] = {1, 2}
        peer = harness.connect().join(9, harness.spec)
        assert (
            peer.send(messages.StateRequest("optimizer"))
            .wait_closed()
            .startswith("the optimizer contains a set")
        )
        del state["odd"]

    unharmed(intrude)


def test_bad_states_leave_no_descriptor_open(tmp_path):
    def intrude(harness):
        for make, _ in STATES.values():
            tree, fd = make()
            peer = harness.connect().join(9, harness.spec)
            peer.send(messages.StateUpload(0, tree), fds=(fd, fd)).wait_closed()
            os.close(fd)

    assert unclosed_descriptors(tmp_path, intrude) == unclosed_descriptors(tmp_path)


def test_state_may_be_larger_than_a_socket_buffer(unharmed):
    def intrude(harness):
        state = harness.optimizer.state[harness.model.weight]
        state["many"] = [0.5] * 500_000
        peer = harness.connect().join(9, harness.spec)
        peer.receive_assignment()
        answer = peer.send(messages.StateRequest("optimizer")).receive()
        assert answer.tree_bytes > 4_000_000
        del state["many"]

    unharmed(intrude)
