# SPDX-License-Identifier: BSD-3-Clause
"""When a run is saved, and whose places go into a checkpoint."""

from threading import Event

import pytest
import torch

from paceline.errors import SpecError
from paceline.run.server.checkpoint import Archive, Saved
from paceline.run.server.checkpointer import LAST_PATIENCE_S, PATIENCE_S, Checkpointer
from paceline.run.settings import Every, parse_every


class Desk:
    """A checkpointer with a real archive, whose writes can be held."""

    def __init__(self, folder, every="10"):
        self.folder = folder
        self.said = []
        self.exported = 0
        self.may_go_on = Event()
        self.may_go_on.set()
        self.archive = Archive(folder / "checkpoints", self._say)
        self.checkpointer = Checkpointer(
            self.archive, parse_every(every), self._export, self.said.append
        )
        self.checkpointer.begin(0, 0.0)

    def _say(self, text):
        self.said.append(text)
        self.may_go_on.wait(60)

    def _export(self):
        self.exported += 1

    def tell(self, worker, place):
        """A worker tells the place that it was asked for last."""
        self.checkpointer.take(worker, self.checkpointer.checkpoint, place)

    def hold(self):
        """Let the next write fail, and last until `release`: that is told by the thread of it."""
        (self.folder / "checkpoints").write_text("in the way")
        self.may_go_on.clear()

    def release(self):
        (self.folder / "checkpoints").unlink()
        self.may_go_on.set()
        self.archive.wait()

    def written(self):
        """What is on the disk: the newest version and the places."""
        self.archive.wait()
        found = self.archive.load()
        return None if found is None else (found.version, found.places)


@pytest.fixture
def desk(tmp_path):
    made = []

    def make(every="10"):
        made.append(Desk(tmp_path, every))
        return made[-1]

    yield make
    for one in made:
        one.may_go_on.set()
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
def test_how_often_is_a_number_of_updates_or_a_duration(text, every):
    assert parse_every(text) == every


@pytest.mark.parametrize(
    "text", ["", "often", "-1", "-5s", "nan", "inf", "10x", "1e999s", "9" * 5000]
)
def test_how_often_must_be_one_of_the_two(text):
    with pytest.raises(SpecError, match="must be a number of updates or a duration such as 60s"):
        parse_every(text)


def test_a_run_is_saved_every_so_many_updates(desk):
    checkpointer = desk("10").checkpointer
    checkpointer.begin(100, 0.0)
    assert [version for version in range(100, 121) if checkpointer.is_due(version, 1e9)][:1] == [
        110
    ]
    checkpointer.save(run_at(113), (), (), 5.0)  # a few late, as when the disk was slow
    assert not checkpointer.is_due(122, 1e9)
    assert checkpointer.is_due(123, 5.0)


def test_a_run_is_saved_every_so_many_seconds(desk):
    checkpointer = desk("60s").checkpointer
    checkpointer.begin(7, 100.0)
    assert not checkpointer.is_due(10**9, 159.9)
    assert checkpointer.is_due(8, 160.0)
    checkpointer.save(run_at(8), (), (), 170.0)
    assert not checkpointer.is_due(9, 229.9)
    assert checkpointer.is_due(9, 230.0)


def test_a_run_may_never_be_saved(desk):
    one = desk("0")
    assert not one.checkpointer.is_on
    one.checkpointer.hasten()
    assert not one.checkpointer.is_overdue
    assert not one.checkpointer.is_due(10**9, 1e9)
    assert not one.checkpointer.save(run_at(3), [0], [1], 0.0)
    assert not one.checkpointer.wants_place(0)
    one.checkpointer.save_last(run_at(4), [0], 0.0)
    assert not one.checkpointer.wants_place(0)
    one.checkpointer.finish()
    assert one.written() is None
    assert not (one.folder / "checkpoints").exists()
    assert one.exported == 1  # what the run was for is written all the same


def test_what_nobody_brings_again_is_saved_at_once(desk):
    one = desk("10")
    assert not one.checkpointer.is_overdue
    one.checkpointer.hasten()
    assert one.checkpointer.is_overdue
    assert one.checkpointer.is_due(1, 0.0)
    one.checkpointer.save(run_at(1), (), (), 0.0)
    assert not one.checkpointer.is_overdue
    assert not one.checkpointer.is_due(10, 0.0)
    assert one.checkpointer.is_due(11, 0.0)


def test_what_is_to_be_saved_at_once_waits_for_a_slow_disk_and_is_not_forgotten(desk):
    one = desk("10")
    one.hold()
    one.checkpointer.save(run_at(10), (), (), 0.0)
    one.checkpointer.tick(0.0)
    one.checkpointer.hasten()
    assert not one.checkpointer.is_due(11, 0.0)
    assert not one.checkpointer.save(run_at(20), (), (), 0.0)  # its turn has come anyhow
    one.release()
    assert one.checkpointer.is_due(21, 0.0)
    assert one.checkpointer.save(run_at(21), (), (), 0.0)
    one.checkpointer.tick(0.0)
    assert one.written() == (21, {})


# ------------------------------------------------------------------------------------------- places


def test_who_waits_is_asked_with_its_work_and_all_are_waited_for(desk):
    one = desk()
    assert one.checkpointer.save(run_at(10), idle=[0, 1], busy=[2], now=0.0)
    assert [one.checkpointer.wants_place(worker) for worker in range(4)] == [1, 1, 0, 0]
    for worker in (2, 0):
        one.tell(worker, b"at %d" % worker)
        one.checkpointer.tick(1.0)
        assert one.written() is None
    assert [one.checkpointer.wants_place(worker) for worker in range(3)] == [0, 1, 0]
    one.tell(1, b"at 1")
    assert one.written() == (10, {0: b"at 0", 1: b"at 1", 2: b"at 2"})


def test_only_the_first_answer_counts(desk):
    one = desk()
    one.checkpointer.save(run_at(10), idle=[0], busy=[1], now=0.0)
    one.tell(0, b"when it was asked")
    one.tell(0, b"later")
    one.tell(7, b"nobody asked")
    one.tell(1, b"there")
    one.tell(1, b"later")
    assert one.written() == (10, {0: b"when it was asked", 1: b"there"})
    assert one.checkpointer.place_of(7) == b""


def test_a_place_that_was_told_too_late_is_not_taken_for_the_next_checkpoint(desk):
    """What the worker had in its hands at the first is in the second already."""
    one = desk()
    one.checkpointer.save(run_at(10), idle=[], busy=[0, 1], now=0.0)
    one.checkpointer.save(run_at(11), idle=[0, 1], busy=[], now=1.0)
    assert one.written() == (10, {})
    one.checkpointer.take(0, 1, b"at 10")
    assert [one.checkpointer.wants_place(worker) for worker in (0, 1)] == [2, 2]
    one.checkpointer.take(0, 2, b"at 11")
    one.checkpointer.take(1, 2, b"at 11")
    assert one.written() == (11, {0: b"at 11", 1: b"at 11"})


def test_who_leaves_is_not_waited_for_and_its_place_before_is_kept(desk):
    one = desk()
    one.checkpointer.know({0: b"old 0", 1: b"old 1", 9: b"gone"})
    one.checkpointer.save(run_at(10), idle=[0], busy=[1], now=0.0)
    one.tell(1, b"new 1")
    one.checkpointer.leave(0)
    assert not one.checkpointer.wants_place(0)
    one.tell(0, b"too late")
    one.checkpointer.tick(0.5)
    assert one.written() == (10, {0: b"old 0", 1: b"new 1", 9: b"gone"})
    assert one.checkpointer.place_of(0) == b"old 0"


def test_where_nobody_has_anything_to_tell_nobody_is_waited_for(desk):
    one = desk()
    one.checkpointer.save(run_at(10), (), (), 0.0)
    one.checkpointer.tick(0.0)
    assert one.written() == (10, {})


def test_patience_has_an_end(desk):
    one = desk()
    one.checkpointer.save(run_at(10), idle=[0], busy=[1], now=5.0)
    one.tell(0, b"here")
    one.checkpointer.tick(5.0 + PATIENCE_S)
    assert one.written() is None
    one.checkpointer.tick(5.1 + PATIENCE_S)
    assert one.written() == (10, {0: b"here"})
    one.tell(1, b"at last")  # of no checkpoint any more
    assert one.checkpointer.place_of(1) == b""


def test_a_run_that_goes_on_gives_the_workers_the_places_that_were_saved(desk):
    checkpointer = desk().checkpointer
    assert checkpointer.place_of(3) == b""
    places = {3: b"there"}
    checkpointer.know(places)
    places.clear()
    assert checkpointer.place_of(3) == b"there"


# ------------------------------------------------------------------------------------------ writing


def test_the_next_checkpoint_does_not_wait_for_places_of_the_one_before(desk):
    one = desk()
    one.checkpointer.save(run_at(10), idle=[0], busy=[1], now=0.0)
    one.tell(0, b"at 10")
    assert one.checkpointer.save(run_at(20), idle=[1], busy=[0], now=1.0)
    assert one.written() == (10, {0: b"at 10"})
    assert [one.checkpointer.wants_place(worker) for worker in (0, 1)] == [0, 2]
    one.tell(0, b"at 20")
    one.tell(1, b"at 20")
    assert one.written() == (20, {0: b"at 20", 1: b"at 20"})


def test_while_one_is_being_written_no_other_is_begun(desk):
    one = desk("10")
    one.hold()
    one.checkpointer.save(run_at(10), (), (), 0.0)
    one.checkpointer.tick(0.0)
    assert one.archive.is_writing
    assert not one.checkpointer.save(run_at(20), [0], [], 1.0)
    assert not one.checkpointer.wants_place(0)
    assert not one.checkpointer.is_due(29, 1.0)  # a slow disk makes fewer checkpoints
    one.release()
    assert one.checkpointer.is_due(30, 1.0)
    assert one.checkpointer.save(run_at(30), [], [], 1.0)
    one.checkpointer.tick(1.0)
    assert one.written() == (30, {})


def test_the_server_never_waits_for_the_disk(desk):
    """The places of the second checkpoint are there while the first is still being written."""
    one = desk()
    one.checkpointer.save(run_at(10), idle=[0], busy=[], now=0.0)
    one.hold()
    assert one.checkpointer.save(run_at(20), idle=[0], busy=[], now=1.0)
    one.tell(0, b"at 20")
    one.checkpointer.tick(100.0)
    assert one.archive.is_writing  # the first
    one.tell(0, b"later")
    one.release()
    one.checkpointer.tick(101.0)
    assert one.written() == (20, {0: b"at 20"})


def test_the_last_version_is_written_whatever_is_on_its_way(desk):
    one = desk()
    one.checkpointer.save(run_at(10), idle=[0], busy=[1], now=0.0)
    one.checkpointer.save_last(run_at(13), [0, 1], 1.0)
    assert [one.checkpointer.wants_place(worker) for worker in (0, 1)] == [2, 2]
    one.tell(1, b"at the end")
    one.checkpointer.finish()
    assert one.written() == (13, {1: b"at the end"})
    assert one.exported == 1
    one.checkpointer.finish()
    one.checkpointer.tick(100.0)
    assert sorted(path.name for path in (one.folder / "checkpoints").iterdir()) == [
        "0000000010.ckpt",
        "0000000013.ckpt",
    ]


def test_the_last_version_is_written_soon_and_again_with_the_places_that_were_told_later(desk):
    """A worker that does not listen must not cost it, should somebody kill the server."""
    one = desk()
    one.checkpointer.save_last(run_at(13), [0, 1], 5.0)
    one.tell(0, b"at the end")
    one.checkpointer.tick(5.0 + LAST_PATIENCE_S)
    assert one.written() is None
    one.checkpointer.tick(5.1 + LAST_PATIENCE_S)
    assert one.written() == (13, {0: b"at the end"})
    one.checkpointer.tick(5.2 + LAST_PATIENCE_S)
    assert not one.archive.is_writing
    one.tell(1, b"at last")
    assert one.written() == (13, {0: b"at the end", 1: b"at last"})
    one.checkpointer.tick(100.0)
    assert not one.archive.is_writing


def test_places_that_were_told_for_the_last_version_are_in_it(desk):
    one = desk()
    one.checkpointer.save_last(run_at(13), [0, 1], 1.0)
    for worker in (0, 1):
        one.tell(worker, b"%d" % worker)
    assert one.written() == (13, {0: b"0", 1: b"1"})


def test_without_memory_there_is_a_word_and_no_checkpoint(desk):
    one = desk()
    too_much = torch.zeros(1).expand(10**14)
    assert not one.checkpointer.save(run_at(10, too_much), idle=[0], busy=[1], now=0.0)
    assert not one.checkpointer.wants_place(0)
    [word] = one.said
    assert word.startswith("no checkpoint of version 10: 400000000 MB of shared memory for the ")
    assert not one.checkpointer.is_due(19, 0.0)
    assert one.checkpointer.save(run_at(20), idle=[], busy=[], now=0.0)
    one.checkpointer.tick(0.0)
    assert one.written() == (20, {})


def test_without_memory_for_the_last_version_the_one_before_is_written(desk):
    one = desk()
    one.checkpointer.save(run_at(10), idle=[0], busy=[], now=0.0)
    one.checkpointer.save_last(run_at(13, torch.zeros(1).expand(10**14)), [0], 1.0)
    one.checkpointer.finish()
    assert one.written() == (10, {})
