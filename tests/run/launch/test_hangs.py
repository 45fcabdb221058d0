# SPDX-License-Identifier: BSD-3-Clause
"""Processes that hang: a signal still stops the run, and the launcher replaces a hung server.

`LAUNCHER` is the process of the test, which runs the launcher.
"""

import os
import re
from pathlib import Path
from textwrap import dedent

import pytest

from failures import TRAINING, counts, joins_and_leaves, troubled
from paceline.errors import PeerLost
from paceline.run.launch import hangs, launcher
from paceline.run.launch.environment import Identity
from paceline.run.launch.forkserver import ForkServer
from paceline.run.launch.hangs import (
    ASK_S,
    FROZEN_SERVER_S,
    HUNG_SERVER_S,
    EndGrace,
    ServerWatch,
    StopLimits,
)
from paceline.run.launch.launcher import Launcher
from paceline.run.launch.monitor import RunMonitor
from paceline.run.launch.processes import Child
from paceline.run.launch.screen import PlainScreen
from paceline.run.process_status import ProcessStatus
from paceline.run.settings import Settings
from paceline.run.system import System
from paceline.trace.schema import STOPPED, Restored
from plain import train, weights

QUIET = "def trouble(run): pass\n"
STOP = f"os.kill({os.getpid()}, signal.SIGTERM)"


class World:
    """A clock and processes that a test sets."""

    def __init__(self):
        self.now = 100.0
        self.processes = {}  # status by pid
        self.children = {}  # pids by pid
        self.system = System(
            monotonic=lambda: self.now,
            status=self.processes.get,
            is_stopped=lambda pid: self.processes[pid].is_stopped,
            descendants=lambda pid: self.children.get(pid, []),
        )


@pytest.fixture
def world():
    return World()


def no_server():
    raise PeerLost("there is none")


# ------------------------------------------------------------------------------ stopping a run

HANG_ONCE = """
def hang_once(how):
    if not was_told("hung"):
        tell("hung")
        SEND_SIGTERM
        how()

def loop():
    while True:
        pass

def stop():
    os.kill(os.getpid(), signal.SIGSTOP)

def stop_forkserver():
    os.kill(os.getppid(), signal.SIGSTOP)
"""

IN_WORKER = """
def trouble(run):
    if run.worker == 1 and run.version == 3:
        wait_until(lambda: in_the_trace(type="gradient", worker=0, version=3))
        hang_once(HOW)
"""

IN_SERVER = """
class Stuck(torch.optim.SGD):
    def step(self, closure=None):
        super().step(closure)
        self.steps = getattr(self, "steps", 0) + 1
        if ROLE == "server" and self.steps == 4:
            wait_until(lambda: list((OUT / "checkpoints").glob("*.ckpt")))
            hang_once(HOW)

optimizer = Stuck(model.parameters(), lr=0.1)
"""

IN_LOADER = """
class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        if WORKER == 1 and index > 20:
            hang_once(HOW)
        return torch.ones(4)

run = paceline.join()
loader = torch.utils.data.DataLoader(Data(), batch_size=2, num_workers=1)
model, optimizer, loader = run.prepare(model, optimizer, loader)
for x in loader:
    optimizer.zero_grad()
    model(x).sum().backward()
    optimizer.step()
"""


def hanging(place, how):
    """Return a script of which one process hangs in this place, and sends SIGTERM before."""
    hang = HANG_ONCE.replace("SEND_SIGTERM", STOP) + place.replace("HOW", how)
    if place is IN_LOADER:
        return troubled(hang, loop="")
    return troubled(hang if place is IN_WORKER else hang + QUIET)


@pytest.fixture
def _short_limits(monkeypatch):
    monkeypatch.setattr(hangs, "STOP_WORKERS_S", 0.5)
    monkeypatch.setattr(hangs, "STOP_SERVER_S", 2.0)


def newest_checkpoint(folder):
    return max(int(path.stem) for path in (folder / "checkpoints").glob("*.ckpt"))


@pytest.mark.usefixtures("_short_limits")
@pytest.mark.parametrize("how", ["loop", "stop"])
@pytest.mark.parametrize("place", [IN_WORKER, IN_LOADER], ids=["worker", "loader"])
def test_signal_saves_the_newest_version_although_a_worker_hangs(launch, place, how):
    ran = launch(hanging(place, how), checkpoint_every="1000", steps=1000)
    assert ran.code == 143, ran.err
    end = ran.trace.records[-1]
    assert end.reason == STOPPED
    assert newest_checkpoint(ran.folder) == end.version > 0
    assert (ran.folder / "weights.pt").exists()


@pytest.mark.usefixtures("_short_limits")
@pytest.mark.parametrize("how", ["loop", "stop"])
def test_signal_ends_a_run_whose_server_hangs_and_its_checkpoint_stays(launch, forkserver, how):
    ran = launch(hanging(IN_SERVER, how), checkpoint_every="1", steps=8)
    assert ran.code == 143, ran.err
    assert "server was still running and was killed" in ran.err
    assert 1 <= newest_checkpoint(ran.folder) <= 3
    settings = Settings.read(ran.folder / "spec.json")
    assert Launcher(settings, ran.folder, forkserver).run() == 0
    assert newest_checkpoint(ran.folder) == 8


@pytest.mark.usefixtures("_short_limits")
def test_signal_saves_the_newest_version_although_the_fork_server_was_stopped(launch):
    ran = launch(hanging(IN_WORKER, "stop_forkserver"), checkpoint_every="1000", steps=1000)
    assert ran.code == 143, ran.err
    end = ran.trace.records[-1]
    assert end.reason == STOPPED
    assert newest_checkpoint(ran.folder) == end.version > 0


@pytest.mark.usefixtures("_short_limits")
def test_server_that_saves_a_run_is_given_time(launch):
    """The weights are written by the model's own `state_dict`, which takes longer than a limit."""
    source = f"""
class Slow(nn.Linear):
    def state_dict(self, *args, **kwargs):
        if ROLE == "server" and was_told("stopped"):
            time.sleep(2.5)
        return super().state_dict(*args, **kwargs)

model[2] = Slow(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

def trouble(run):
    if run.is_first and run.version == 5:
        tell("stopped")
        {STOP}
"""
    ran = launch(troubled(source), steps=None)
    assert ran.code == 143, ran.err
    assert ran.trace.records[-1].reason == STOPPED
    assert (ran.folder / "weights.pt").exists()


@pytest.fixture
def limits(world):
    monitor = RunMonitor(no_server, world.system)
    return StopLimits(monitor, world.system), monitor


def test_workers_are_overdue_before_a_silent_server(world, limits):
    stop, _ = limits
    world.processes[7] = ProcessStatus("S", 1.0)
    world.now += 1e6
    assert (stop.are_workers_overdue, stop.is_server_overdue(7)) == (False, False)
    stop.begin()
    world.now += hangs.STOP_WORKERS_S + 0.1
    assert (stop.are_workers_overdue, stop.is_server_overdue(7)) == (True, False)
    world.now += hangs.STOP_SERVER_S - hangs.STOP_WORKERS_S
    assert stop.is_server_overdue(7)


@pytest.mark.parametrize(("state", "is_overdue"), [("R", False), ("T", True)])
@pytest.mark.parametrize("sign", ["heard_at", "is_saving"])
def test_server_that_answers_or_saves_is_not_overdue_unless_it_is_stopped(
    world, limits, sign, state, is_overdue
):
    stop, monitor = limits
    stop.begin()
    world.now += 1000.0
    world.processes[7] = ProcessStatus(state, 1.0)
    setattr(monitor, sign, world.now - 1.0)
    assert stop.is_server_overdue(7) == is_overdue


# ------------------------------------------------------------------------- after the last update


def test_worker_that_never_ends_is_killed_after_the_grace_period(launch):
    """Worker 0 may take any time, as long as it computes."""
    source = """
def is_alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True

def trouble(run):
    if run.worker == 1:
        tell("hung", os.getpid())
        while True:
            pass
    if run.worker == 0 and run.version == 5:  # it contributes to each update, so it sees each
        wait_for("hung")
"""
    after = "while run.is_first and is_alive(int(wait_for('hung'))): pass\nprint('done')\n"
    ran = launch(troubled(source) + after, workers=3, policy="backup:1", grace_s=1.0)
    assert ran.code == 0, ran.err
    assert "worker 1 was still running 1 s after the last update and was killed" in ran.err
    assert "worker 0  | done" in ran.out.splitlines()


def test_worker_is_killed_once_although_its_exit_is_reported_late(launch, monkeypatch):
    monkeypatch.setattr(ForkServer, "resume", lambda self: None)
    source = """
import subprocess

def trouble(run):
    if run.worker == 1:
        forkserver = os.getppid()
        subprocess.Popen(["sh", "-c", f"sleep 3; kill -CONT {forkserver}"])
        os.kill(forkserver, signal.SIGSTOP)
        while True:
            pass
"""
    ran = launch(troubled(source), workers=3, policy="backup:1", grace_s=0.5)
    assert ran.code == 0, ran.err
    assert ran.err.count("worker 1 was still running 0.5 s after the last update and was") == 1


class Reader(PlainScreen):
    """A screen that tells the script when a line says that a worker was stopped."""

    def __init__(self, run_dir):
        self._run_dir = run_dir

    def line(self, text, to):
        super().line(text, to)
        if "it was stopped (SIGSTOP)" in text:
            (self._run_dir / "seen.word").touch()


def test_stopped_worker_that_uses_tcp_is_named_and_stays_in_the_run(launch, monkeypatch, tmp_path):
    """The server can't see that it is stopped: it may be on another host."""
    monkeypatch.setattr(launcher, "PlainScreen", lambda: Reader(tmp_path / "run-1"))
    source = """
    import threading

    def continue_it():
        pid = int(wait_for("stopped"))
        wait_until(lambda: in_the_trace(type="awaited", worker=1))
        wait_for("seen")
        os.kill(pid, signal.SIGCONT)

    def trouble(run):
        if run.version == 3 and run.worker == 1 and not was_told("stopped"):
            tell("stopped", os.getpid())
            os.kill(os.getpid(), signal.SIGSTOP)
        elif run.version == 3 and run.worker == 0:
            threading.Thread(target=continue_it).start()
    """
    ran = launch(troubled(dedent(source)), steps=6, transport="tcp")
    assert ran.code == 0, ran.err
    assert re.search(r"waiting for worker 1 for \d s; it was stopped \(SIGSTOP\)", ran.err)
    assert joins_and_leaves(ran.trace, 1)[:1] == ["joined"]
    assert "stopped" not in joins_and_leaves(ran.trace, 1)
    assert counts(ran.trace) == [2] * 6


def test_worker_0_that_never_ends_its_turn_is_killed_after_the_grace_period(launch):
    source = """
def trouble(run):
    if run.worker == 0 and run.version >= 1:
        tell("hung")
        while True:
            pass
    if run.worker == 1 and run.version == 5:  # it contributes to each update, so it sees each
        wait_for("hung")
"""
    ran = launch(troubled(source), workers=3, policy="backup:1", grace_s=0.5)
    assert ran.code == 1
    assert "worker 0 was still running 0.5 s after the last update and was killed" in ran.err
    assert "worker 0 was lost" in ran.err
    assert (ran.folder / "weights.pt").exists()


def test_idle_worker_0_is_killed_after_the_grace_period_and_the_run_fails(launch):
    after = "if run.is_first: threading.Event().wait()\n"
    ran = launch("import threading\n" + troubled(QUIET) + after, grace_s=0.5)
    assert ran.code == 1
    assert "worker 0 was still running 0.5 s after the last update and was killed" in ran.err
    assert "worker 0 was lost" in ran.err
    assert (ran.folder / "weights.pt").exists()


def worker(number, pid):
    return Child(f"worker {number}", Identity("", Path(), Path(), number), 1, pid=pid)


def test_other_workers_have_the_grace_period_even_if_they_compute(world):
    grace, one = EndGrace(60.0, RunMonitor(no_server), world.system), worker(1, 11)
    over_since = world.now
    world.now += 59.9
    world.processes[11] = ProcessStatus("R", 59.9)
    assert grace.limits([one], over_since) == {one: over_since + 60.0}


def test_worker_0_has_time_while_it_or_its_children_compute(world):
    grace, first = EndGrace(60.0, RunMonitor(no_server), world.system), worker(0, 10)
    world.processes[10] = world.processes[20] = ProcessStatus("S", 1.0)
    world.children[10] = [20]
    over_since = world.now
    assert grace.limits([first], over_since) == {first: over_since + 60.0}
    world.now += 59.0
    world.processes[20] = ProcessStatus("S", 1.1)
    assert grace.limits([first], over_since) == {first: over_since + 119.0}
    world.now += 59.0
    assert grace.limits([first], over_since) == {first: over_since + 119.0}


def test_worker_0_in_an_endless_turn_is_not_waited_for_although_it_computes(world):
    """A turn may take three times as long as its longest one."""
    monitor, first = RunMonitor(no_server), worker(0, 10)
    grace = EndGrace(60.0, monitor, world.system)
    over_since = world.now
    for longest_s, limit_s in [(0.5, 60.0), (50.0, 150.0)]:
        monitor.computing = {0: longest_s}
        for _ in range(10):
            world.now += 0.25
            world.processes[10] = ProcessStatus("R", world.now)
            assert grace.limits([first], over_since) == {first: over_since + limit_s}
    monitor.computing = {}  # it has reported its gradient, and evaluates the result
    world.processes[10] = ProcessStatus("R", world.now + 1.0)
    assert grace.limits([first], over_since) == {first: world.now + 60.0}


def test_line_counts_down_to_the_kill(world):
    grace, over_since = EndGrace(60.0, RunMonitor(no_server), world.system), world.now
    first, second = worker(0, 10), worker(1, 11)

    def line(*running):
        world.processes[10] = ProcessStatus("R", world.now)
        return grace.line(grace.limits(running, over_since), over_since)

    assert line(first, second) == ""
    world.now += hangs.SAY_S
    assert line(first, second) == (
        "waiting for worker 0, worker 1 to finish the script; "
        "worker 1 will be killed in 50 s (--grace 60s)"
    )
    assert line(first, second) == ""
    world.now += hangs.SAY_S
    assert line(first) == "waiting for worker 0 to finish the script"
    world.now += hangs.SAY_S
    assert line() == ""


def test_line_names_workers_that_were_started_elsewhere_and_are_not_killed(world):
    monitor = RunMonitor(no_server)
    grace, over_since = EndGrace(60.0, monitor, world.system), world.now
    monitor.here = (1, 3)
    grace.limits([worker(1, 11)], over_since)
    world.now += hangs.SAY_S
    assert grace.line({}, over_since) == "waiting for worker 3 to finish the script"
    assert grace.line({}, over_since) == ""
    monitor.here = (1,)  # it was killed, which the server doesn't know yet
    world.now += hangs.SAY_S
    assert grace.line({}, over_since) == ""


# ------------------------------------------------------------------------------- a hung server

FREEZE_ONCE = """
class Freezing(torch.optim.SGD):
    def step(self, closure=None):
        super().step(closure)
        self.steps = getattr(self, "steps", 0) + 1
        if ROLE == "server" and self.steps == 4 and not was_told("frozen"):
            tell("frozen")
            HOW

optimizer = Freezing(model.parameters(), lr=0.1)
"""


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("os.kill(os.getpid(), signal.SIGSTOP)", "was stopped (SIGSTOP)"),
        ("threading.Event().wait()", "has neither answered nor used the processor"),
    ],
)
def test_frozen_server_is_replaced(launch, monkeypatch, how, why):
    monkeypatch.setattr(hangs, "FROZEN_SERVER_S", 0.3)
    monkeypatch.setattr(hangs, "HUNG_SERVER_S", 1.0)
    source = "import threading\n" + troubled(FREEZE_ONCE.replace("HOW", how) + QUIET)
    ran = launch(source, steps=8, restart=True, checkpoint_every="1")
    assert ran.code == 0, ran.err
    assert f"server {why}" in ran.err
    assert len([record for record in ran.trace.records if isinstance(record, Restored)]) == 1
    expected = weights(train(TRAINING, 8))
    for mine, theirs in zip(ran.kept[0]["weights"], expected, strict=True):
        assert mine.allclose(theirs)


@pytest.fixture
def watched(world):
    monitor = RunMonitor(no_server, world.system)
    monitor.is_serving = True
    watch = ServerWatch(monitor, world.system)
    watch.begin()
    return watch, monitor


def test_server_that_uses_the_processor_has_not_hung(world, watched):
    watch, _ = watched
    for second in range(1, 200):
        world.now += 1.0
        world.processes[7] = ProcessStatus("R", float(second))
        assert watch.why_hung(7) == ""


@pytest.mark.parametrize("state", ["D", "t"])
def test_server_that_waits_for_a_disk_or_is_debugged_has_not_hung(world, watched, state):
    watch, _ = watched
    world.processes[7] = ProcessStatus(state, 1.0)
    for _ in range(200):
        world.now += 1.0
        assert watch.why_hung(7) == ""


def test_server_that_saves_the_run_has_hung_unless_it_waits_for_its_disk(world, watched):
    watch, monitor = watched
    monitor.is_saving = True
    for state in "DS":
        world.processes[7] = ProcessStatus(state, 1.0)
        world.now += HUNG_SERVER_S
        assert (watch.why_hung(7) == "") == (state == "D")


def test_server_that_answers_has_not_hung(world, watched):
    watch, monitor = watched
    world.processes[7] = ProcessStatus("S", 1.0)
    for _ in range(200):
        world.now += 1.0
        monitor.heard_at = world.now - ASK_S
        assert watch.why_hung(7) == ""


def test_server_that_does_nothing_has_hung_after_a_while(world, watched):
    watch, monitor = watched
    world.processes[7] = ProcessStatus("S", 1.0)
    assert watch.why_hung(7) == ""
    world.now += HUNG_SERVER_S - 0.1
    assert watch.why_hung(7) == ""
    world.now += 0.1
    assert "neither answered nor used the processor for 30 s" in watch.why_hung(7)
    monitor.is_serving = False  # it is still starting
    assert watch.why_hung(7) == ""


def test_stopped_server_has_hung_sooner_and_even_while_it_starts(world, watched):
    watch, monitor = watched
    monitor.is_serving = False
    world.processes[7] = ProcessStatus("T", 1.0)
    watch.why_hung(7)
    world.now += FROZEN_SERVER_S
    assert watch.why_hung(7) == "was stopped (SIGSTOP)"
    watch.begin()  # it was killed
    assert watch.why_hung(7) == ""


def test_server_that_has_exited_has_not_hung(watched):
    watch, _ = watched
    assert watch.why_hung(7) == ""
