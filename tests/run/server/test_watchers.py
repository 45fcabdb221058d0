# SPDX-License-Identifier: BSD-3-Clause
"""Reports on the progress of a run: when they are sent, and what is in them."""

from math import inf

import pytest

from paceline.core.decider import Decider
from paceline.core.events import GradientArrived, StopRequested, WorkerJoined, WorkerLeft
from paceline.core.policies import parse_policy
from paceline.errors import PeerLost
from paceline.run.net.messages import RunProgress, Watch
from paceline.run.server.watchers import COLLECT_S, Watchers
from paceline.spec import RunSpec
from paceline.trace.schema import FINISHED, Ended


class End:
    """A connection that keeps what is sent to it."""

    def __init__(self):
        self.sent = []
        self.is_lost = False

    def send(self, message):
        """Keep the message."""
        if self.is_lost:
            raise PeerLost("it is gone")
        self.sent.append(message)

    def take(self):
        """Return the only message that was sent since the last call."""
        [message] = self.sent
        self.sent.clear()
        assert isinstance(message, RunProgress)
        return message


class Run:
    """Decisions on events, as the server makes them, with the time as the clock of reports."""

    def __init__(self, policy="async", steps=3):
        self.decider = Decider(parse_policy(policy), RunSpec(workers=2, steps=steps))
        self.watchers = Watchers(self.decider.ledger)

    def handle(self, event):
        """Decide on an event, and report what is due."""
        actions = self.decider.handle(event)
        self.watchers.note(event, actions, event.time)
        self.watchers.report(event.time)

    def gradient(self, t, worker):
        """Let the worker finish its current turn."""
        member = self.decider.ledger.members[worker]
        self.handle(GradientArrived(t, worker, member.turn, member.work.version, 1))


@pytest.fixture
def run():
    return Run()


@pytest.fixture
def end():
    return End()


def test_request_that_does_not_wait_is_answered_immediately(run, end):
    run.watchers.add(end, Watch(7, waits=False))
    assert end.take() == RunProgress(7, 0, {}, (), {}, False, False)


def test_request_is_answered_once(run, end):
    run.watchers.add(end, Watch(7, waits=True))
    assert end.sent == []
    run.handle(WorkerJoined(0.0, 0))
    assert end.take().request == 7
    run.handle(WorkerJoined(0.0, 1))
    assert end.sent == []


def test_joining_and_leaving_are_reported_immediately(run, end):
    for request, event in enumerate(
        [WorkerJoined(0.0, 0), WorkerJoined(0.0, 1), WorkerLeft(0.0, 0, "x"), WorkerJoined(0.0, 0)]
    ):
        run.watchers.add(end, Watch(request, waits=True))
        run.handle(event)
        report = end.take()
        assert report.here == tuple(run.decider.ledger.members)
        assert report.left == ({0: 0} if request == 2 else {})


def test_other_news_is_collected_for_a_moment(run, end):
    run.handle(WorkerJoined(0.0, 0))
    run.watchers.add(end, Watch(0, waits=True))
    run.watchers.report(0.0)
    assert end.take().here == (0,)
    run.watchers.add(end, Watch(1, waits=True))
    run.gradient(1.0, 0)
    assert end.take().accepted == {0: 1}
    run.watchers.add(end, Watch(2, waits=True))
    assert run.watchers.due_at() == inf
    run.gradient(1.0 + COLLECT_S / 4, 0)
    assert end.sent == []
    assert run.watchers.due_at() == 1.0 + COLLECT_S
    run.watchers.report(1.0 + COLLECT_S)
    report = end.take()
    assert (report.version, report.accepted) == (2, {0: 2})
    assert run.watchers.due_at() == inf


def test_busy_server_reports_only_urgent_news(run, end):
    run.watchers.add(end, Watch(0, waits=True))
    run.decider.handle(WorkerJoined(0.0, 0))
    run.watchers.note(WorkerJoined(0.0, 0), [], 0.0)
    assert run.watchers.due_at(is_busy=True) == 0.0
    run.watchers.report(0.0, is_busy=True)
    assert end.take().here == (0,)
    run.watchers.add(end, Watch(1, waits=True))
    run.gradient(COLLECT_S / 2, 0)
    assert run.watchers.due_at(is_busy=True) == inf
    run.watchers.report(COLLECT_S, is_busy=True)
    assert end.sent == []
    run.watchers.report(COLLECT_S, is_busy=False)
    assert end.take().accepted == {0: 1}


def test_version_that_an_earlier_server_reached_is_reported(end):
    watchers = Watchers(Run().decider.ledger, reached=5)
    watchers.add(end, Watch(1, waits=False))
    assert end.take().version == 5


def test_nothing_is_due_if_no_watcher_waits(run, end):
    run.handle(WorkerJoined(0.0, 0))
    assert run.watchers.due_at() == inf
    run.watchers.add(end, Watch(1, waits=False))
    assert run.watchers.due_at() == inf


def test_last_update_is_reported_immediately(end):
    run = Run(steps=2)
    run.handle(WorkerJoined(0.0, 0))
    run.gradient(1.0, 0)
    run.watchers.add(end, Watch(1, waits=True))
    run.watchers.report(1.0)
    end.sent.clear()
    run.watchers.add(end, Watch(2, waits=True))
    run.gradient(1.0, 0)
    report = end.take()
    assert (report.version, report.is_over, report.ended_at) == (2, True, None)
    run.handle(WorkerLeft(2.0, 0, "its script ended"))
    run.watchers.add(end, Watch(3, waits=False))
    assert end.take().left == {}  # it left after the end


def test_version_of_a_departure_is_that_before_it(end):
    run = Run(policy="sync")
    for worker in (0, 1):
        run.handle(WorkerJoined(0.0, worker))
    run.gradient(1.0, 0)
    run.handle(WorkerLeft(2.0, 1, "killed"))  # which lets update 1 be made
    run.watchers.add(end, Watch(1, waits=False))
    report = end.take()
    assert (report.version, report.left) == (1, {1: 0})


@pytest.mark.parametrize(
    ("leaves", "at_once"), [(False, False), (True, False), (False, True), (True, True)]
)
def test_scripts_have_ended_if_all_had_left_or_the_stop_was_at_once(run, end, leaves, at_once):
    """Only a script ends a run at once."""
    run.handle(WorkerJoined(0.0, 0))
    if leaves:
        run.handle(WorkerLeft(1.0, 0, "its script ended"))
    run.handle(StopRequested(2.0, at_once))
    run.watchers.add(end, Watch(1, waits=False))
    report = end.take()
    assert (report.is_over, report.have_scripts_ended) == (True, leaves or at_once)


def test_end_is_reported_without_a_request(run, end):
    run.watchers.add(end, Watch(1, waits=False))
    end.sent.clear()
    run.watchers.report_end(Ended(9.0, 3, reason=FINISHED))
    report = end.take()
    assert (report.request, report.ended_at, report.end_reason) == (0, 3, FINISHED)


def test_lost_watcher_is_not_an_error(run, end):
    other = End()
    for each in (end, other):
        run.watchers.add(each, Watch(1, waits=True))
    end.is_lost = True
    run.handle(WorkerJoined(0.0, 0))
    assert other.take().here == (0,)
    run.watchers.remove(end)
    run.watchers.remove(end)
    run.watchers.report_end(Ended(9.0, 0, reason=FINISHED))
    assert end.sent == []


def test_launcher_is_awaited_until_it_watches(run, end):
    assert not run.watchers.is_awaited
    run.watchers.is_awaited = True
    run.watchers.add(end, Watch(1, waits=True))
    assert not run.watchers.is_awaited


def test_change_of_the_workers_that_are_waited_for_is_reported_at_once(run, end):
    run.watchers.add(end, Watch(1, waits=True))
    run.watchers.note_waiting({1: 5.0}, 6.0)
    run.watchers.report(6.0, is_busy=True)
    assert end.take().waiting_s == {1: 5.0}
    run.watchers.add(end, Watch(2, waits=True))
    run.watchers.note_waiting({1: 5.5}, 6.5)
    run.watchers.report(6.5)
    assert end.sent == []
    run.watchers.note_waiting({}, 7.0)
    run.watchers.report(7.0)
    assert end.take().waiting_s == {}


def test_beginning_of_saving_is_reported_even_without_a_request(run, end):
    run.watchers.add(end, Watch(1, waits=False))
    assert not end.take().is_saving
    run.decider.handle(StopRequested(1.0, at_once=True))
    run.watchers.report_saving(True)
    report = end.take()
    assert (report.request, report.is_saving, report.is_over, report.ended_at) == (
        0,
        True,
        True,
        None,
    )
