# SPDX-License-Identifier: BSD-3-Clause
"""A server looks for its head as long as the run may go on; the clock moves when it sleeps."""

import pytest

from paceline.errors import PeerLost, ProtocolError
from paceline.run.net.address import NobodyListens
from paceline.run.net.server_wait import LIMIT_S, QUIET_S
from paceline.run.server.head_search import ENDED_S, find_head
from paceline.run.system import System

REFUSED, UNREACHABLE = NobodyListens("connection refused"), PeerLost("no route to host")
NEVER = 1e9


class Search:
    """One search: each outcome of `connect` lasts until a time, an error or a head."""

    def __init__(self, *outcomes):
        self._outcomes = outcomes
        self.now = 0.0
        self.said = []

    def _sleep(self, seconds):
        self.now += seconds

    def _connect(self):
        found = next(found for found, until in self._outcomes if self.now < until)
        if isinstance(found, Exception):
            raise found
        return found

    def run(self, *, has_joined):
        system = System(monotonic=lambda: self.now, sleep=self._sleep)
        return find_head(self._connect, self.said.append, system, has_joined=has_joined)


@pytest.mark.parametrize("has_joined", [False, True])
def test_head_that_is_there_is_found_at_once(has_joined):
    search = Search(("head", NEVER))
    assert search.run(has_joined=has_joined) == "head"
    assert (search.now, search.said) == (0, [])


def test_long_wait_is_explained_once():
    search = Search((UNREACHABLE, 3 * QUIET_S), ("head", NEVER))
    assert search.run(has_joined=False) == "head"
    assert search.said == ["waiting for the head, up to 10 minutes: no route to host"]


def test_run_has_ended_if_nobody_listens_for_its_head_for_a_while():
    """A launcher that restarts the head keeps listening."""
    search = Search((REFUSED, NEVER))
    assert search.run(has_joined=True) is None
    assert ENDED_S < search.now < ENDED_S + 1


def test_only_refused_connections_show_that_a_run_has_ended():
    search = Search((REFUSED, 50), (UNREACHABLE, 200), (REFUSED, 250), ("head", NEVER))
    assert search.run(has_joined=True) == "head"


@pytest.mark.parametrize(
    ("error", "has_joined"), [(REFUSED, False), (UNREACHABLE, False), (UNREACHABLE, True)]
)
def test_search_ends_after_ten_minutes(error, has_joined):
    """A server that was never part of the run may have been started before the head."""
    search = Search((error, NEVER))
    with pytest.raises(PeerLost, match=f"gave up after 10 minutes: {error}"):
        search.run(has_joined=has_joined)
    assert LIMIT_S < search.now < LIMIT_S + 1


def test_head_that_refuses_is_not_asked_again():
    search = Search((ProtocolError("the token is wrong"), NEVER))
    with pytest.raises(ProtocolError, match="the token is wrong"):
        search.run(has_joined=False)
    assert search.now == 0
