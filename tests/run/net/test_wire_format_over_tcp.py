# SPDX-License-Identifier: BSD-3-Clause
"""Both ends of the TCP transport agree on the formats, and feed rounding errors back."""

import socket
from collections import deque
from contextlib import closing

import pytest
import torch
from torch import nn

from paceline.core.events import Fate
from paceline.run.net import messages
from paceline.run.net.data_socket import DataSocket
from paceline.run.net.shared_memory import SharedMemoryStore
from paceline.run.net.tcp import TcpPeer
from paceline.run.net.tcp_worker import TcpWorker
from paceline.run.net.transport import Announcement
from paceline.run.tensors.layout import gather

NUMBER = 1.001  # no half-precision format has it


class Control:
    """One end of a control connection inside this process."""

    def __init__(self, inbox, outbox):
        self._inbox, self.send = inbox, outbox.append

    def wait(self, wishes, timeout_s):
        return bool(self._inbox)

    def receive_nowait(self):
        while self._inbox:
            yield self._inbox.popleft()

    def close(self):
        pass


class Pair:
    """A server's end and a worker's, for a model with a buffer, a counter and a constant."""

    def __init__(self, **formats):
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
        model[2].weight.requires_grad_(False)
        trained = [p for p in model.parameters() if p.requires_grad]
        spec = gather([model], [torch.optim.SGD(trained, lr=0.1)]).spec
        self.store = SharedMemoryStore(spec)
        for constant in self.store.constants:
            constant.fill_(NUMBER)
        to_worker, to_server = deque(), deque()
        ours, theirs = socket.socketpair()
        self.peer = TcpPeer(Control(to_server, to_worker), self.store)
        self.peer.attach(DataSocket(ours))
        self.worker = TcpWorker(Control(to_worker, to_server), DataSocket(theirs), spec)
        self.peer.open_slot(messages.Welcome(1, "", 0, False, False, **formats))
        self.worker.receive()
        self.opened = self.worker.open_slot()
        self.turn = 0

    def assign(self, value, fate=None):
        """Assign a turn at parameters of this value; return the worker's view of them."""
        self.turn += 1
        buffer = self.store.new_buffer()
        fill(buffer.views, value)
        notice = None if fate is None else messages.FateNotice(fate, 0, 0, 1)
        message = messages.Assignment(self.turn, 0, buffer.number, (), 0.0, notice=notice)
        self.peer.publish(message, buffer)
        return self.worker.fetch(self.worker.receive())

    def push(self, value):
        """Push a gradient of this value; return the server's view of it."""
        fill(self.opened.slot, value)
        self.worker.announce(messages.GradientReport(self.turn, 0, 0, 1, 0.5, 1.0))
        [announcement] = self.peer.receive_nowait()
        assert isinstance(announcement, Announcement)
        announcement.admit()
        self.worker.wait_readable(0.0)
        self.peer.receive_data()
        [report] = self.peer.receive_nowait()
        assert self.opened.slot.flats[0][0][0] == torch.tensor(value)
        return self.peer.delivered(report).slot

    def close(self):
        self.worker.close()
        self.peer.close()
        self.store.close()


def fill(views, value):
    for own in (*views.flats[0], *views.buffer_flats, *views.counter_flats):
        own.fill_(value)


@pytest.fixture
def pair(request):
    with closing(Pair(**request.param)) as pair:
        yield pair


def formats(wire="exact", wire_parameters="exact"):
    values = [{"wire": wire, "wire_parameters": wire_parameters}]
    return pytest.mark.parametrize("pair", values, indirect=True)


def numbers(views):
    return {one.item() for own in views.flats[0] for one in own}


def rounded(value, dtype):
    return torch.tensor(value).to(dtype).item()


def exactly(value):
    return torch.tensor(value).item()


@formats()
def test_everything_is_exact_unless_the_server_says_otherwise(pair):
    assert numbers(pair.assign(NUMBER)) == {exactly(NUMBER)}
    assert numbers(pair.push(NUMBER)) == {exactly(NUMBER)}
    assert numbers(pair.assign(NUMBER, Fate.ACCEPTED)) == {exactly(NUMBER)}


@formats(wire="bfloat16")
def test_gradients_alone_are_rounded(pair):
    assert numbers(pair.assign(NUMBER)) == {exactly(NUMBER)}
    assert numbers(pair.push(NUMBER)) == {rounded(NUMBER, torch.bfloat16)}


@formats(wire_parameters="float16")
def test_parameters_alone_are_rounded(pair):
    assert numbers(pair.assign(NUMBER)) == {rounded(NUMBER, torch.float16)}
    assert numbers(pair.push(NUMBER)) == {exactly(NUMBER)}


@formats("bfloat16", "bfloat16")
def test_module_buffers_and_constants_are_exact(pair):
    assert {one.item() for own in pair.opened.constants for one in own.flatten()} == {
        exactly(NUMBER)
    }
    for views in (pair.assign(NUMBER), pair.push(NUMBER)):
        assert {one.item() for own in views.buffer_flats for one in own} == {exactly(NUMBER)}
        assert {one.item() for own in views.counter_flats for one in own} == {1}


@formats("bfloat16", "bfloat16")
def test_last_version_is_exact(pair):
    buffer = pair.store.new_buffer()
    fill(buffer.views, NUMBER)
    pair.peer.publish(messages.RunEnded(1, buffer.number, ()), buffer)
    assert numbers(pair.worker.fetch(pair.worker.receive())) == {exactly(NUMBER)}


@formats("bfloat16", "bfloat16")
def test_states_are_exact(pair):
    state = {"momentum": torch.full((5,), NUMBER)}
    pair.peer.send_state(state, "state")
    found = pair.worker.receive_state(pair.worker.receive())
    assert torch.equal(found["momentum"], state["momentum"])


@formats(wire="bfloat16")
def test_what_rounding_cuts_off_is_sent_with_the_next_gradient(pair):
    pair.assign(0.0)
    received = 0.0
    for _ in range(16):
        received += numbers(pair.push(NUMBER)).pop()
        pair.assign(0.0, Fate.ACCEPTED)
    assert received == pytest.approx(16 * NUMBER, abs=2**-8)
    assert abs(16 * rounded(NUMBER, torch.bfloat16) - 16 * NUMBER) > 2**-7


@formats(wire="bfloat16")
@pytest.mark.parametrize("fate", [Fate.LATE, Fate.CANCELLED, Fate.STALE, None])
def test_gradient_that_did_not_count_changes_nothing_about_the_next_one(pair, fate):
    pair.assign(0.0)
    first = numbers(pair.push(NUMBER))
    for _ in range(16):
        pair.assign(0.0, fate)
        assert numbers(pair.push(NUMBER)) == first
