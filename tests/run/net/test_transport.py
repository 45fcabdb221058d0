# SPDX-License-Identifier: BSD-3-Clause
"""The contract that every transport keeps, as one suite that runs over all implementations.

To add a transport, write a class like `SharedMemory` below and add it to `TRANSPORTS`.
"""

import gc
import os
import secrets
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from threading import Thread
from time import monotonic

import pytest
import torch
import torch._dynamo  # an optimizer loads it, and it sets an environment variable
from torch import nn

from paceline.errors import PeerLost, ProtocolError, SpecError
from paceline.run.net import messages
from paceline.run.net.address import listen
from paceline.run.net.channel import OUTBOX_BYTES
from paceline.run.net.handshake import connect, new_token
from paceline.run.net.in_process import InProcessNetwork, InProcessStore
from paceline.run.net.shared_memory import (
    SharedMemoryPeer,
    SharedMemoryStore,
    SharedMemoryWorker,
)
from paceline.run.net.tls import client_context, server_context
from paceline.run.net.transport import Announcement
from paceline.run.server.listener import Listener
from paceline.run.tensors.layout import gather
from tcp_loopback import REPORT, TIMEOUT_S, WELCOME, Tcp


def make_spec():
    """Describe two optimizers, averaged buffers, a counter and a constant."""
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2), nn.Linear(2, 1))
    model[2].bias.requires_grad_(False)
    optimizers = [
        torch.optim.SGD(model[0].parameters(), lr=0.1),
        torch.optim.SGD([*model[1].parameters(), model[2].weight], lr=0.1),
    ]
    return gather([model], optimizers).spec


class SharedMemory:
    """Real Unix sockets, real authentication, real shared memory."""

    def __init__(self, spec):
        self._spec = spec
        self._token = new_token()
        self._address = f"unix:@paceline-test-{secrets.token_hex(8)}"
        self.store = SharedMemoryStore(spec)
        self.connections = Listener(
            [listen(self._address)],
            self._token,
            lambda channel: SharedMemoryPeer(channel, self.store),
        )

    def connect(self):
        """Return both ends of a new connection."""
        with ThreadPoolExecutor(1) as pool:
            connecting = pool.submit(connect, self._address, self._token, TIMEOUT_S)
            while not (peers := self.connections.wait(TIMEOUT_S)):
                pass
            channel = connecting.result()
        return peers[0], SharedMemoryWorker(channel, self._spec)


class Tls(Tcp):
    """The same with TLS."""


class InProcess:
    """Queues inside this process."""

    def __init__(self, spec):
        self.store = InProcessStore(spec)
        self.connections = InProcessNetwork(self.store)

    def connect(self):
        """Return both ends of a new connection."""
        worker = self.connections.connect()
        return self.connections._peers[-1], worker


TRANSPORTS = [SharedMemory, Tcp, Tls, InProcess]


class Connected:
    """A server's end of a transport, and one worker's."""

    def __init__(self, transport):
        self.transport = transport
        self.store, self.connections = transport.store, transport.connections
        self.peer, self.worker = transport.connect()
        self.workers = [self.worker]

    def connect(self):
        """Connect another worker."""
        peer, worker = self.transport.connect()
        self.workers.append(worker)
        return peer, worker

    def receive(self, count, peer=None, worker=None):
        """Return this many messages of the worker, as the server receives them.

        Announced gradients are admitted. `worker`: the end that has to send them meanwhile, unless
        it does so in a thread of its own.
        """
        peer, received = peer or self.peer, []
        give_up_at = monotonic() + TIMEOUT_S
        while len(received) < count:
            assert monotonic() < give_up_at, received
            if worker is not None:
                worker.wait_readable(0.0)
            if peer in self.connections.wait(TIMEOUT_S if worker is None else 0.01):
                received += admitted(peer.receive_nowait())
        return received

    def welcome(self):
        """Let the worker join; return its opened slot and the server's view of it."""
        theirs = self.peer.open_slot(WELCOME)
        assert self.worker.receive() == WELCOME
        return self.worker.open_slot(), theirs

    def new_version(self, value):
        """Return a new buffer that is filled with a value."""
        buffer = self.store.new_buffer()
        fill(buffer.views, value)
        return buffer

    def forget_workers(self):
        """Drop all references to the workers' ends."""
        self.worker = None
        self.workers.clear()
        self.transport.__dict__.get("_workers", []).clear()

    def close(self):
        for worker in self.workers:
            worker.close()
        self.connections.shut_down()
        self.store.close()


@pytest.fixture(params=TRANSPORTS, ids=lambda kind: kind.__name__)
def connected(request):
    contexts = ()
    if request.param is Tls:
        files = request.getfixturevalue("tls_files")
        contexts = server_context(files), client_context(files)
    with closing(Connected(request.param(make_spec(), *contexts))) as connected:
        yield connected


def admitted(received):
    """Yield messages, and admit each gradient that is announced."""
    for message in received:
        if isinstance(message, Announcement):
            message.admit()
        else:
            yield message


def tensors_in(views):
    return [*(p for own in views.parameters for p in own), *views.buffers, *views.counters]


def fill(views, value):
    """Write different numbers, which depend on the value, into all tensors."""
    for i, tensor in enumerate(tensors_in(views)):
        tensor.copy_(torch.arange(tensor.numel()).view(tensor.shape) + 100 * i + 1000 * value)


def contains(views, value, skipped=()):
    """Return whether `fill` with this value made all tensors, but these, what they are."""
    return all(
        torch.equal(
            tensor,
            (torch.arange(tensor.numel()).view(tensor.shape) + 100 * i + 1000 * value).to(
                tensor.dtype
            ),
        )
        for i, tensor in enumerate(tensors_in(views))
        if i not in skipped
    )


def contains_gradient(views, value):
    """Return whether the gradient of optimizer 0 is that of `fill`; others needn't travel."""
    others = range(len(views.parameters[0]), len(views.parameters[0]) + len(views.parameters[1]))
    return contains(views, value, others)


def assign(turn, buffer):
    return messages.Assignment(turn, turn, buffer.number, (turn,), 0.0)


def send_until_lost(peer):
    message = messages.Refused("x" * 4096)
    for _ in range(2 * OUTBOX_BYTES // 4096):
        peer.send(message)


def receive_until_lost(worker):
    """Return the messages that are received before the connection ends."""
    received = []
    try:
        while True:
            received.append(worker.receive())
    except PeerLost:
        return received


# ------------------------------------------------------------------------------ slots and constants


def test_worker_gets_a_writable_slot_with_every_tensor(connected):
    opened, theirs = connected.welcome()
    shapes = [tensor.shape for tensor in tensors_in(opened.slot)]
    assert shapes == [tensor.shape for tensor in tensors_in(theirs)]
    assert [len(own) for own in opened.slot.parameters] == [2, 3]
    fill(opened.slot, 7)
    assert contains(opened.slot, 7)


def test_worker_gets_the_constants(connected):
    [constant] = connected.store.constants
    constant.fill_(2.5)
    opened, _ = connected.welcome()
    assert [c.tolist() for c in opened.constants] == [[2.5]]


def test_delivered_gradient_is_what_the_worker_wrote(connected):
    opened, _ = connected.welcome()
    for turn in range(1, 4):
        fill(opened.slot, turn)
        connected.worker.announce(messages.GradientReport(turn, 0, 0, 1, 0.5, 1.0))
        [report] = connected.receive(1, worker=connected.worker)
        assert report.turn == turn
        assert contains_gradient(connected.peer.delivered(report).slot, turn)


def test_delivered_gradient_stays_valid_while_the_worker_waits(connected):
    opened, _ = connected.welcome()
    fill(opened.slot, 3)
    connected.worker.announce(REPORT)
    [report] = connected.receive(1, worker=connected.worker)
    gradient = connected.peer.delivered(report).slot
    connected.peer.send(messages.CancelTurn(1))
    assert connected.worker.receive() == messages.CancelTurn(1)
    assert contains_gradient(gradient, 3)


def test_delivered_gradient_stays_valid_after_the_worker_is_lost(connected):
    opened, _ = connected.welcome()
    fill(opened.slot, 3)
    connected.worker.announce(REPORT)
    [report] = connected.receive(1, worker=connected.worker)
    gradient = connected.peer.delivered(report).slot
    connected.worker.close()
    connected.connections.close(connected.peer)
    assert contains_gradient(gradient, 3)


def test_slot_before_the_welcome_is_refused(connected):
    with pytest.raises(ProtocolError, match="expected a slot with the server's welcome"):
        connected.worker.open_slot()


def test_slot_stays_the_same_whatever_is_received_later(connected):
    opened, _ = connected.welcome()
    connected.peer.send_state({"a": torch.ones(2)}, "state")
    connected.worker.receive_state(connected.worker.receive())
    buffer = connected.new_version(1)
    connected.peer.publish(assign(1, buffer), buffer)
    connected.worker.receive()
    assert connected.worker.open_slot() is opened


# ---------------------------------------------------------------------------------------- versions


def test_worker_fetches_the_published_version(connected):
    buffers = [connected.new_version(value) for value in range(3)]
    for turn, buffer in enumerate(buffers, 1):
        connected.peer.publish(assign(turn, buffer), buffer)
        message = connected.worker.receive()
        assert message == assign(turn, buffer)
        assert contains(connected.worker.fetch(message), turn - 1)


def test_worker_fetches_the_last_version_at_the_end(connected):
    buffer = connected.new_version(5)
    ended = messages.RunEnded(9, buffer.number, (9,))
    connected.peer.publish(ended, buffer)
    assert connected.worker.receive() == ended
    assert contains(connected.worker.fetch(ended), 5)


def test_same_buffer_is_the_same_object(connected):
    first, second = connected.new_version(1), connected.new_version(2)
    views = []
    for turn, buffer in enumerate((first, second, first, second), 1):
        connected.peer.publish(assign(turn, buffer), buffer)
        views.append(connected.worker.fetch(connected.worker.receive()))
    assert views[0] is views[2]
    assert views[1] is views[3]


def test_next_version_in_the_same_buffer_is_visible_once_it_is_published(connected):
    buffer = connected.new_version(1)
    for value in range(1, 4):
        fill(buffer.views, value)
        connected.peer.publish(assign(value, buffer), buffer)
        assert contains(connected.worker.fetch(connected.worker.receive()), value)


def test_version_stays_unchanged_until_the_next_one_is_received(connected):
    first, second = connected.new_version(1), connected.new_version(0)
    connected.peer.publish(assign(1, first), first)
    views = connected.worker.fetch(connected.worker.receive())
    fill(second.views, 2)
    assert contains(views, 1)
    connected.peer.publish(assign(2, second), second)
    assert contains(views, 1)
    assert contains(connected.worker.fetch(connected.worker.receive()), 2)


def test_parameters_of_other_optimizers_stay_if_only_one_is_loaded(connected):
    first, second = connected.new_version(1), connected.new_version(2)
    connected.peer.publish(assign(1, first), first)
    views = connected.worker.fetch(connected.worker.receive())
    others = [p.clone() for p in views.parameters[0]]
    only_second = messages.Assignment(2, 2, second.number, (2,), 0.0, optimizer=1)
    connected.peer.publish(only_second, second)
    fetched = connected.worker.fetch(connected.worker.receive())
    for found, expected in zip(fetched.parameters[1], second.views.parameters[1], strict=True):
        assert torch.equal(found, expected)
    for kept, expected in zip(views.parameters[0], others, strict=True):
        assert torch.equal(kept, expected)


def test_assignment_never_arrives_before_its_memory(connected):
    """The worker is behind: many new buffers are published before it receives the first."""
    buffers = [connected.new_version(value) for value in range(20)]
    for turn, buffer in enumerate(buffers):
        connected.peer.send(messages.CancelTurn(turn))
        connected.peer.publish(assign(turn, buffer), buffer)
    for turn in range(20):
        assert connected.worker.receive() == messages.CancelTurn(turn)
        message = connected.worker.receive()
        assert message.turn == turn
        assert contains(connected.worker.fetch(message), turn)


def test_buffer_that_was_never_shared_is_refused(connected):
    first, second = connected.new_version(1), connected.new_version(2)
    with pytest.raises(ProtocolError, match="the server has not shared buffer 0"):
        connected.worker.fetch(assign(1, first))
    connected.peer.publish(assign(1, first), first)
    connected.worker.fetch(connected.worker.receive())
    with pytest.raises(ProtocolError, match="the server has not shared buffer 1"):
        connected.worker.fetch(assign(2, second))  # the server has it, but this worker doesn't
    with pytest.raises(ProtocolError, match="the server has not shared buffer 99"):
        connected.worker.fetch(messages.RunEnded(9, 99, (9,)))


def test_accumulators_and_buffers_are_different_memory(connected):
    buffer, other = connected.new_version(1), connected.new_version(2)
    fill(connected.store.new_accumulator(), 3)
    assert contains(buffer.views, 1)
    assert contains(other.views, 2)
    assert (buffer.number, other.number) == (0, 1)
    assert connected.store.size_bytes > 0


# ------------------------------------------------------------------------------------------ states

STATE = {
    "state": {
        0: {
            "nan": torch.tensor([0x7FC00001, -(2**22) + 7], dtype=torch.int32).view(torch.float32),
            "signed zeros": torch.tensor([0.0, -0.0]),
            "half": torch.randn(5).to(torch.bfloat16),
            "large": torch.tensor([2**62 + 1, -1]),
            "mask": torch.tensor([True, False]),
            "empty": torch.zeros(0, 3),
            "scalar": torch.tensor(3.5, dtype=torch.float64),
            "channels last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        },
        1: {},
    },
    "param_groups": [{"lr": 0.1, "betas": [0.9, 0.999], "name": "first", "foreach": None}],
    "count": 2**53,
}


def assert_same(found, expected):
    """Compare nested states bit for bit."""
    assert type(found) is type(expected)
    if isinstance(expected, dict):
        assert list(found) == list(expected)
        for key, value in expected.items():
            assert_same(found[key], value)
    elif isinstance(expected, list):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other)
    elif isinstance(expected, torch.Tensor):
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
        assert found.stride() == expected.stride()
        bits = [t.contiguous().flatten().view(torch.uint8) for t in (found, expected)]
        assert torch.equal(*bits)
    else:
        assert found == expected


def upload(connected, state):
    """Upload a state; return it as the server receives it."""
    connected.worker.send_state(1, state, has_begun=False)
    received = []
    while not received:
        connected.worker.wait_readable(0.0)
        if connected.connections.wait(0.01):
            for message in connected.peer.receive_nowait():
                assert (message.optimizer, message.has_begun) == (1, False)
                received.append(connected.peer.receive_state(message))
    return received[0]


def download(connected, state):
    """Send a state to the worker; return it as the worker receives it."""
    connected.peer.send_state(state, "state")
    reply = connected.worker.receive()
    assert isinstance(reply, messages.StateReply)
    return connected.worker.receive_state(reply)


@pytest.mark.parametrize("transfer", [upload, download])
@pytest.mark.parametrize("state", [STATE, None, [], {}, 1.5], ids=lambda state: str(state)[:4])
def test_state_arrives_bit_for_bit(connected, transfer, state):
    assert_same(transfer(connected, state), state)


@pytest.mark.parametrize("transfer", [upload, download])
def test_tuple_in_a_state_arrives_as_a_list(connected, transfer):
    assert transfer(connected, {"betas": (0.9, (1, 2))}) == {"betas": [0.9, [1, 2]]}


@pytest.mark.parametrize("transfer", [upload, download])
def test_received_state_is_a_copy(connected, transfer):
    tensor = torch.ones(4)
    found = transfer(connected, {"a": tensor, "b": tensor})
    tensor.fill_(2.0)
    assert found["a"].tolist() == [1.0] * 4
    found["a"].fill_(3.0)
    assert tensor.tolist() == [2.0] * 4
    assert found["b"].tolist() == [1.0] * 4


@pytest.mark.parametrize("transfer", [upload, download])
@pytest.mark.parametrize("value", [object(), torch.ones(2).to_sparse(), {1: {2}}])
def test_state_that_cannot_be_sent_raises_and_the_connection_stays(connected, transfer, value):
    with pytest.raises(SpecError):
        transfer(connected, {"a": value})
    assert transfer(connected, {"a": 1}) == {"a": 1}


def test_several_states_keep_their_order(connected):
    for number in range(5):
        connected.peer.send_state({"a": torch.full((3,), float(number))}, "state")
        connected.peer.send(messages.CancelTurn(number))
    for number in range(5):
        state = connected.worker.receive_state(connected.worker.receive())
        assert state["a"].tolist() == [float(number)] * 3
        assert connected.worker.receive() == messages.CancelTurn(number)


def test_reply_without_a_state_is_none(connected):
    connected.peer.send(messages.StateReply(0))
    assert connected.worker.receive_state(connected.worker.receive()) is None


def test_upload_without_memory_breaks_the_protocol(connected):
    upload(connected, {"a": torch.ones(2)})
    connected.worker.send(messages.StateUpload(0, b"\x80"))
    [message] = connected.receive(1)
    with pytest.raises(ProtocolError, match="expected shared memory with a message"):
        connected.peer.receive_state(message)


def test_reply_without_memory_breaks_the_protocol(connected):
    download(connected, {"a": torch.ones(2)})
    connected.peer.send(messages.StateReply(1))
    reply = connected.worker.receive()
    with pytest.raises(ProtocolError, match="expected shared memory with a message"):
        connected.worker.receive_state(reply)


# ------------------------------------------------------------------------------------- the control


def test_control_messages_keep_their_order_in_both_directions(connected):
    count = 300

    def talk():
        for number in range(count):
            connected.worker.send(messages.AbandonReport(number, 0.5))
        return [connected.worker.receive() for _ in range(count)]

    for number in range(count):
        connected.peer.send(messages.CancelTurn(number))
    with ThreadPoolExecutor(1) as pool:
        talking = pool.submit(talk)
        reports = connected.receive(count)
        while not talking.done():
            assert connected.connections.wait(0.001) == []
    assert reports == [messages.AbandonReport(number, 0.5) for number in range(count)]
    assert talking.result() == [messages.CancelTurn(number) for number in range(count)]


def test_server_receives_nothing_if_nothing_was_sent(connected):
    assert connected.connections.wait(0.0) == []
    assert list(connected.peer.receive_nowait()) == []


def test_worker_can_wait_with_a_timeout(connected):
    assert not connected.worker.wait_readable(0.0)
    assert not connected.worker.wait_readable(0.001)
    connected.peer.send(messages.CancelTurn(1))
    assert connected.worker.wait_readable(TIMEOUT_S)
    connected.worker.receive()
    assert not connected.worker.wait_readable(0.0)
    connected.connections.close(connected.peer)
    assert connected.worker.wait_readable(TIMEOUT_S)


@pytest.mark.parametrize(
    "message",
    [[99], [10, -1], {}, None, "text", messages.CancelTurn(1), messages.Hello(2, bytes(32))],
    ids=str,
)
def test_malformed_or_unknown_message_from_a_worker_breaks_the_protocol(connected, message):
    connected.worker.send(messages.AbandonReport(1, 0.5))
    connected.worker.send(message)
    received = []
    with pytest.raises(ProtocolError, match="expected a message from a worker"):
        receive_into(received, connected)
    assert received == [messages.AbandonReport(1, 0.5)]  # the message before it is still handled


def receive_into(received, connected):
    while True:
        assert connected.connections.wait(TIMEOUT_S) == [connected.peer]
        for message in connected.peer.receive_nowait():
            received.append(message)


@pytest.mark.parametrize(
    "message", [[99], [7, -1], {}, None, "text", messages.AbandonReport(1, 0.5)], ids=str
)
def test_malformed_or_unknown_message_from_the_server_breaks_the_protocol(connected, message):
    connected.peer.send(messages.CancelTurn(1))
    connected.peer.send(message)
    assert connected.worker.receive() == messages.CancelTurn(1)
    with pytest.raises(ProtocolError, match="expected a message from the server"):
        connected.worker.receive()


def test_server_never_waits_for_a_slow_worker_and_does_not_lose_it(connected):
    count = 1000
    for number in range(count):
        connected.peer.send(messages.Refused(f"{number}" + "x" * 1000))
    received = []
    reader = Thread(
        target=lambda: received.extend(connected.worker.receive() for _ in range(count))
    )
    reader.start()
    while reader.is_alive():
        assert connected.connections.wait(0.001) == []
    assert [int(m.reason.rstrip("x")) for m in received] == list(range(count))


def test_worker_that_stops_reading_is_lost(connected):
    with pytest.raises(PeerLost, match=r"it has not read the last \d+ bytes"):
        send_until_lost(connected.peer)


def test_process_of_the_worker_is_known_or_none(connected):
    assert connected.peer.pid in (None, os.getpid())
    assert connected.worker.shares_clock == (not isinstance(connected.transport, Tcp))


# -------------------------------------------------------------------------------------- the end


def test_server_learns_that_a_worker_is_lost_after_its_last_message(connected):
    for number in range(3):
        connected.worker.send(messages.AbandonReport(number, 0.5))
    connected.worker.close()
    assert connected.receive(3) == [messages.AbandonReport(number, 0.5) for number in range(3)]
    assert connected.connections.wait(TIMEOUT_S) == [connected.peer]
    with pytest.raises(PeerLost):
        list(connected.peer.receive_nowait())
    connected.connections.close(connected.peer)
    assert connected.connections.wait(0.0) == []


def test_worker_learns_that_the_server_is_lost_after_its_last_message(connected):
    buffer = connected.new_version(1)
    connected.peer.publish(assign(1, buffer), buffer)
    connected.peer.send(messages.CancelTurn(1))
    connected.connections.shut_down()
    message = connected.worker.receive()
    assert contains(connected.worker.fetch(message), 1)
    assert receive_until_lost(connected.worker) == [messages.CancelTurn(1)]
    with pytest.raises(PeerLost):
        connected.worker.receive()


def test_refused_worker_receives_the_reason_last(connected):
    connected.peer.send(messages.CancelTurn(1))
    connected.connections.close(connected.peer, "the reason")
    expected = [messages.CancelTurn(1), messages.Refused("the reason")]
    assert receive_until_lost(connected.worker) == expected


def test_waiting_worker_wakes_up_when_the_server_is_lost(connected):
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(connected.worker.receive)
        connected.connections.close(connected.peer)
        with pytest.raises(PeerLost):
            waiting.result(TIMEOUT_S)


def test_waiting_server_wakes_up_when_a_message_arrives(connected):
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(connected.connections.wait, TIMEOUT_S)
        connected.worker.send(messages.AbandonReport(1, 0.5))
        assert waiting.result(TIMEOUT_S) == [connected.peer]


def test_sending_to_a_lost_worker_raises_peer_lost(connected):
    buffer = connected.new_version(1)
    connected.worker.close()
    for send in (
        lambda: connected.peer.send(messages.CancelTurn(1)),
        lambda: connected.peer.publish(assign(1, buffer), buffer),
        lambda: connected.peer.open_slot(WELCOME),
        lambda: connected.peer.send_state({"a": 1}, "state"),
    ):
        assert_lost_soon(send)


def assert_lost_soon(send):
    """Expect PeerLost: at the first call, or, as with TCP, at one of the next."""
    with pytest.raises(PeerLost):
        send_often(send)


def send_often(send):
    for _ in range(1000):
        send()


def test_sending_to_a_lost_server_raises_peer_lost(connected):
    connected.connections.close(connected.peer)
    for send in (
        lambda: connected.worker.send(messages.AbandonReport(1, 0.5)),
        lambda: connected.worker.announce(REPORT),
        lambda: connected.worker.send_state(0, {"a": 1}, has_begun=True),
    ):
        assert_lost_soon(send)


@pytest.mark.parametrize("connected", [SharedMemory, Tcp, Tls], indirect=True)  # with sockets
@pytest.mark.parametrize("side", ["server", "worker"])
def test_slot_is_freed_after_a_loss_without_the_garbage_collector(connected, side):
    opened, theirs = connected.welcome()
    if side == "server":
        slot = weakref.ref(tensors_in(theirs)[0])
        connected.worker.close()
        assert_lost_soon(lambda: connected.peer.send(messages.CancelTurn(1)))
        assert_lost_soon(lambda: list(connected.peer.receive_nowait()))
        connected.connections.close(connected.peer)
        connected.peer = None
    else:
        slot = weakref.ref(tensors_in(opened.slot)[0])
        connected.connections.close(connected.peer)
        assert_lost_soon(lambda: connected.worker.send(messages.AbandonReport(1, 0.5)))
        assert receive_until_lost(connected.worker) == []
        connected.worker.close()
        connected.forget_workers()
    connected.connections.wait(0.0)  # the connections that had news before are forgotten
    gc.disable()
    try:
        del opened, theirs
        assert slot() is None
    finally:
        gc.enable()


def test_closing_twice_is_harmless(connected):
    for _ in range(2):
        connected.worker.close()
        connected.peer.close()
        connected.connections.close(connected.peer, "reason")
    connected.connections.close(connected.peer)
    before = os.listdir("/proc/self/fd")
    connected.store.close()
    files = [os.open("/dev/null", os.O_RDONLY) for _ in range(8)]  # may reuse the closed numbers
    connected.store.close()
    for fd in files:
        os.close(fd)  # raises if the store closed it
    assert len(os.listdir("/proc/self/fd")) <= len(before)


def test_memory_stays_valid_after_everything_is_closed(connected):
    opened, _ = connected.welcome()
    buffer = connected.new_version(1)
    connected.peer.publish(assign(1, buffer), buffer)
    views = connected.worker.fetch(connected.worker.receive())
    fill(opened.slot, 2)
    connected.worker.announce(REPORT)
    gradient = connected.peer.delivered(*connected.receive(1, worker=connected.worker)).slot
    connected.close()
    assert contains(views, 1)
    assert contains(buffer.views, 1)
    assert contains(opened.slot, 2)
    assert contains_gradient(gradient, 2)


# --------------------------------------------------------------------------------------- many peers


def test_many_workers_compute_concurrently(connected):
    """Each worker multiplies the version it was assigned by its number, and delivers the result."""
    others = [connected.connect() for _ in range(7)]
    pairs = [(connected.peer, connected.worker), *others]
    buffers = [connected.new_version(value) for value in range(3)]

    def compute(number, worker):
        assert worker.receive() == WELCOME
        slot = worker.open_slot().slot
        while isinstance(message := worker.receive(), messages.Assignment):
            views = worker.fetch(message)
            for target, source in zip(tensors_in(slot), tensors_in(views), strict=True):
                target.copy_(source * (number + 1))
            worker.announce(messages.GradientReport(message.turn, 0, 0, 1, 0.5, 1.0))
        return message

    with ThreadPoolExecutor(len(pairs)) as pool:
        computing = [pool.submit(compute, i, worker) for i, (_, worker) in enumerate(pairs)]
        for peer, _ in pairs:
            peer.open_slot(WELCOME)
        for turn, buffer in enumerate(buffers):
            for peer, _ in pairs:
                peer.publish(assign(turn, buffer), buffer)
            for number, (peer, _) in enumerate(pairs):
                check_delivered(connected, peer, buffer, number + 1)
        for peer, _ in pairs:
            ended = messages.RunEnded(3, buffers[-1].number, (3,))
            peer.publish(ended, buffers[-1])
        assert [future.result(TIMEOUT_S) for future in computing] == [ended] * len(pairs)


def check_delivered(connected, peer, buffer, factor):
    [report] = connected.receive(1, peer)
    gradient = peer.delivered(report).slot
    for found, source in zip(gradient.parameters[0], buffer.views.parameters[0], strict=True):
        assert torch.equal(found, source * factor)


def test_losing_one_worker_leaves_the_others(connected):
    peer, worker = connected.connect()
    connected.worker.close()
    assert connected.connections.wait(TIMEOUT_S) == [connected.peer]
    connected.connections.close(connected.peer)
    worker.send(messages.AbandonReport(1, 0.5))
    assert connected.receive(1, peer) == [messages.AbandonReport(1, 0.5)]
    peer.send(messages.CancelTurn(1))
    assert worker.receive() == messages.CancelTurn(1)


def test_workers_see_only_their_own_slots(connected):
    other_peer, other = connected.connect()
    opened, _ = connected.welcome()
    other_peer.open_slot(WELCOME)
    other.receive()
    fill(opened.slot, 1)
    fill(other.open_slot().slot, 2)
    for worker in (connected.worker, other):
        worker.announce(REPORT)
    [report] = connected.receive(1, worker=connected.worker)
    [other_report] = connected.receive(1, other_peer, worker=other)
    assert contains_gradient(connected.peer.delivered(report).slot, 1)
    assert contains_gradient(other_peer.delivered(other_report).slot, 2)
