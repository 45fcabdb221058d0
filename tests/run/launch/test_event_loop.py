# SPDX-License-Identifier: BSD-3-Clause
"""The event loop, with a supervisor of the test."""

import selectors

import pytest

from paceline.run.launch.event_loop import EventLoop
from paceline.run.launch.output import Output
from paceline.run.launch.processes import Processes
from paceline.run.launch.screen import PlainScreen
from paceline.run.launch.stop_signals import StopSignals
from paceline.run.settings import Settings
from paceline.run.system import SYSTEM
from paceline.spec import RunSpec


class Supervisor:
    """Is done after some steps."""

    def __init__(self, steps):
        self.steps_left = steps
        self.is_killed = False
        self.wake_at = 0.0

    @property
    def is_done(self):
        return self.steps_left <= 0

    def step(self):
        self.steps_left -= 1
        return True

    def kill_all(self):
        self.is_killed = True


class Looping:
    """A loop, and what it needs."""

    def __init__(self, folder, forkserver):
        self.selector = selectors.DefaultSelector()
        screen = PlainScreen()
        self.output = Output(self.selector, screen, folder)
        self.signals = StopSignals()
        self.loop = EventLoop(self.selector, self.output, screen, forkserver, self.signals, SYSTEM)
        settings = Settings(spec=RunSpec(workers=1))
        self.processes = Processes(forkserver, self.output, settings)
        self.started = []

    def run(self, supervisor):
        def start():
            self.started.append(1)

        return self.loop.run(self.processes, supervisor, lambda: None, start)

    def close(self):
        self.output.close()
        self.selector.close()


@pytest.fixture
def looping(tmp_path, forkserver):
    looping = Looping(tmp_path, forkserver)
    yield looping
    looping.close()


def test_loop_runs_until_the_supervisor_is_done(looping):
    supervisor = Supervisor(3)
    assert looping.run(supervisor) == 0
    assert (looping.started, supervisor.steps_left) == ([1], 0)


def test_nothing_is_started_after_an_early_signal(looping, forkserver):
    """The fork server isn't ready yet."""
    looping.signals.count = 1
    forkserver.start()
    supervisor = Supervisor(0)
    has_loaded = forkserver.wait_ready(0.0)
    assert looping.run(supervisor) == 0
    assert looping.started == [1] * has_loaded


def test_what_remains_is_killed(looping):
    supervisor = Supervisor(1)
    looping.loop.kill_remaining(looping.processes, supervisor, lambda: None)
    assert supervisor.is_killed
