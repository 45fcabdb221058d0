# SPDX-License-Identifier: BSD-3-Clause
"""Strangers are ignored while they have used up their time, and served when it is due."""

import selectors
import socket

import pytest

from paceline.run.net.address import listen
from paceline.run.server.refusals import Refusals
from paceline.run.server.stranger_watch import StrangerWatch
from paceline.run.server.strangers import SAVED_S, SHARE, STRANGER_TIMEOUT_S, Strangers
from server_harness import TOKEN

TIMEOUT_S = 20.0


class Bench:
    """A selector with strangers, and clocks that stand still unless a test moves them."""

    def __init__(self):
        self.now = 100.0
        self.processor_s = 0.0
        self.listening = listen("tcp:127.0.0.1:0")
        self.strangers = Strangers(
            [self.listening],
            TOKEN,
            Refusals(lambda _: None),
            lambda: self.now,
            None,
            self._processor_time,
        )
        self.costs_s = 0.0  # of each time that strangers are served
        self.selector = selectors.DefaultSelector()
        self.watch = StrangerWatch(self.selector, self.strangers)
        self.clients = []

    def _processor_time(self):
        self.processor_s += self.costs_s
        return self.processor_s

    def connect(self):
        self.clients.append(socket.create_connection(self.listening.getsockname(), TIMEOUT_S))

    def is_reported(self, timeout_s=0.0):
        return any(key.fileobj is self.strangers for key, _ in self.selector.select(timeout_s))

    def close(self):
        self.selector.close()
        self.strangers.close()
        for client in self.clients:
            client.close()


@pytest.fixture
def bench():
    bench = Bench()
    yield bench
    bench.close()


def test_nobody_has_to_be_served(bench):
    assert bench.watch.timeout_s(3.0) == 3.0
    assert bench.watch.timeout_s(None) is None
    assert not bench.watch.is_due()
    assert not bench.is_reported()


def test_stranger_that_connects_is_reported(bench):
    bench.connect()
    assert bench.is_reported(TIMEOUT_S)


def test_wait_ends_when_a_silent_stranger_must_be_closed(bench):
    bench.connect()
    assert bench.is_reported(TIMEOUT_S)
    bench.strangers.serve()
    assert len(bench.strangers) == 1
    assert bench.watch.timeout_s(None) == STRANGER_TIMEOUT_S
    assert bench.watch.timeout_s(1.0) == 1.0
    assert not bench.watch.is_due()
    bench.now += STRANGER_TIMEOUT_S + 0.001
    assert bench.watch.timeout_s(None) == 0.0
    assert bench.watch.is_due()
    bench.strangers.serve()
    assert len(bench.strangers) == 0


def test_strangers_that_have_used_up_their_time_are_ignored_for_a_while(bench):
    bench.connect()
    assert bench.is_reported(TIMEOUT_S)
    bench.costs_s = SAVED_S + 0.01
    bench.strangers.serve()
    bench.costs_s = 0.0
    bench.connect()
    pause_s = bench.watch.timeout_s(None)
    assert pause_s > 0.01 / SHARE
    assert not bench.is_reported()
    assert not bench.watch.is_due()
    assert bench.watch.timeout_s(0.001) == 0.001
    bench.now += STRANGER_TIMEOUT_S + pause_s
    bench.watch.timeout_s(None)
    assert bench.is_reported(TIMEOUT_S)
    assert bench.watch.is_due()
