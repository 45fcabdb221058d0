# SPDX-License-Identifier: BSD-3-Clause
"""The head's ends to an agent and its workers: what travels, and what is kept.

`tests/run/server/test_host_agent.py` has both sides together, over sockets.
"""

import pytest
import torch
from torch import nn

from paceline.errors import InternalError, PeerLost
from paceline.run.net import messages
from paceline.run.net.host_messages import HostVersion, HostWelcome, SendSum, SumSpoiled
from paceline.run.net.host_peer import HostedPeer, HostPeer
from paceline.run.net.shared_memory import SharedMemoryStore
from paceline.run.tensors.layout import gather

SESSION = b"s" * 32
WELCOME = messages.Welcome(2, "", 0, False, False)


class Control:
    """A control connection that keeps what is sent."""

    def __init__(self):
        self.sent = []
        self.incoming = []

    def send(self, message):
        self.sent.append(message)

    def take(self, kind):
        found = [one for one in self.sent if isinstance(one, kind)]
        self.sent = [one for one in self.sent if not isinstance(one, kind)]
        return found

    def receive_nowait(self):
        incoming, self.incoming = self.incoming, []
        return iter(incoming)

    def wait_readable(self, timeout_s):
        return bool(self.incoming)

    def close(self):
        pass


class Stream:
    """A data connection that takes everything, or nothing."""

    def __init__(self):
        self.is_held = False
        self.sent_bytes = 0

    def send(self, buffers):
        count = 0 if self.is_held else sum(map(len, buffers))
        self.sent_bytes += count
        return count

    def receive_into(self, space):
        return 0

    def has_unread(self):
        return False

    def close(self):
        pass


class Bench:
    """An agent with some workers, as the head has them."""

    def __init__(self, workers=2):
        model = nn.Linear(4, 3)
        self.store = SharedMemoryStore(
            gather([model], [torch.optim.SGD(model.parameters(), lr=1.0)]).spec
        )
        self.control, self.stream = Control(), Stream()
        self.agent = HostPeer(self.control, self.store, SESSION)
        self.agent.attach(self.stream)
        self.agent.welcome(HostWelcome("exact", "exact"))
        self.controls = [Control() for _ in range(workers)]
        self.workers = [
            HostedPeer(control, self.store, bytes([i]) * 32, self.agent)
            for i, control in enumerate(self.controls)
        ]
        for number, worker in enumerate(self.workers):
            worker.open_slot(messages.Welcome(2, "", 0, False, False, worker=number))
        self.buffer = self.store.new_buffer()

    def publish(self, worker, version=0, optimizer=None):
        """Publish a version to a worker; return what the agent is told."""
        assignment = messages.Assignment(1, version, 0, (0,), 0.0, optimizer)
        self.workers[worker].publish(assignment, self.buffer)
        return self.control.take(HostVersion)

    def report(self, worker, turn=1):
        """Let a worker report its gradient; return the announcement."""
        report = messages.GradientReport(turn, 0, 0, 1 + worker, 0.1, 1.0)
        self.controls[worker].incoming.append(report)
        [announcement] = self.workers[worker].receive_nowait()
        return announcement


@pytest.fixture
def bench():
    bench = Bench()
    yield bench
    bench.store.close()


def test_agent_is_welcomed_with_the_formats_on_the_wire(bench):
    [welcome] = bench.control.take(HostWelcome)
    assert (welcome.wire, welcome.servers) == ("exact", ())


def test_version_is_sent_once_for_all_workers(bench):
    [told] = bench.publish(0)
    assert (told.payload, told.version, told.worker, told.keep) == (1, 0, None, ())
    sent = bench.stream.sent_bytes
    assert bench.publish(1) == []
    assert bench.stream.sent_bytes == sent
    assert [len(control.take(messages.Assignment)) for control in bench.controls] == [1, 1]


def test_version_that_a_worker_still_uses_is_kept(bench):
    bench.publish(0)
    bench.publish(1)
    bench.report(0)
    [told] = bench.publish(0, version=1)
    assert told.keep == (1,)
    bench.report(1)
    [told] = bench.publish(1, version=2)
    assert told.keep == (2,)


def test_parameters_of_one_optimizer_are_sent_to_one_worker(bench):
    bench.publish(0)
    bench.report(0)
    [told] = bench.publish(0, version=1, optimizer=0)
    assert (told.worker, told.optimizer, told.keep) == (0, 0, (1,))


def test_version_that_only_a_lost_worker_wanted_is_sent_no_further(bench):
    bench.stream.is_held = True
    bench.publish(0)
    bench.workers[0].close()
    bench.stream.is_held = False
    [told] = bench.publish(1)
    assert told.payload == 2


def test_version_that_another_worker_wants_goes_on(bench):
    bench.publish(0)
    bench.publish(1)
    bench.workers[0].close()
    assert bench.publish(1) == []


def test_worker_cannot_get_a_version_before_its_agent_has_a_data_connection(bench):
    lonely = HostPeer(Control(), bench.store, SESSION)
    worker = HostedPeer(Control(), bench.store, SESSION, lonely)
    with pytest.raises(PeerLost, match="the agent of its host has no data connection"):
        worker.publish(messages.Assignment(1, 0, 0, (0,), 0.0), bench.buffer)


def test_sum_is_asked_for_in_the_order_of_workers(bench):
    reports = [bench.report(number).report for number in (0, 1)]
    asked = bench.agent.ask((1, 0), (reports[1], reports[0]))
    assert (asked.workers, asked.reports) == ((0, 1), tuple(reports))
    [message] = bench.control.take(SendSum)
    assert (message.workers, message.samples) == ((0, 1), (1, 2))


def test_only_one_sum_is_under_way(bench):
    bench.agent.ask((0,), (bench.report(0).report,))
    with pytest.raises(InternalError, match="one sum at a time"):
        bench.agent.ask((1,), (bench.report(1).report,))


def test_sum_that_is_stopped_makes_room_for_another(bench):
    asked = bench.agent.ask((0,), (bench.report(0).report,))
    bench.agent.stop(asked)
    assert [one.payload for one in bench.control.take(messages.StopPayload)] == [1]
    bench.agent.stop(asked)
    assert bench.control.take(messages.StopPayload) == []
    assert bench.agent.ask((1,), (bench.report(1).report,)).payload == 2


def test_sum_is_delivered_in_the_name_of_its_first_worker(bench):
    reports = [bench.report(number).report for number in (0, 1)]
    asked = bench.agent.ask((0, 1), reports)
    assert bench.agent.slot_worker is None
    bench.agent.take(asked)
    assert bench.agent.slot_worker == 0
    first, second = (w.delivered(r) for w, r in zip(bench.workers, reports, strict=True))
    assert first.slot is bench.agent.slot
    assert second.slot is None
    assert asked.report_of(1) is reports[1]


def test_gradient_of_a_hosted_worker_is_never_admitted_alone(bench):
    with pytest.raises(InternalError):
        bench.report(0).admit()


def test_workers_that_spoil_a_sum_are_those_that_were_asked(bench):
    asked = bench.agent.ask((1,), (bench.report(1).report,))
    assert bench.agent.spoilers(SumSpoiled(asked.payload, (0, 1))) == [1]
    assert bench.agent.spoilers(SumSpoiled(asked.payload + 1, (1,))) == []


def test_bytes_of_the_host_count_for_the_worker_that_asks_first(bench):
    bench.publish(0)
    assert bench.workers[1].take_moved().to_worker == bench.stream.sent_bytes
    assert bench.workers[0].take_moved().to_worker == 0
