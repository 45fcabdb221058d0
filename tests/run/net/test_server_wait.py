# SPDX-License-Identifier: BSD-3-Clause
"""Waiting for a server: pauses, lines and the limit, on a clock that the test moves."""

import pytest

from paceline.errors import PeerLost
from paceline.run.net.server_wait import AGAIN_S, LIMIT_S, PAUSE_MAX_S, QUIET_S, ServerWait

NOBODY = PeerLost("no server at tcp:10.0.0.5:29400: Connection refused")


class Waiting:
    """A wait in which every attempt fails."""

    def __init__(self):
        self.now = 100.0
        self.said = []
        self.wait = ServerWait("the server", self.said.append, lambda: self.now)

    def until(self, time_s):
        """Fail again and again until this time after the first attempt."""
        while self.now < 100.0 + time_s:
            self.now += self.wait.fail(NOBODY)


@pytest.fixture
def waiting():
    return Waiting()


def test_short_wait_is_quiet(waiting):
    waiting.until(QUIET_S - PAUSE_MAX_S)
    assert waiting.said == []


def test_long_wait_is_explained_now_and_then(waiting):
    waiting.until(2 * AGAIN_S)
    assert waiting.said == [
        f"waiting for the server, up to 10 minutes: {NOBODY}",
        f"still waiting for the server, up to 9 minutes: {NOBODY}",
    ]


def test_pauses_grow(waiting):
    pauses = [waiting.wait.fail(NOBODY) for _ in range(20)]
    assert pauses == sorted(pauses)
    assert (pauses[0], pauses[-1]) == (0.01, PAUSE_MAX_S)


def test_wait_ends_at_its_limit(waiting):
    with pytest.raises(PeerLost, match=r"gave up after 10 minutes: no server at tcp:10\.0\.0\.5"):
        waiting.until(2 * LIMIT_S)
    assert waiting.now <= 100.0 + LIMIT_S + PAUSE_MAX_S


def test_wait_does_not_end_right_after_an_attempt_that_lasted(waiting):
    """A server welcomes nobody before the other servers are there, and may die meanwhile."""
    waiting.now += LIMIT_S + 1
    waiting.now += waiting.wait.fail(NOBODY)
    with pytest.raises(PeerLost):
        waiting.wait.fail(NOBODY)


def test_next_wait_begins_anew(waiting):
    waiting.until(LIMIT_S - 1)
    waiting.said.clear()
    waiting.wait.begin()
    waiting.until(LIMIT_S + 1)
    assert waiting.wait.fail(NOBODY) > 0
    assert waiting.said[0].startswith("waiting for the server, up to 10 minutes")
