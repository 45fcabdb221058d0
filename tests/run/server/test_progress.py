# SPDX-License-Identifier: BSD-3-Clause
"""The lines that the server prints during a run."""

from paceline.core.events import ApplyUpdate, Contribution
from paceline.run.server.progress import Progress
from paceline.run.settings import Settings
from paceline.run.system import System
from paceline.spec import RunSpec


class Clock:
    """A clock that a test moves."""

    def __init__(self):
        self.now = 100.0

    def progress(self, settings):
        """Return the lines of a run with this clock."""
        return Progress(settings, System(monotonic=lambda: self.now))


def update(number):
    return ApplyUpdate(number, (Contribution(0, number - 1, 1),), (1.0,), (1.0,), 1)


def test_pause_does_not_count_for_the_rate(capsys):
    clock = Clock()
    progress_lines = clock.progress(Settings(spec=RunSpec(workers=1, steps=50)))
    clock.now += 3.0  # until the workers have joined
    progress_lines.begin()
    for number in range(1, 11):
        progress_lines.updated(update(number), 1, {})
    clock.now += 60.0
    progress_lines.begin()
    for number in range(11, 21):
        progress_lines.updated(update(number), 1, {"loss": 0.5})
    clock.now += 5.0
    progress_lines.tick([0], begun=True, samples=20)
    progress_lines.end(20, 20, 65.04)
    assert capsys.readouterr().out.splitlines() == [
        "training",
        "continuing at version 10",
        "update 20 of 50, 2 a second, 0:15 left, 1 worker, loss 0.5",
        "20 of 50 updates of 20 samples in 65.0 s",
    ]


def test_finished_run_says_how_many_updates_it_made(capsys):
    clock = Clock()
    clock.progress(Settings(spec=RunSpec(workers=1, steps=3))).end(3, 12, 0.0)
    clock.progress(Settings(spec=RunSpec(workers=1))).end(4, 12, 0.0)
    assert capsys.readouterr().out.splitlines() == [
        "3 updates of 12 samples in 0.0 s",
        "4 updates of 12 samples in 0.0 s",
    ]


def test_server_prints_no_progress_if_there_is_a_live_panel(capsys):
    clock = Clock()
    progress_lines = clock.progress(Settings(spec=RunSpec(workers=2, steps=50), progress=False))
    clock.now += 10.0
    progress_lines.tick([0], begun=False, samples=0)
    progress_lines.begin()
    clock.now += 10.0
    progress_lines.tick([0, 1], begun=True, samples=0)
    assert capsys.readouterr().out.splitlines() == [
        "waiting for worker 1: 1 of 2 have joined",
        "training",
    ]


def test_restored_run_says_where_it_continues(capsys):
    progress_lines = Clock().progress(Settings(spec=RunSpec(workers=1)))
    progress_lines.restored(40, 320)
    progress_lines.begin()
    assert capsys.readouterr().out == "continuing at version 40\n"


def lines_after(spec, samples, capsys):
    """Return the lines of a run whose five updates a second have these many samples each."""
    clock = Clock()
    progress_lines = clock.progress(Settings(spec=spec))
    progress_lines.begin()
    for second in (1, 2):
        for number in range(1, 26):
            progress_lines.updated(update(25 * (second - 1) + number), 1, {})
        clock.now += 5.0
        progress_lines.tick([0], begun=True, samples=25 * second * samples)
    return capsys.readouterr().out.splitlines()[1:]


def test_time_left_follows_from_the_samples_if_they_are_the_goal(capsys):
    assert lines_after(RunSpec(workers=1, samples=400_000), 8, capsys) == [
        "update 25, 200 of 400000 samples, 5 a second, 2:46:35 left, 1 worker",
        "update 50, 400 of 400000 samples, 5 a second, 2:46:30 left, 1 worker",
    ]


def test_goal_that_is_reached_first_gives_the_time_left(capsys):
    spec = RunSpec(workers=1, steps=1000, samples=1000)
    assert lines_after(spec, 8, capsys)[1] == (
        "update 50 of 1000, 400 of 1000 samples, 5 a second, 0:15 left, 1 worker"
    )


def test_run_without_a_goal_has_no_time_left(capsys):
    assert lines_after(RunSpec(workers=1), 8, capsys)[1] == ("update 50, 5 a second, 1 worker")


def test_line_names_the_workers_that_the_run_waits_for(capsys):
    clock = Clock()
    progress_lines = clock.progress(Settings(spec=RunSpec(workers=9)))
    for waiting_s in ({2: 12.2}, {1: 5.0, 2: 17.4}, dict.fromkeys(range(7), 22.0), {}):
        clock.now += 5.0
        progress_lines.tick(range(9), begun=True, samples=0, waiting_s=waiting_s)
    assert capsys.readouterr().out.splitlines() == [
        "update 0, 0 a second, 9 workers; waiting for worker 2 for 12 s",
        "update 0, 0 a second, 9 workers; waiting for workers 1, 2 for 17 s",
        "update 0, 0 a second, 9 workers; waiting for workers 0, 1, 2, 3, 4 and 2 more for 22 s",
        "update 0, 0 a second, 9 workers",
    ]


def test_server_says_nothing_after_the_end(capsys):
    """The launcher says which workers are still running, and until when."""
    clock = Clock()
    progress_lines = clock.progress(Settings(spec=RunSpec(workers=1)))
    progress_lines.end(3, 12, 0.0)
    clock.now += 100.0
    progress_lines.tick([0], begun=True, samples=12)
    assert len(capsys.readouterr().out.splitlines()) == 1


def test_missing_workers_are_named_before_the_run_begins(capsys):
    clock = Clock()
    progress_lines = clock.progress(Settings(spec=RunSpec(workers=9)))
    for here in ([0, 1, 2, 3, 4, 5, 6, 8], [3], []):
        clock.now += 6.0
        progress_lines.tick(here, begun=False, samples=0)
    assert capsys.readouterr().out.splitlines() == [
        "waiting for worker 7: 8 of 9 have joined",
        "waiting for workers 0, 1, 2, 4, 5 and 3 more: 1 of 9 have joined",
        "waiting for workers 0, 1, 2, 3, 4 and 4 more: 0 of 9 have joined",
    ]


def test_line_about_missing_workers_says_for_how_long_if_that_is_long(capsys):
    clock = Clock()
    progress_lines = clock.progress(Settings(spec=RunSpec(workers=9)))
    clock.now += 6.0
    progress_lines.tick([*range(8)], begun=False, samples=0, waiting_s={8: 30.2})
    assert capsys.readouterr().out == "waiting for worker 8 for 30 s: 8 of 9 have joined\n"
