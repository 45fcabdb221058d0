# SPDX-License-Identifier: BSD-3-Clause
"""A launcher's link to a head elsewhere: numbers, and what happens when the head isn't there."""

import pytest

from fake_head import FakeHead
from paceline.errors import ProtocolError
from paceline.run.net.messages import Refused, ReserveNumber, Watch
from paceline.run.net.server_wait import LIMIT_S, PAUSE_MAX_S, QUIET_S


@pytest.fixture
def head():
    return FakeHead()


def connect(head):
    """Connect when it is time, as the owner of the link does."""
    if head.link.monitor.retry_at is not None and head.now >= head.link.monitor.retry_at:
        head.link.monitor.connect()


def wait(head, seconds):
    """Try to connect for this long."""
    until = head.now + seconds
    while head.now < until and not head.link.gave_up:
        connect(head)
        retry_at = head.link.monitor.retry_at
        head.now = until if retry_at is None else max(retry_at, head.now + 0.001)


def requests(head):
    return [(one.seat, one.wanted) for one in head.sent if isinstance(one, ReserveNumber)]


def test_numbers_are_asked_for_and_arrive(head):
    head.link.request(b"a", None)
    head.link.request(b"b", None)
    head.link.start()
    connect(head)
    assert requests(head) == [(b"a", None), (b"b", None)]
    assert any(isinstance(one, Watch) for one in head.sent)
    head.reserve(0, 1)
    assert {seat: one.number for seat, one in head.link.reserved.items()} == {b"a": 0, b"b": 1}
    head.report(accepted={1: 3})
    assert head.link.progress(1) == 3


def test_number_is_asked_for_again_after_the_connection_was_lost(head):
    head.link.request(b"a", None)
    head.link.start()
    connect(head)
    head.reserve(2)
    head.die()
    head.is_there = True
    wait(head, 1.0)
    assert head.connections == 2
    assert requests(head) == [(b"a", None), (b"a", 2)]
    assert head.link.reserved[b"a"].number == 2


def test_request_for_another_number_is_sent_at_once(head):
    head.link.request(b"a", None)
    head.link.start()
    connect(head)
    head.reserve(2)
    head.link.request(b"a", 2)
    assert head.link.reserved == {}
    assert requests(head)[-1] == (b"a", 2)


def test_progress_counts_on_when_the_head_was_restarted(head):
    head.link.start()
    connect(head)
    for accepted, total in ((3, 3), (5, 5), (1, 6), (2, 7)):
        head.report(accepted={0: accepted})
        assert head.link.progress(0) == total


def test_link_waits_for_a_head_that_is_not_there_and_says_so(head):
    head.is_there = False
    head.link.start()
    wait(head, QUIET_S + PAUSE_MAX_S)
    [line] = head.said
    assert line.startswith("waiting for the server, up to 10 minutes: no server at tcp:10.0.0.5")
    assert head.link.is_run_gone
    head.is_there = True
    wait(head, PAUSE_MAX_S)
    assert head.connections == 1
    assert not head.link.is_run_gone


def test_link_gives_up_when_no_head_appears(head):
    head.is_there = False
    head.link.start()
    wait(head, 2 * LIMIT_S)
    assert head.link.gave_up.startswith("gave up after 10 minutes: no server at tcp:10.0.0.5")


@pytest.mark.parametrize("when", ["connecting", "after"])
def test_wrong_token_is_final(head, when):
    error = ProtocolError("the server at tcp:10.0.0.5:29400 has a different token")
    head.error = error if when == "connecting" else None
    head.link.start()
    connect(head)
    if when == "after":
        head.tell(error)
    assert head.link.refusal == str(error)


def test_refusal_by_the_head_is_final(head):
    head.link.start()
    connect(head)
    head.tell(Refused("expected Paceline 0.5.0 in a worker, got 0.4.0"))
    assert head.link.refusal == (
        "the server refused this host's workers: expected Paceline 0.5.0 in a worker, got 0.4.0"
    )
