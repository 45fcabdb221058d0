# SPDX-License-Identifier: BSD-3-Clause
"""What the server says while a run goes on."""

from paceline.core.events import ApplyUpdate, Contribution
from paceline.run import progress
from paceline.run.progress import Progress
from paceline.spec import RunSpec


class Clock:
    """Seconds that pass when they are told to."""

    def __init__(self, monkeypatch):
        self.now = 100.0
        monkeypatch.setattr(progress, "monotonic", lambda: self.now)


def update(number):
    return ApplyUpdate(number, (Contribution(0, number - 1, 1),), (1.0,), (1.0,), 1)


def test_a_pause_counts_for_the_whole_and_not_for_the_rate(monkeypatch, capsys):
    clock = Clock(monkeypatch)
    said = Progress(RunSpec(workers=1, steps=50))
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
    said.end(20, 20)
    assert capsys.readouterr().out.splitlines() == [
        "training",
        "going on",
        "update 20 of 50, 2 a second, 1 worker, loss 0.5",
        "20 of 50 updates of 20 samples in 65.0 s",
    ]


def test_a_run_that_made_all_its_updates_says_how_many(monkeypatch, capsys):
    Clock(monkeypatch)
    Progress(RunSpec(workers=1, steps=3)).end(3, 12)
    Progress(RunSpec(workers=1)).end(4, 12)
    assert capsys.readouterr().out.splitlines() == [
        "3 updates of 12 samples in 0.0 s",
        "4 updates of 12 samples in 0.0 s",
    ]
