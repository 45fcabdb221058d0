# SPDX-License-Identifier: BSD-3-Clause
"""A worker's end between hosts, on connections that the test controls byte by byte."""

from contextlib import closing

import pytest
import torch
from torch import nn

from paceline.errors import PeerLost, ProtocolError
from paceline.run.net import messages
from paceline.run.net.payload_stream import PayloadReceiver, PayloadSender, Span
from paceline.run.net.tcp import spans_of
from paceline.run.net.tcp_worker import TcpWorker
from paceline.run.system import System
from paceline.run.tensors.layout import gather
from tcp_loopback import REPORT, Tcp, assign, pump, state_of_size

SIZE = 64


class Control:
    """A control connection in memory."""

    def __init__(self, wire):
        self.wire = wire
        self.sent = []
        self.arrived = []  # messages, or an exception
        self.waits = []  # the timeouts of all calls of `wait`

    def send(self, message):
        self.sent.append(message)

    def wait(self, wishes, timeout_s):
        self.waits.append(timeout_s)
        self.wire.pass_time(wishes, timeout_s)
        return wishes.message and bool(self.arrived)

    def receive_nowait(self):
        while self.arrived:
            message = self.arrived.pop(0)
            if isinstance(message, Exception):
                raise message
            yield message

    def close(self):
        pass


class Stream:
    """A data connection in memory."""

    def __init__(self):
        self.incoming = bytearray()
        self.outgoing = bytearray()
        self.takes = 1 << 30  # bytes that it takes before it blocks
        self.ends_with = None  # an exception, once everything was received

    def fileno(self):
        raise AssertionError("this stream has no descriptor")

    def send(self, buffers):
        if self.ends_with is not None:
            raise self.ends_with
        data = b"".join(buffers)[: self.takes]
        self.takes -= len(data)
        self.outgoing += data
        return len(data)

    def receive_into(self, space):
        count = min(len(space), len(self.incoming))
        if not count and self.ends_with is not None:
            raise self.ends_with
        space[:count] = self.incoming[:count]
        del self.incoming[:count]
        return count

    def close(self):
        pass


class Wire:
    """A worker's end, and what the server sends to it."""

    def __init__(self, spec):
        self.now = 100.0
        self.later = []  # actions, each while the worker waits
        self.control, self.stream = Control(self), Stream()
        system = System(monotonic=lambda: self.now)
        self.worker = TcpWorker(self.control, self.stream, spec, system=system)
        self._payloads = 0

    def pass_time(self, wishes, timeout_s):
        """Let something happen while the worker waits, or time pass."""
        if self.later:
            self.later.pop(0)()
        elif not self.control.arrived and not (wishes.to_receive and self.stream.incoming):
            assert timeout_s is not None, "the worker would wait forever"
            self.now += timeout_s

    def publish(self, message, value):
        """Send a message; return the bytes of its version, which fill the parameters."""
        self.control.arrived.append(message)
        return self.payload(torch.full((SIZE // 4,), float(value)))

    def publish_cancelled(self, message):
        """Send a message; return the bytes of a version that is cancelled before it begins."""
        self.control.arrived.append(message)
        return self.payload(torch.zeros(SIZE // 4), is_cancelled=True)

    def payload(self, tensor, *, is_cancelled=False):
        """Return the bytes of the next payload."""
        self._payloads += 1
        sender, sent = PayloadSender(), bytearray()
        sender.add(self._payloads, spans_of([tensor]))
        if is_cancelled:
            sender.cancel(self._payloads)
        while sender:
            data = b"".join(sender.pending())
            sender.sent(len(data))
            sent += data
        return bytes(sent)


@pytest.fixture(scope="module")
def spec():
    return state_of_size(SIZE).spec


@pytest.fixture
def wire(spec):
    made = Wire(spec)
    yield made
    made.worker.close()


def weight(views):
    [[tensor]] = views.parameters
    return tensor


def value_of(views):
    [value] = set(weight(views).flatten().tolist())
    return value


# ---------------------------------------------------------------------------------------- versions


def test_message_is_received_when_its_payload_is_complete(wire):
    data = wire.publish(assign(1), 3)
    wire.stream.incoming += data[:-1]
    assert not wire.worker.wait_readable(0.0)
    wire.stream.incoming += data[-1:]
    assert wire.worker.wait_readable(0.0)
    message = wire.worker.receive()
    assert message == assign(1)
    assert value_of(wire.worker.fetch(message)) == 3.0


def test_message_without_a_payload_waits_behind_one_with_a_payload(wire):
    data = wire.publish(assign(1), 3)
    wire.control.arrived.append(messages.CancelTurn(1))
    assert not wire.worker.wait_readable(0.0)
    wire.stream.incoming += data
    assert [wire.worker.receive(), wire.worker.receive()] == [assign(1), messages.CancelTurn(1)]


def test_next_version_is_not_received_before_the_last_one_was(wire):
    """Both use the same memory."""
    first, second = wire.publish(assign(1), 1), wire.publish(assign(2), 2)
    wire.stream.incoming += first + second
    assert wire.worker.wait_readable(0.0)
    assert wire.worker.wait_readable(0.0)
    assert value_of(wire.worker.fetch(wire.worker.receive())) == 1.0
    assert value_of(wire.worker.fetch(wire.worker.receive())) == 2.0


def test_cancelled_version_is_none_and_the_next_one_is_complete(wire):
    wire.stream.incoming += wire.publish_cancelled(assign(1))
    cancelled = wire.worker.receive()
    assert cancelled == assign(1)
    assert wire.worker.fetch(cancelled) is None
    wire.stream.incoming += wire.publish(assign(2), 2)
    message = wire.worker.receive()
    assert value_of(wire.worker.fetch(message)) == 2.0


def test_end_of_the_run_behind_a_cancelled_version_is_complete(wire):
    wire.stream.incoming += wire.publish_cancelled(assign(1))
    ended = messages.RunEnded(1, 0, (1,))
    wire.stream.incoming += wire.publish(ended, 7)
    assert wire.worker.fetch(wire.worker.receive()) is None
    assert value_of(wire.worker.fetch(wire.worker.receive())) == 7.0


def test_constants_come_with_the_welcome():
    model = nn.Linear(2, 1)
    model.bias.requires_grad_(False)
    spec = gather([model], [torch.optim.SGD([model.weight], lr=0.1)]).spec
    wire = Wire(spec)
    with closing(wire.worker):
        welcome = messages.Welcome(2, "", 0, False, False)
        wire.control.arrived.append(welcome)
        assert not wire.worker.wait_readable(0.0)
        wire.stream.incoming += wire.payload(torch.tensor([2.5]))
        assert wire.worker.receive() == welcome
        assert [c.tolist() for c in wire.worker.open_slot().constants] == [[2.5]]


# ------------------------------------------------------------------------------------------ waiting


def test_wait_takes_the_whole_time_although_bytes_trickle_in(wire):
    data = wire.publish(assign(1), 3)

    def arrive(begin):
        wire.now += 0.25
        wire.stream.incoming += data[begin : begin + 1]

    wire.later = [lambda begin=begin: arrive(begin) for begin in range(3)]
    assert not wire.worker.wait_readable(2.0)
    assert wire.now == 102.0
    assert wire.control.waits == [2.0, 1.75, 1.5, 1.25]


def test_wait_ends_when_the_message_is_complete(wire):
    data = wire.publish(assign(1), 3)

    def arrive():
        wire.now += 0.5
        wire.stream.incoming += data

    wire.later = [arrive]
    assert wire.worker.wait_readable(2.0)
    assert wire.now == 100.5


def test_wait_without_a_timeout_looks_once(wire):
    """Also on a clock that stands still, as that of a simulation does."""
    assert not wire.worker.wait_readable(0.0)
    assert wire.control.waits == [0.0]
    wire.control.arrived.append(messages.CancelTurn(1))
    assert wire.worker.wait_readable(0.0)


def test_worker_sends_a_gradient_while_it_waits(wire):
    wire.worker.announce(REPORT)
    assert wire.control.sent == [REPORT]
    wire.control.arrived.append(messages.SendPayload(1))
    wire.stream.takes = 30
    assert not wire.worker.wait_readable(0.0)
    assert len(wire.stream.outgoing) == 30
    wire.stream.takes = 1000
    assert not wire.worker.wait_readable(0.0)
    assert len(wire.stream.outgoing) == 16 + SIZE


@pytest.mark.parametrize("before", [[], [messages.SendPayload(7)], [messages.StopPayload(7)]])
def test_nothing_is_sent_for_a_gradient_that_was_not_asked_for(wire, before):
    wire.control.arrived += before
    wire.worker.announce(REPORT)
    assert not wire.worker.wait_readable(0.0)
    assert not wire.stream.outgoing


def test_gradient_that_is_stopped_before_it_was_asked_for_is_never_sent(wire):
    wire.worker.announce(REPORT)
    wire.control.arrived += [messages.StopPayload(1), messages.SendPayload(1)]
    assert not wire.worker.wait_readable(0.0)
    assert not wire.stream.outgoing
    wire.worker.announce(REPORT)
    wire.control.arrived.append(messages.SendPayload(2))
    assert not wire.worker.wait_readable(0.0)
    assert len(wire.stream.outgoing) == 16 + SIZE


def test_gradient_that_is_stopped_right_after_it_was_asked_for_is_cancelled(wire):
    wire.worker.announce(REPORT)
    wire.control.arrived += [messages.SendPayload(1), messages.StopPayload(1)]
    assert not wire.worker.wait_readable(0.0)
    receiver, memory = PayloadReceiver(), bytearray(SIZE)
    receiver.expect(1, [Span(memoryview(memory))])
    assert len(wire.stream.outgoing) == 16
    receiver.space()[:] = wire.stream.outgoing
    assert receiver.received(16).is_complete is False


def test_next_gradient_is_sent_behind_the_chunk_of_one_that_was_stopped(wire):
    wire.worker.announce(REPORT)
    wire.control.arrived.append(messages.SendPayload(1))
    wire.stream.takes = 20
    wire.worker.wait_readable(0.0)
    wire.control.arrived.append(messages.StopPayload(1))
    wire.worker.wait_readable(0.0)
    wire.worker.announce(REPORT)
    wire.control.arrived.append(messages.SendPayload(2))
    wire.stream.takes = 1000
    wire.worker.wait_readable(0.0)
    assert len(wire.stream.outgoing) == 2 * (16 + SIZE)


# ------------------------------------------------------------------------------------------- losses


def receive_all(worker):
    """Return the messages that are received before the loss, and the loss."""
    found = []
    try:
        while True:
            found.append(worker.receive())
    except (PeerLost, ProtocolError) as error:
        return found, error


def test_messages_before_the_loss_of_the_control_connection_are_received_first(wire):
    data = wire.publish(assign(1), 1)
    wire.control.arrived += [messages.CancelTurn(1), PeerLost("gone")]
    wire.stream.incoming += data
    found, error = receive_all(wire.worker)
    assert found == [assign(1), messages.CancelTurn(1)]
    assert repr(error) == repr(PeerLost("gone"))


def test_versions_before_the_loss_of_the_control_connection_are_received_first(wire):
    data = wire.publish(assign(1), 1) + wire.publish(messages.RunEnded(2, 0, (2,)), 2)
    wire.control.arrived.append(PeerLost("gone"))
    wire.later = [lambda: None, lambda: wire.stream.incoming.extend(data)]
    assert value_of(wire.worker.fetch(wire.worker.receive())) == 1.0
    assert wire.worker.wait_readable(0.0)
    assert value_of(wire.worker.fetch(wire.worker.receive())) == 2.0
    with pytest.raises(PeerLost, match="gone"):
        wire.worker.receive()


def test_version_that_never_becomes_complete_is_lost(wire):
    data = wire.publish(assign(1), 1)
    wire.stream.incoming += data[:30]
    wire.stream.ends_with = PeerLost("cut off")
    assert wire.worker.wait_readable(0.0)
    with pytest.raises(PeerLost, match="cut off"):
        wire.worker.receive()
    with pytest.raises(PeerLost, match="cut off"):
        wire.worker.receive()


def test_reason_that_arrives_with_the_loss_of_the_data_connection_is_received(wire):
    """The server sends it on the control connection, and closes both."""
    wire.worker.announce(REPORT)
    wire.control.arrived.append(messages.SendPayload(1))
    wire.stream.takes = 20
    wire.worker.wait_readable(0.0)
    wire.stream.ends_with = PeerLost("cut off")
    reason = messages.Refused("the reason")
    wire.later = [lambda: None, lambda: wire.control.arrived.append(reason)]
    found, error = receive_all(wire.worker)
    assert found == [messages.Refused("the reason")]
    assert str(error) == "cut off"


def test_reason_behind_a_version_that_never_came_is_received(wire):
    data = wire.publish(assign(1), 1)
    wire.control.arrived.append(messages.Refused("the reason"))
    wire.stream.incoming += data[:30]
    wire.stream.ends_with = PeerLost("cut off")
    found, error = receive_all(wire.worker)
    assert found == [messages.Refused("the reason")]
    assert str(error) == "cut off"


def test_malformed_message_is_an_error_after_those_before_it(wire):
    wire.control.arrived += [messages.CancelTurn(1), ProtocolError("malformed")]
    found, error = receive_all(wire.worker)
    assert found == [messages.CancelTurn(1)]
    assert isinstance(error, ProtocolError)


def test_bytes_that_are_no_payload_break_the_protocol(wire):
    wire.publish(assign(1), 1)
    wire.stream.incoming += b"\xff" * 16
    with pytest.raises(ProtocolError, match="wasn't expected"):
        wire.worker.receive()


def test_loss_is_readable(wire):
    wire.control.arrived.append(PeerLost("gone"))
    assert wire.worker.wait_readable(5.0)
    assert wire.worker.wait_readable(0.0)
    assert wire.now == 100.0


def test_reply_without_its_state_breaks_the_protocol(wire):
    with pytest.raises(ProtocolError, match="expected shared memory with a message"):
        wire.worker.receive_state(messages.StateReply(1, 5))


# ------------------------------------------------------------------------------ over real sockets


def test_waiting_worker_wakes_up_for_every_part_of_a_version():
    """A version larger than the sockets' buffers needs both sides in turn."""
    spec = state_of_size(32 << 20).spec
    with closing(Tcp(spec)) as tcp:
        peer, worker, _ = tcp.join()
        buffer = tcp.store.new_buffer()
        weight(buffer.views).fill_(1.0)
        peer.publish(assign(1), buffer)
        for _ in pump(tcp):
            if worker.wait_readable(0.001):
                break
        assert weight(worker.fetch(worker.receive())).eq(1.0).all()


def test_worker_without_anything_to_receive_waits_for_the_time_given():
    with closing(Tcp(state_of_size(SIZE).spec)) as tcp:
        _, worker, _ = tcp.join()
        assert not worker.wait_readable(0.01)
        assert not worker.shares_clock
