# SPDX-License-Identifier: BSD-3-Clause
"""What the server says while a run goes on."""

from paceline.core.events import ApplyUpdate, Contribution
from paceline.run.server import progress
from paceline.run.server.progress import Progress
from paceline.run.settings import Settings
from paceline.spec import RunSpec


class Clock:
    """Seconds that pass when they are told to."""

    def __init__(self, monkeypatch):
        self.now = 100.0
        monkeypatch.setattr(progress, "monotonic", lambda: self.now)


def update(number):
    return ApplyUpdate(number, (Contribution(0, number - 1, 1),), (1.0,), (1.0,), 1)


def test_a_pause_does_not_count_for_the_rate(monkeypatch, capsys):
    clock = Clock(monkeypatch)
    said = Progress(Settings(spec=RunSpec(workers=1, steps=50)))
    clock.now += 3.0  # until the workers are there
    said.begin()
    for number in range(1, 11):
        said.updated(update(number), 1, {})
    clock.now += 60.0
    said.begin()
    for number in range(11, 21):
        said.updated(update(number), 1, {"loss": 0.5})
    clock.now += 5.0
    said.tick(1, begun=True)
    said.end(20, 20, 65.04)
    assert capsys.readouterr().out.splitlines() == [
        "training",
        "going on at version 10",
        "update 20 of 50, 2 a second, 1 worker, loss 0.5",
        "20 of 50 updates of 20 samples in 65.0 s",
    ]


def test_a_run_that_made_all_its_updates_says_how_many(monkeypatch, capsys):
    Clock(monkeypatch)
    Progress(Settings(spec=RunSpec(workers=1, steps=3))).end(3, 12, 0.0)
    Progress(Settings(spec=RunSpec(workers=1))).end(4, 12, 0.0)
    assert capsys.readouterr().out.splitlines() == [
        "3 updates of 12 samples in 0.0 s",
        "4 updates of 12 samples in 0.0 s",
    ]


def test_with_a_live_panel_the_server_does_not_say_how_it_gets_on(monkeypatch, capsys):
    clock = Clock(monkeypatch)
    said = Progress(Settings(spec=RunSpec(workers=2, steps=50), progress=False))
    clock.now += 10.0
    said.tick(1, begun=False)
    said.begin()
    clock.now += 10.0
    said.tick(2, begun=True)
    assert capsys.readouterr().out.splitlines() == [
        "waiting for workers: 1 of 2 are here",
        "training",
    ]


def test_a_run_that_was_restored_goes_on_where_it_was(capsys):
    said = Progress(Settings(spec=RunSpec(workers=1)))
    said.restored(40)
    said.begin()
    assert capsys.readouterr().out == "going on at version 40\n"
