# SPDX-License-Identifier: BSD-3-Clause
"""When a run is saved, and which workers' positions go into a checkpoint."""

import os
from threading import Event

import pytest
import torch

from fakes import NoTrace
from paceline.errors import SpecError
from paceline.files import Disk
from paceline.run.server.checkpoint import Archive, Saved
from paceline.run.server.checkpointer import EARLY_S, POSITIONS_TIMEOUT_S, Checkpointer
from paceline.run.settings import Every, parse_every


class Bench:
    """A checkpointer with a real archive whose writes a test can hold."""

    def __init__(self, folder, every="10"):
        self.folder = folder
        self.printed = []
        self.exported = 0
        self.may_continue = Event()
        self.may_continue.set()
        self.is_held = Event()
        self.archive = Archive(folder / "checkpoints", self._say)
        self.checkpointer = Checkpointer(
            self.archive, parse_every(every), self._export, self.printed.append, NoTrace()
        )
        self.checkpointer.begin(0, 0.0)

    def _say(self, text):
        self.printed.append(text)
        self.is_held.set()
        self.may_continue.wait(60)

    def _export(self):
        self.exported += 1

    def report(self, worker, position, now=0.0):
        """Report the position that a worker was asked for last."""
        self.checkpointer.take_position(worker, self.checkpointer.checkpoint, position, now)

    def hold(self):
        """Let the next write fail, and last until `release`."""
        (self.folder / "checkpoints").write_text("in the way")
        self.may_continue.clear()
        self.is_held.clear()

    def release(self):
        assert self.is_held.wait(60)
        (self.folder / "checkpoints").unlink()
        self.may_continue.set()
        self.archive.wait()

    def written(self):
        """Return what is on the disk: the newest version and the positions."""
        self.archive.wait()
        found = self.archive.load()
        return None if found is None else (found.version, found.positions)


@pytest.fixture
def bench(tmp_path):
    made = []

    def make(every="10"):
        made.append(Bench(tmp_path, every))
        return made[-1]

    yield make
    for one in made:
        one.may_continue.set()
        one.checkpointer.finish()


def run_at(version, weights=None):
    weights = torch.full((4,), float(version)) if weights is None else weights
    return Saved(version, 8 * version, [], None, {"weights": weights}, {})


# --------------------------------------------------------------------------------------------- when


@pytest.mark.parametrize(
    ("text", "every"),
    [
        ("100", Every(updates=100)),
        (" 7 ", Every(updates=7)),
        ("60s", Every(seconds=60.0)),
        ("500ms", Every(seconds=0.5)),
        ("2m", Every(seconds=120.0)),
        ("0", Every()),
        ("0s", Every()),
    ],
)
def test_interval_is_a_number_of_updates_or_a_duration(text, every):
    assert parse_every(text) == every


@pytest.mark.parametrize(
    "text", ["", "often", "-1", "-5s", "nan", "inf", "10x", "1e999s", "9" * 5000]
)
def test_other_interval_is_refused(text):
    with pytest.raises(SpecError, match="must be a number of updates or a duration such as 60s"):
        parse_every(text)


@pytest.mark.parametrize("text", ["1.5", "60.0", "1e3", ".5"])
def test_seconds_need_a_unit(text):
    """A plain number is a number of updates."""
    with pytest.raises(SpecError, match=f"with a unit, got '{text}'; for seconds, write {text}s"):
        parse_every(text)


def test_run_is_saved_every_n_updates(bench):
    checkpointer = bench("10").checkpointer
    checkpointer.begin(100, 0.0)
    assert [version for version in range(100, 121) if checkpointer.is_due(version, 1e9)][:1] == [
        110
    ]
    checkpointer.save(run_at(113), (), (), 5.0)  # a few late, because the disk was slow
    assert not checkpointer.is_due(122, 1e9)
    assert checkpointer.is_due(123, 5.0)


def test_run_is_saved_every_n_seconds(bench):
    checkpointer = bench("60s").checkpointer
    checkpointer.begin(7, 100.0)
    assert not checkpointer.is_due(10**9, 159.9)
    assert checkpointer.is_due(8, 160.0)
    checkpointer.save(run_at(8), (), (), 170.0)
    assert not checkpointer.is_due(9, 229.9)
    assert checkpointer.is_due(9, 230.0)


def test_run_without_checkpoints_still_exports_its_result(bench):
    run = bench("0")
    assert not run.checkpointer.is_on
    run.checkpointer.hasten()
    assert not run.checkpointer.is_overdue(1, 1e9)
    assert not run.checkpointer.is_due(10**9, 1e9)
    assert not run.checkpointer.save(run_at(3), [0], [1], 0.0)
    assert not run.checkpointer.wants_position(0)
    run.checkpointer.save_last(run_at(4), [0], 0.0)
    assert not run.checkpointer.wants_position(0)
    run.checkpointer.finish()
    assert run.written() is None
    assert not (run.folder / "checkpoints").exists()
    assert run.exported == 1


def test_version_is_overdue_by_the_clock_until_it_is_copied(bench):
    run = bench("60s")
    assert not run.checkpointer.is_overdue(8, 59.9)
    assert run.checkpointer.is_overdue(8, 60.0)
    run.checkpointer.save(run_at(8), (), (), 70.0)
    run.checkpointer.tick(70.0)
    run.archive.wait()
    assert not run.checkpointer.is_overdue(9, 129.9)
    assert not run.checkpointer.is_overdue(8, 1e9)
    assert run.checkpointer.is_overdue(9, 130.0)


def test_version_that_could_not_be_written_is_overdue_again(bench):
    run = bench("60s")
    run.hold()
    run.checkpointer.save(run_at(8), (), (), 60.0)
    run.checkpointer.tick(60.0)
    run.release()
    assert not run.checkpointer.is_overdue(8, 119.9)
    assert run.checkpointer.is_overdue(8, 120.0)
    run.checkpointer.save(run_at(8), (), (), 120.0)
    run.checkpointer.tick(120.0)
    assert run.written() == (8, {})
    assert not run.checkpointer.is_overdue(8, 1e9)


def test_nothing_is_overdue_while_a_checkpoint_is_being_written(bench):
    run = bench("60s")
    run.hold()
    run.checkpointer.save(run_at(8), (), (), 60.0)
    run.checkpointer.tick(60.0)
    assert not run.checkpointer.is_overdue(9, 1e9)
    run.release()
    assert run.checkpointer.is_overdue(9, 1e9)


def test_hastened_checkpoint_is_due_immediately(bench):
    run = bench("10")
    assert not run.checkpointer.is_overdue(1, 0.0)
    run.checkpointer.hasten()
    assert run.checkpointer.is_overdue(1, 0.0)
    assert run.checkpointer.is_due(1, 0.0)
    run.checkpointer.save(run_at(1), (), (), 0.0)
    assert not run.checkpointer.is_overdue(1, 0.0)
    assert not run.checkpointer.is_due(10, 0.0)
    assert run.checkpointer.is_due(11, 0.0)


def test_hastened_checkpoint_waits_for_a_slow_disk_and_is_not_forgotten(bench):
    run = bench("10")
    run.hold()
    run.checkpointer.save(run_at(10), (), (), 0.0)
    run.checkpointer.tick(0.0)
    run.checkpointer.hasten()
    assert not run.checkpointer.is_due(11, 0.0)
    assert not run.checkpointer.save(run_at(20), (), (), 0.0)  # it was due anyway
    run.release()
    assert run.checkpointer.is_due(21, 0.0)
    assert run.checkpointer.save(run_at(21), (), (), 0.0)
    run.checkpointer.tick(0.0)
    assert run.written() == (21, {})


# --------------------------------------------------------------------------------------- positions


def test_checkpoint_waits_for_the_positions_of_idle_and_busy_workers(bench):
    run = bench()
    assert run.checkpointer.save(run_at(10), idle=[0, 1], busy=[2], now=0.0)
    assert [run.checkpointer.wants_position(worker) for worker in range(4)] == [1, 1, 0, 0]
    for worker in (2, 0):
        run.report(worker, b"at %d" % worker)
        run.checkpointer.tick(1.0)
        assert run.written() is None
    assert [run.checkpointer.wants_position(worker) for worker in range(3)] == [0, 1, 0]
    run.report(1, b"at 1")
    assert run.written() == (10, {0: b"at 0", 1: b"at 1", 2: b"at 2"})


def test_only_the_first_report_of_a_position_counts(bench):
    run = bench()
    run.checkpointer.save(run_at(10), idle=[0], busy=[1], now=0.0)
    run.report(0, b"when it was asked")
    run.report(0, b"later")
    run.report(7, b"it was not asked")
    run.report(1, b"there")
    run.report(1, b"later")
    assert run.written() == (10, {0: b"when it was asked", 1: b"there"})
    assert run.checkpointer.position_of(7) == b""


def test_late_position_is_not_used_for_the_next_checkpoint(bench):
    """The turn that the worker computed at the first one is part of the second one."""
    run = bench()
    run.checkpointer.save(run_at(10), idle=[], busy=[0, 1], now=0.0)
    run.checkpointer.save(run_at(11), idle=[0, 1], busy=[], now=1.0)
    assert run.written() == (10, {})
    run.checkpointer.take_position(0, 1, b"at 10", now=0.0)
    assert [run.checkpointer.wants_position(worker) for worker in (0, 1)] == [2, 2]
    run.checkpointer.take_position(0, 2, b"at 11", now=0.0)
    run.checkpointer.take_position(1, 2, b"at 11", now=0.0)
    assert run.written() == (11, {0: b"at 11", 1: b"at 11"})


def test_worker_that_leaves_keeps_its_previous_position(bench):
    run = bench()
    run.checkpointer.restore({0: b"old 0", 1: b"old 1", 9: b"gone"})
    run.checkpointer.save(run_at(10), idle=[0], busy=[1], now=0.0)
    run.report(1, b"new 1")
    run.checkpointer.forget(0)
    assert not run.checkpointer.wants_position(0)
    run.report(0, b"too late")
    run.checkpointer.tick(0.5)
    assert run.written() == (10, {0: b"old 0", 1: b"new 1", 9: b"gone"})
    assert run.checkpointer.position_of(0) == b"old 0"


def test_checkpoint_without_workers_is_written_immediately(bench):
    run = bench()
    run.checkpointer.save(run_at(10), (), (), 0.0)
    run.checkpointer.tick(0.0)
    assert run.written() == (10, {})


def test_checkpoint_is_written_early_and_completed_until_a_timeout(bench):
    run = bench()
    run.checkpointer.save(run_at(10), idle=[0], busy=[1], now=5.0)
    run.report(0, b"here")
    run.checkpointer.tick(5.0 + EARLY_S)
    assert run.written() is None
    run.checkpointer.tick(5.1 + EARLY_S)
    assert run.written() == (10, {0: b"here"})
    run.checkpointer.tick(5.1 + POSITIONS_TIMEOUT_S)
    run.report(1, b"at last")  # too late for any checkpoint
    assert run.checkpointer.position_of(1) == b""
    run.checkpointer.finish()
    assert run.written() == (10, {0: b"here"})


def test_position_that_arrives_after_the_early_write_completes_the_checkpoint(bench):
    run = bench()
    run.checkpointer.save(run_at(10), idle=[0], busy=[1], now=5.0)
    run.report(0, b"here")
    run.checkpointer.tick(5.1 + EARLY_S)
    run.archive.wait()
    run.checkpointer.tick(5.0 + POSITIONS_TIMEOUT_S)
    run.report(1, b"there")
    assert run.written() == (10, {0: b"here", 1: b"there"})


def test_checkpoint_without_news_is_not_written_again(bench):
    run = bench()
    run.checkpointer.save(run_at(10), idle=[], busy=[1], now=5.0)
    run.checkpointer.tick(5.1 + EARLY_S)
    run.archive.wait()
    written = (run.folder / "checkpoints" / "0000000010.ckpt").stat().st_ino
    run.checkpointer.tick(5.1 + POSITIONS_TIMEOUT_S)
    run.checkpointer.finish()
    assert (run.folder / "checkpoints" / "0000000010.ckpt").stat().st_ino == written


def test_early_write_that_failed_is_repeated(bench):
    run = bench()
    run.hold()
    run.checkpointer.save(run_at(10), idle=[], busy=[1], now=5.0)
    run.checkpointer.tick(5.1 + EARLY_S)
    run.release()
    assert run.archive.failure
    run.checkpointer.finish()
    assert run.written() == (10, {})
    assert run.checkpointer.failure == ""


def test_early_write_without_a_descriptor_for_it_is_made_up_for(bench, monkeypatch):
    run = bench()

    def fail(fd):
        raise OSError(24, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(os, "dup", fail)
        run.checkpointer.save_last(run_at(10), [1], 1.0)
    assert run.written() is None
    run.checkpointer.finish()
    assert run.written() == (10, {})


def test_workers_with_long_turns_are_not_early_each_time(bench):
    run = bench()
    run.checkpointer.save(run_at(10), idle=[], busy=[1], now=0.0)
    run.report(1, b"there", now=4 * EARLY_S)
    run.archive.wait()
    run.checkpointer.save(run_at(20), idle=[], busy=[1], now=100.0)
    run.checkpointer.tick(100.0 + 7 * EARLY_S)
    assert run.written()[0] == 10
    run.checkpointer.tick(100.1 + 8 * EARLY_S)
    assert run.written()[0] == 20


def test_renewed_checkpoint_that_could_not_be_written_is_no_failure(bench):
    """The one that was written early stays."""
    run = bench()
    run.checkpointer.save(run_at(10), idle=[], busy=[1], now=5.0)
    run.checkpointer.tick(5.1 + EARLY_S)
    run.archive.wait()
    partial = run.folder / "checkpoints" / ".0000000010.ckpt.partial"
    partial.mkdir()
    (partial / "in the way").touch()
    run.report(1, b"there")
    run.checkpointer.finish()
    assert "cannot write the checkpoint of version 10" in run.printed[-1]
    assert run.checkpointer.failure == ""
    assert run.written() == (10, {})


def test_second_version_of_one_event_replaces_the_first(bench):
    """The trace doesn't have the update of the first one yet."""
    run = bench()
    run.checkpointer.save(run_at(10), idle=[0], busy=[], now=5.0)
    run.checkpointer.save(run_at(20), idle=[0], busy=[], now=5.0)
    run.report(0, b"here")
    assert run.written() == (20, {0: b"here"})
    assert [path.name for path in (run.folder / "checkpoints").iterdir()] == ["0000000020.ckpt"]


def test_second_version_of_one_event_without_memory_leaves_nothing_to_write(bench):
    run = bench()
    run.checkpointer.save(run_at(10), idle=[0], busy=[], now=5.0)
    run.checkpointer.save(run_at(20, torch.zeros(1).expand(10**14)), [0], [], 5.0)
    assert not run.checkpointer.wants_position(0)
    run.checkpointer.tick(5.1 + EARLY_S)
    assert run.written() is None


def test_restored_run_gives_workers_their_saved_positions(bench):
    checkpointer = bench().checkpointer
    assert checkpointer.position_of(3) == b""
    positions = {3: b"there"}
    checkpointer.restore(positions)
    positions.clear()
    assert checkpointer.position_of(3) == b"there"


# ------------------------------------------------------------------------------------------ writing


def test_next_checkpoint_does_not_wait_for_positions_of_the_previous_one(bench):
    run = bench()
    run.checkpointer.save(run_at(10), idle=[0], busy=[1], now=0.0)
    run.report(0, b"at 10")
    assert run.checkpointer.save(run_at(20), idle=[1], busy=[0], now=1.0)
    assert run.written() == (10, {0: b"at 10"})
    assert [run.checkpointer.wants_position(worker) for worker in (0, 1)] == [0, 2]
    run.report(0, b"at 20")
    run.report(1, b"at 20")
    assert run.written() == (20, {0: b"at 20", 1: b"at 20"})


def test_no_checkpoint_begins_while_another_is_being_written(bench):
    run = bench("10")
    run.hold()
    run.checkpointer.save(run_at(10), (), (), 0.0)
    run.checkpointer.tick(0.0)
    assert run.archive.is_writing
    assert not run.checkpointer.save(run_at(20), [0], [], 1.0)
    assert not run.checkpointer.wants_position(0)
    assert not run.checkpointer.is_due(29, 1.0)  # a slow disk makes fewer checkpoints
    run.release()
    assert run.checkpointer.is_due(30, 1.0)
    assert run.checkpointer.save(run_at(30), [], [], 1.0)
    run.checkpointer.tick(1.0)
    assert run.written() == (30, {})


def test_server_never_waits_for_the_disk(bench):
    """The positions of the second checkpoint arrive while the first is still being written."""
    run = bench()
    run.checkpointer.save(run_at(10), idle=[0], busy=[], now=0.0)
    run.hold()
    assert run.checkpointer.save(run_at(20), idle=[0], busy=[], now=1.0)
    run.report(0, b"at 20")
    run.checkpointer.tick(100.0)
    assert run.archive.is_writing  # the first
    run.report(0, b"later")
    run.release()
    run.checkpointer.tick(101.0)
    assert run.written() == (20, {0: b"at 20"})


def test_last_version_is_written_even_if_another_checkpoint_waits(bench):
    run = bench()
    run.checkpointer.save(run_at(10), idle=[0], busy=[1], now=0.0)
    run.checkpointer.save_last(run_at(13), [0, 1], 1.0)
    assert [run.checkpointer.wants_position(worker) for worker in (0, 1)] == [2, 2]
    run.report(1, b"at the end")
    run.checkpointer.finish()
    assert run.written() == (13, {1: b"at the end"})
    assert run.exported == 1
    run.checkpointer.finish()
    run.checkpointer.tick(100.0)
    assert sorted(path.name for path in (run.folder / "checkpoints").iterdir()) == [
        "0000000010.ckpt",
        "0000000013.ckpt",
    ]


def test_last_version_is_on_disk_at_once_and_written_again_with_the_positions(bench):
    """Workers that learn of the end exit, so nobody could make a lost update again."""
    run = bench()
    run.checkpointer.save_last(run_at(13), [0, 1], 5.0)
    assert not run.archive.is_writing
    assert run.written() == (13, {})
    run.report(0, b"at the end")
    run.checkpointer.tick(5.1 + EARLY_S)
    assert not run.archive.is_writing
    run.report(1, b"at last")
    assert run.written() == (13, {0: b"at the end", 1: b"at last"})
    run.checkpointer.tick(100.0)
    assert not run.archive.is_writing


def test_last_version_has_the_positions_that_were_reported_for_it(bench):
    run = bench()
    run.checkpointer.save_last(run_at(13), [0, 1], 1.0)
    for worker in (0, 1):
        run.report(worker, b"%d" % worker)
    assert run.written() == (13, {0: b"0", 1: b"1"})


def test_without_memory_there_is_a_message_and_no_checkpoint(bench):
    run = bench()
    too_much = torch.zeros(1).expand(10**14)
    assert not run.checkpointer.save(run_at(10, too_much), idle=[0], busy=[1], now=0.0)
    assert not run.checkpointer.wants_position(0)
    [line] = run.printed
    assert line.startswith(
        "no checkpoint of version 10: not enough shared memory for the checkpoint"
    )
    assert "need 400000000 MB" in line
    assert not run.checkpointer.is_due(19, 0.0)
    assert run.checkpointer.save(run_at(20), idle=[], busy=[], now=0.0)
    run.checkpointer.tick(0.0)
    assert run.written() == (20, {})


def test_without_memory_for_the_last_version_the_previous_one_is_written(bench):
    run = bench()
    run.checkpointer.save(run_at(10), idle=[0], busy=[], now=0.0)
    run.checkpointer.save_last(run_at(13, torch.zeros(1).expand(10**14)), [0], 1.0)
    run.checkpointer.finish()
    assert run.checkpointer.failure.startswith("no checkpoint of version 13: not enough shared")
    assert run.written() == (10, {})


# -------------------------------------------------------------------------------- what went wrong


def test_result_that_cannot_be_written_is_a_failure(bench):
    run = bench("0")

    def fail():
        raise OSError(28, "No space left on device")

    run.checkpointer._export = fail
    run.checkpointer.save_last(run_at(5), (), 1.0)
    run.checkpointer.finish()
    assert run.checkpointer.failure == "cannot write the weights: No space left on device"
    assert run.printed == [run.checkpointer.failure]


def test_last_checkpoint_that_cannot_be_written_is_a_failure(bench):
    run = bench("10")
    run.hold()
    run.may_continue.set()
    run.checkpointer.save_last(run_at(5), (), 1.0)
    run.checkpointer.finish()
    assert run.checkpointer.failure == "cannot write the checkpoint of version 5: File exists"
    (run.folder / "checkpoints").unlink()


def test_earlier_checkpoint_that_could_not_be_written_is_no_failure(bench):
    run = bench("10")
    run.hold()
    run.checkpointer.save(run_at(10), (), (), 1.0)
    run.checkpointer.tick(2.0)
    run.release()
    run.checkpointer.save_last(run_at(15), (), 3.0)
    run.checkpointer.finish()
    assert run.checkpointer.failure == ""
    assert run.written() == (15, {})


class UnsafeDisk(Disk):
    """A disk that can't make the names of checkpoints durable."""

    def sync_folder(self, path):
        if path.name == "checkpoints":
            raise OSError(5, "Input/output error")
        super().sync_folder(path)


def test_last_checkpoint_whose_name_cannot_be_synced_is_a_failure(tmp_path):
    said = []
    archive = Archive(tmp_path / "checkpoints", said.append, disk=UnsafeDisk())
    checkpointer = Checkpointer(archive, Every(updates=1), lambda: None, said.append, NoTrace())
    checkpointer.save_last(run_at(10), (), 1.0)
    checkpointer.finish()
    assert checkpointer.failure == "cannot write the checkpoint of version 10: Input/output error"


# --------------------------------------------------------------------------------------- the trace


class TraceLog:
    """A trace that notes what is done with it."""

    def __init__(self, folder):
        self.mark = (0, 0)
        self.log = []
        self._folder = folder

    def flush(self):
        self.log.append("flush")

    def sync(self):
        self.log.append(f"sync, {len(list(self._folder.glob('*.ckpt')))} checkpoints")


def test_trace_is_synced_before_the_checkpoint_that_refers_to_it_appears(tmp_path):
    trace = TraceLog(tmp_path / "checkpoints")
    archive = Archive(tmp_path / "checkpoints", pytest.fail)
    checkpointer = Checkpointer(archive, Every(updates=1), pytest.fail, pytest.fail, trace)
    trace.mark = (123, 45)
    checkpointer.save(run_at(10), (), (), 1.0)
    checkpointer.finish()
    assert trace.log == ["flush", "sync, 0 checkpoints"]
    assert archive.load().trace == [123, 45]


def test_checkpoint_whose_trace_cannot_be_synced_does_not_appear(tmp_path):
    said = []
    trace = TraceLog(tmp_path / "checkpoints")

    def fail():
        raise OSError(5, "Input/output error")

    trace.sync = fail
    archive = Archive(tmp_path / "checkpoints", said.append)
    checkpointer = Checkpointer(archive, Every(updates=1), pytest.fail, pytest.fail, trace)
    checkpointer.save(run_at(10), (), (), 1.0)
    checkpointer.finish()
    assert archive.load() is None
    assert said[0].startswith("cannot write the checkpoint of version 10: Input/output error")
