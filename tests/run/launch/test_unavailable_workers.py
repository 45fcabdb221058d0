# SPDX-License-Identifier: BSD-3-Clause
"""The server and the user are told about workers that won't be started again."""

import pytest

from paceline.run.launch.unavailable_workers import UnavailableWorkers


class Monitor:
    """What the launcher knows, and what it has told the server."""

    def __init__(self):
        self.is_connected = True
        self.left = {}
        self.version = 0
        self.reported = []

    def report_unavailable(self, reasons, completed):
        if self.is_connected:
            self.reported.append((dict(reasons), set(completed)))
        return self.is_connected


@pytest.fixture
def monitor():
    return Monitor()


@pytest.fixture
def said():
    return []


@pytest.fixture
def workers(monitor, said):
    return UnavailableWorkers(monitor, said.append)


def test_each_worker_is_reported_once(workers, monitor):
    workers.add(2, "it was killed")
    workers.add_completed(1)
    workers.report()
    workers.report()
    assert monitor.reported == [({1: "its script ended", 2: "it was killed"}, {1})]


def test_report_is_repeated_until_it_was_sent(workers, monitor):
    monitor.is_connected = False
    workers.add(0, "failed")
    workers.report()
    monitor.is_connected = True
    workers.report()
    assert monitor.reported == [({0: "failed"}, set())]


def test_next_server_is_told_everything_again(workers, monitor):
    workers.add(0, "failed")
    workers.report()
    workers.on_server_start()
    workers.report()
    assert monitor.reported == [({0: "failed"}, set())] * 2


def test_early_end_of_a_script_is_said_once(workers, monitor, said):
    workers.add_completed(1)
    workers.say_early_ends(" of 9")
    monitor.left, monitor.version = {1: 3}, 4
    workers.say_early_ends(" of 9")
    workers.say_early_ends(" of 9")
    assert said == ["the script of worker 1 ended at update 3 of 9"]


def test_script_that_ends_with_the_run_is_not_mentioned(workers, monitor, said):
    workers.add_completed(1)
    monitor.left, monitor.version = {1: 9}, 9
    workers.say_early_ends("")
    assert said == []
