# SPDX-License-Identifier: BSD-3-Clause
"""The launcher says where the processes are that a run waits for.

In these runs a process hangs until the launcher has said where it is.
"""

import os
import re
import signal
from pathlib import Path

import pytest

from failures import HELPERS, troubled
from paceline.errors import PeerLost
from paceline.run.launch import hang_report, launcher
from paceline.run.launch.environment import Identity
from paceline.run.launch.hang_report import (
    LATE_S,
    NAMED,
    SILENT_SERVER_S,
    SLOW_START_S,
    STACK_S,
    HangReport,
)
from paceline.run.launch.monitor import RunMonitor
from paceline.run.launch.processes import Child
from paceline.run.launch.screen import PlainScreen
from paceline.run.system import System

QUIET = "def trouble(run): pass\n"


class Reader(PlainScreen):
    """A screen that lets the hanging process of the run continue once a line says where it is."""

    def __init__(self, run_dir):
        self._run_dir = run_dir

    def line(self, text, to):
        super().line(text, to)
        if "; it is at " in text:
            (self._run_dir / "seen.word").touch()
        if stopped := re.search(r"; process (\d+), which it started, was stopped", text):
            os.kill(int(stopped[1]), signal.SIGCONT)


@pytest.fixture(autouse=True)
def _reader(monkeypatch, tmp_path):
    monkeypatch.setattr(launcher, "PlainScreen", lambda: Reader(tmp_path / "run-1"))


def test_line_of_a_worker_in_an_endless_loop_is_shown(launch):
    source = """
def trouble(run):
    while run.worker == 1 and run.version == 3 and not was_told("seen"):
        pass  # it hangs
"""
    ran = launch(troubled(source), steps=6)
    assert ran.code == 0, ran.err
    [line] = ran.err.splitlines()
    assert line.startswith("paceline  | the run has been waiting for worker 1 for ")
    assert re.search(r" s; it is at script.py:\d+ \(`", line)


def test_stopped_process_of_a_data_loader_is_named(launch):
    source = """
class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        if index > 20 and WORKER == 1 and not was_told("stopped"):
            tell("stopped", os.getpid())
            os.kill(os.getpid(), signal.SIGSTOP)
        return torch.ones(4)

model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = torch.utils.data.DataLoader(Data(), batch_size=2, num_workers=1)
run = paceline.join()
model, optimizer, loader = run.prepare(model, optimizer, loader)
for x in loader:
    optimizer.zero_grad()
    model(x).sum().backward()
    optimizer.step()
"""
    ran = launch(HELPERS + source, steps=None)
    assert ran.code == 0, ran.err
    pid = (ran.folder / "stopped.word").read_text()
    assert f"; process {pid}, which it started, was stopped (SIGSTOP)" in ran.err


def test_line_of_a_server_in_an_endless_loop_is_shown(launch, monkeypatch):
    monkeypatch.setattr(hang_report, "SILENT_SERVER_S", 0.5)
    source = """
class Stuck(torch.optim.SGD):
    def step(self, closure=None):
        while ROLE == "server" and not was_told("seen"):
            pass  # it hangs
        super().step(closure)

optimizer = Stuck(model.parameters(), lr=0.1)
"""
    ran = launch(troubled(source + QUIET), steps=3)
    assert ran.code == 0, ran.err
    assert re.search(r"the server hasn't answered for \d s; it is at script.py:\d+ \(`", ran.err)


# ---------------------------------------------------------------------- without processes


class FakeProcesses:
    """Processes whose stacks a test sets."""

    def __init__(self):
        self.asked = []
        self.lines = {}  # by name of the process

    def ask_stack(self, child):
        self.asked.append(child.name)
        return child.name

    def stack_line(self, request):
        return self.lines.get(request)


class World:
    """A clock, processes, and what is said about them."""

    def __init__(self):
        self.now = 100.0
        self.stopped = set()
        self.said = []
        self.system = System(
            monotonic=lambda: self.now,
            is_stopped=lambda pid: pid in self.stopped,
            descendants=lambda pid: [10 * pid],
        )
        self.monitor = RunMonitor(no_server, self.system)
        self.monitor.is_serving, self.monitor.heard_at = True, self.now
        self.processes = FakeProcesses()
        self.report = HangReport(self.monitor, self.processes, self.said.append, self.system)
        self.server = child("server", None, 7)
        self.workers = [child(f"worker {n}", n, 20 + n) for n in range(5)]
        self.others = []

    def tick(self, seconds=0.2, is_heard=True):
        """Let time pass; return what is said then."""
        self.now += seconds
        if is_heard:
            self.monitor.heard_at = self.now
        self.said.clear()
        self.report.tick(self.server, self.workers, self.others)
        return list(self.said)


def no_server():
    raise PeerLost("there is none")


def child(name, number, pid):
    return Child(name, Identity("", Path(), Path(), number), 1, pid=pid)


@pytest.fixture
def world():
    return World()


def test_each_wait_is_reported_once(world):
    world.processes.lines["worker 2"] = "train.py:41"
    for _ in range(2):
        world.monitor.waiting_s = {2: 5.0}
        assert world.tick() == []
        expected = "the run has been waiting for worker 2 for 5 s; it is at train.py:41"
        assert world.tick() == [expected]
        world.monitor.waiting_s = {2: 10.0}
        assert world.tick() == []
        world.monitor.waiting_s = {}
        assert world.tick() == []


def test_worker_that_writes_no_stack_is_named_without_one(world):
    world.monitor.waiting_s = {2: 5.0}
    assert world.tick() == []
    assert world.tick() == []
    assert world.tick(STACK_S) == ["the run has been waiting for worker 2 for 5 s"]


def test_stopped_processes_are_not_asked(world):
    world.stopped = {22, 230}
    world.monitor.waiting_s = {2: 5.0, 3: 6.0}
    assert world.tick() == [
        "the run has been waiting for worker 2 for 5 s; it was stopped (SIGSTOP)",
        "the run has been waiting for worker 3 for 6 s; process 230, which it started, "
        "was stopped (SIGSTOP)",
    ]
    assert world.processes.asked == []


def test_only_a_few_workers_are_reported_at_a_time(world):
    world.monitor.waiting_s = dict.fromkeys(range(5), 5.0)
    world.tick()
    assert len(world.processes.asked) == NAMED


def test_silent_server_is_reported_instead_of_the_workers(world):
    world.monitor.waiting_s = {2: 5.0}
    world.processes.lines["server"] = "train.py:7"
    assert world.tick(SILENT_SERVER_S, is_heard=False) == []
    assert world.tick(is_heard=False) == [
        "the server hasn't answered for 10 s; it is at train.py:7"
    ]
    assert world.processes.asked == ["server"]
    world.monitor.is_saving = True
    assert world.tick(1000.0, is_heard=False) == []


def test_servers_that_a_silent_one_may_wait_for_are_reported(world):
    world.others = [child("server 1", None, 8), child("server 2", None, 9), child("x", None, None)]
    world.processes.lines = {"server": "train.py:7", "server 1": "train.py:7"}
    world.stopped = {9}
    stopped = "the server may be waiting for server 2; it was stopped (SIGSTOP)"
    assert world.tick(SILENT_SERVER_S, is_heard=False) == [stopped]
    assert world.tick(is_heard=False) == [
        "the server hasn't answered for 10 s; it is at train.py:7",
        "the server may be waiting for server 1; it is at train.py:7",
    ]
    assert world.tick(1000.0, is_heard=False) == []


def test_server_that_was_stopped_waits_for_no_other(world):
    world.others = [child("server 1", None, 8)]
    world.stopped = {7}
    stopped = "the server hasn't answered for 10 s; it was stopped (SIGSTOP)"
    assert world.tick(SILENT_SERVER_S, is_heard=False) == [stopped]
    assert world.processes.asked == []


def test_server_that_does_not_reach_prepare_is_reported(world):
    world.monitor.is_serving, world.monitor.started_at = False, world.now
    world.processes.lines["server"] = "train.py:3 (`download()`)"
    assert world.tick(SLOW_START_S - 0.1) == []
    assert world.tick(0.1) == []
    assert world.tick() == [
        "waiting for the server to reach run.prepare(); it is at train.py:3 (`download()`)"
    ]
    assert world.tick(1000.0) == []


def test_workers_that_run_after_the_last_update_are_reported(world):
    world.monitor.over_since = world.now
    world.workers[1:] = []
    world.processes.lines["worker 0"] = "train.py:60"
    assert world.tick() == []
    assert world.tick(LATE_S - 0.2) == []
    assert world.tick() == ["worker 0 still runs 10 s after the last update; it is at train.py:60"]


@pytest.mark.parametrize("has_exited", [True, False])
def test_worker_that_was_killed_meanwhile_does_not_run_anymore(world, has_exited):
    world.monitor.over_since = world.now
    world.workers[1:] = []
    assert world.tick(LATE_S) == []
    assert world.processes.asked == ["worker 0"]
    world.workers[0].is_killed = True
    if has_exited:
        world.workers[0].pid = None
    assert world.tick(STACK_S) == []
    assert world.tick(STACK_S) == []
