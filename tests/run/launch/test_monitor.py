# SPDX-License-Identifier: BSD-3-Clause
"""What the launcher knows about its run, from the reports of a fake server."""

import select

import pytest

from paceline.run.launch import monitor as monitor_module
from paceline.run.launch.monitor import End, RunMonitor
from paceline.run.launch.watch_channel import dialer
from paceline.run.net.address import accept, listen
from paceline.run.net.channel import STRANGER_LIMIT, Channel
from paceline.run.net.handshake import Challenger, new_token
from paceline.run.net.messages import (
    Hello,
    RunProgress,
    Watch,
    WorkerUnavailable,
    decode_stranger,
    decode_worker,
)
from paceline.trace.schema import FINISHED, STOPPED

PATIENCE_S = 60


class FakeServer:
    """A server that reports whatever the test wants."""

    def __init__(self, address, token):
        self._token = token
        self._listening = listen(address)
        self._channel = None

    def greet(self, monitor):
        """Accept the monitor's connection, and authenticate both sides."""
        monitor.connect()
        select.select([self._listening], [], [], PATIENCE_S)
        sock = accept(self._listening)
        sock.setblocking(True)
        self._channel = Channel(sock, decode_stranger, STRANGER_LIMIT)
        challenger = Challenger(self._token)
        hello = self._channel.receive()
        assert isinstance(hello, Hello)
        self._channel.send(challenger.answer(hello))
        monitor.receive()
        challenger.check(self._channel.receive())
        self._channel.trust(decode_worker)

    def receive(self):
        """Return the next message."""
        return self._channel.receive()

    def report(self, request, version=0, **values):
        """Send a report."""
        usual = {
            "accepted": {},
            "here": (),
            "left": {},
            "is_over": False,
            "have_scripts_ended": False,
        }
        self._channel.send(RunProgress(request, version, **{**usual, **values}))

    def die(self):
        """Close everything, as the system does for a process that was killed."""
        if self._channel is not None:
            self._channel.close()
        self._listening.close()


@pytest.fixture
def monitor(identity, selector):
    monitor = RunMonitor(dialer(identity, selector))
    monitor.on_server_start()
    yield monitor
    monitor.close()


@pytest.fixture
def start_server(identity):
    servers = []

    def start():
        servers.append(FakeServer(identity.address, identity.token()))
        return servers[-1]

    yield start
    for server in servers:
        server.die()


def test_missing_server_is_tried_again(monitor, selector):
    assert monitor.retry_at is not None
    monitor.connect()
    assert monitor.retry_at is not None
    assert not monitor.was_served
    assert not selector.get_map()


def test_connection_asks_for_the_progress(monitor, start_server, selector):
    server = start_server()
    server.greet(monitor)
    assert monitor.retry_at is None
    assert len(selector.get_map()) == 1
    assert server.receive() == Watch(1, waits=False)
    server.report(1, 3, accepted={0: 2, 1: 1}, here=(0,), left={1: 2})
    assert not monitor.is_serving
    monitor.receive()
    assert (monitor.is_serving, monitor.was_served) == (True, True)
    assert (monitor.version, monitor.accepted, monitor.left) == (3, {0: 2, 1: 1}, {1: 2})
    assert server.receive() == Watch(2, waits=True)  # for the next news


def test_last_update_is_not_yet_the_end(monitor, start_server):
    server = start_server()
    server.greet(monitor)
    server.report(1, 2, is_over=True)
    monitor.receive()
    assert (monitor.is_over, monitor.end) == (True, None)
    assert monitor.over_since == monitor.heard_at
    server.report(0, 2, is_over=True, ended_at=2, end_reason=FINISHED)
    monitor.receive()
    assert monitor.end == End(2, FINISHED)
    assert monitor.is_finished


def test_end_that_is_sent_right_before_the_server_exits_is_not_lost(monitor, start_server):
    server = start_server()
    server.greet(monitor)
    for version in range(100):
        server.report(1, version, here=tuple(range(99)))  # more than is read at once
    server.report(0, 100, is_over=True, have_scripts_ended=True, ended_at=100, end_reason=STOPPED)
    server.die()
    monitor.on_server_exit()  # which sends another request after the first report, and fails
    assert monitor.end == End(100, STOPPED)
    assert (monitor.have_scripts_ended, monitor.is_finished) == (True, False)
    assert monitor.retry_at is None


def test_monitor_keeps_its_numbers_when_the_server_dies(monitor, start_server):
    server = start_server()
    server.greet(monitor)
    server.report(1, 8, accepted={0: 8, 1: 5}, here=(0,), left={1: 5}, is_over=True)
    server.die()
    monitor.on_server_exit()
    monitor.on_server_start()
    assert (monitor.version, monitor.is_over, monitor.end) == (8, True, None)
    assert (monitor.is_serving, monitor.was_served) == (False, True)
    assert monitor.left == {1: 5}


def test_next_server_counts_on_top_of_the_last_one(monitor, start_server):
    first = start_server()
    first.greet(monitor)
    first.report(1, 8, accepted={0: 8, 1: 5}, here=(0,), left={1: 5, 2: 6})
    first.die()
    monitor.on_server_exit()
    monitor.on_server_start()
    second = start_server()
    second.greet(monitor)
    assert second.receive() == Watch(1, waits=False)
    second.report(1, 5, accepted={0: 1}, here=(0, 1))
    monitor.receive()
    assert monitor.version == 8  # the highest ever
    assert monitor.accepted == {0: 9, 1: 5}
    assert monitor.left == {2: 6}  # worker 1 is back
    assert not monitor.is_over
    second.report(1, 6, accepted={0: 2}, here=(0,), left={1: 6})
    monitor.receive()
    assert (monitor.accepted, monitor.left) == ({0: 10, 1: 5}, {1: 6, 2: 6})


def test_workers_are_not_waited_for_while_the_result_is_written(monitor, start_server):
    """They may still be needed: if this server dies, the next one may have lost the last update."""
    first = start_server()
    first.greet(monitor)
    first.report(1, 8, is_over=True, is_saving=True)
    monitor.receive()
    assert monitor.over_since is None
    first.die()
    monitor.on_server_exit()
    monitor.on_server_start()
    assert (monitor.is_over, monitor.over_since) == (True, None)
    second = start_server()
    second.greet(monitor)
    for is_told in (False, True):
        second.report(1, 8, is_over=is_told, is_told=is_told)
        monitor.receive()
        assert monitor.over_since == (monitor.heard_at if is_told else None)


def test_lost_connection_is_made_again(monitor, start_server):
    server = start_server()
    server.greet(monitor)
    server.die()
    monitor.receive()
    assert monitor.retry_at is not None
    again = start_server()
    again.greet(monitor)
    assert again.receive() == Watch(1, waits=False)


def test_server_with_another_token_is_ignored(monitor, start_server, identity):
    identity.token_file.write_text(new_token())  # which only the server reads
    server = start_server()
    with pytest.raises(Exception, match="closed"):
        server.greet(monitor)
    assert not monitor.was_served


def test_server_is_asked_again_only_after_it_has_answered(monitor, start_server):
    server = start_server()
    server.greet(monitor)
    monitor.ask()  # nothing was answered yet, so nothing is sent
    server.report(1)
    monitor.receive()
    assert [server.receive() for _ in range(2)] == [Watch(1, waits=False), Watch(2, waits=True)]
    monitor.ask()
    monitor.ask()
    assert server.receive() == Watch(3, waits=False)
    before = monitor.heard_at
    server.report(3, is_over=True, is_saving=True)
    monitor.receive()
    assert monitor.heard_at > before
    assert monitor.is_saving
    assert server.receive() == Watch(4, waits=True)


def test_refresh_waits_for_the_answer(monitor, start_server):
    server = start_server()
    server.greet(monitor)
    server.report(1, 3)
    monitor.receive()
    server.report(2, 4, accepted={1: 1})  # crosses the request of the refresh
    server.report(3, 5, accepted={1: 2})
    monitor.refresh()
    assert (monitor.version, monitor.accepted) == (5, {1: 2})
    assert [server.receive() for _ in range(4)] == [
        Watch(1, waits=False),
        Watch(2, waits=True),
        Watch(3, waits=False),
        Watch(4, waits=True),
    ]


def test_busy_server_is_waited_for_once(monitor, start_server, monkeypatch):
    monkeypatch.setattr(monitor_module, "REFRESH_S", 0.01)
    server = start_server()
    server.greet(monitor)
    server.report(1, 3)
    monitor.receive()
    monitor.refresh()
    monkeypatch.setattr(monitor_module, "REFRESH_S", 1e9)  # a second wait would last forever
    monitor.refresh()
    assert monitor.version == 3


def test_unavailable_workers_are_reported(monitor, start_server):
    assert not monitor.report_unavailable({1: "it fails"})  # there is no connection
    server = start_server()
    server.greet(monitor)
    assert not monitor.report_unavailable({1: "it fails"})  # nobody knows whether it would arrive
    assert server.receive() == Watch(1, waits=False)
    server.report(1)
    monitor.receive()
    assert monitor.report_unavailable({1: "it fails", 2: "its script ended"}, completed={2})
    assert server.receive() == Watch(2, waits=True)
    assert server.receive() == WorkerUnavailable(1, "it fails")
    assert server.receive() == WorkerUnavailable(2, "its script ended", has_completed=True)
