# SPDX-License-Identifier: BSD-3-Clause
"""The current numbers of a run, whatever happens to the file they are read from."""

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from paceline.core.events import Fate
from paceline.sim.cluster import Cluster
from paceline.sim.simulate import simulate
from paceline.spec import RunSpec
from paceline.trace.schema import (
    Awaited,
    Ended,
    Gradient,
    Header,
    Joined,
    Left,
    Paused,
    Record,
    Restored,
    Resumed,
    Update,
)
from paceline.watch.live_numbers import Live, Moment, Slowest
from paceline.watch.summary import summarize

ACCEPTED = Fate.ACCEPTED

HEADER = Header(source="run", policy="sync", workers=2, steps=10)

NOTHING = Moment(
    version=0,
    rate=None,
    left_s=None,
    samples=0,
    epoch_samples=None,
    samples_goal=None,
    contributors=0,
    wanted=0,
    gradients=0,
    dropped=0,
    non_finite=0,
    workers=0,
    slowest=None,
    staleness=0.0,
    scalars={},
    paused="waiting for workers",
    restorations=0,
    lost=0,
    ended="",
    silent_s=0.0,
)


def line(record: Header | Record) -> bytes:
    return msgspec.json.encode(record) + b"\n"


class File:
    """A trace that is being written and read."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "trace.jsonl"
        self.live = Live(self.path)

    def append(self, *records: Header | Record) -> Moment:
        """Write these records, and read."""
        self.append_bytes(b"".join(map(line, records)))
        return self.read()

    def append_bytes(self, text: bytes) -> None:
        with self.path.open("ab") as file:
            file.write(text)

    def read(self, now: float = 0.0) -> Moment:
        self.live.read(now)
        return self.live.moment(now)


@pytest.fixture
def file(tmp_path: Path) -> File:
    return File(tmp_path)


def updates(first: int, last: int, every_s: float, begin: float = 0.0) -> list[Record]:
    return [Update(begin + (i - first + 1) * every_s, i, (0, 1), 2) for i in range(first, last + 1)]


# ---- the file ----


def test_missing_file_gives_no_numbers(file: File) -> None:
    assert file.read() == NOTHING
    assert file.append(HEADER, Joined(0.0, 0)) == replace(NOTHING, workers=1)


def test_folder_instead_of_a_file_gives_no_numbers(file: File) -> None:
    file.path.mkdir()
    assert file.read() == NOTHING


def test_unfinished_line_is_read_once_it_is_whole(file: File) -> None:
    whole = line(Update(1.0, 1, (0, 1), 2))
    file.append(HEADER)
    file.append_bytes(whole[:20])
    assert file.read().version == 0
    file.append_bytes(whole[20:])
    assert file.read().version == 1


def test_numbers_do_not_depend_on_how_the_file_grows(tmp_path: Path) -> None:
    trace = simulate("backup:1", Cluster.parse("50ms + exp:30ms"), RunSpec(workers=3, steps=4))
    text = b"".join(map(line, (trace.header, *trace.records)))
    moments = []
    for size in (7, 100, len(text)):
        (tmp_path / f"{size}").mkdir()
        file = File(tmp_path / f"{size}")
        for begin in range(0, len(text), size):
            file.append_bytes(text[begin : begin + size])
            file.read()
        moments.append(file.read())
    assert moments[0] == moments[1] == moments[2]
    assert moments[0].version == 4


def test_bad_lines_are_skipped(file: File) -> None:
    file.append(HEADER, *updates(1, 2, 1.0))
    file.append_bytes(b'{"type":"strange"}\n\xff\xfe\n\n{"t":\n')
    assert file.append(*updates(3, 3, 1.0, 2.0)).version == 3


def test_very_long_line_is_skipped(file: File) -> None:
    file.append(HEADER)
    file.append_bytes(b"x" * (3 << 20) + b"\n")
    assert file.append(*updates(1, 1, 1.0)).version == 1


def test_truncated_file_is_read_from_its_beginning(file: File) -> None:
    file.append(HEADER, Joined(0.0, 0), Joined(0.0, 1), *updates(1, 5, 1.0))
    file.path.write_bytes(line(HEADER) + line(Joined(0.0, 0)))
    assert file.read() == replace(NOTHING, workers=1)


def test_replaced_file_is_read_from_its_beginning(file: File) -> None:
    file.append(HEADER, Joined(0.0, 0))
    other = file.path.with_name("other")
    other.write_bytes(line(HEADER) + b"".join(map(line, updates(1, 9, 1.0))))
    other.replace(file.path)
    moment = file.read()
    assert (moment.version, moment.workers) == (9, 0)


def test_long_trace_is_read_over_several_calls(file: File) -> None:
    gradient = line(Gradient(1.0, 0, 1, 0, ACCEPTED, 0, 0.0, 1.0))
    count = (10 << 20) // len(gradient)
    file.append(HEADER)
    file.append_bytes(gradient * count)
    first = file.read().gradients
    assert 0 < first < count
    assert file.read().gradients == count


# ---- the numbers ----


def test_rate_is_that_of_the_last_seconds(file: File) -> None:
    """One update per second for 20 s, then ten per second for 10 s."""
    file.append(HEADER, Resumed(0.0), *updates(1, 20, 1.0))
    assert file.append(*updates(21, 120, 0.1, 20.0)).rate == pytest.approx(10, rel=0.05)


def test_slow_run_has_a_rate(file: File) -> None:
    assert file.append(HEADER, Resumed(0.0), *updates(1, 4, 60.0)).rate == pytest.approx(1 / 60)


def test_rate_falls_when_the_next_update_is_overdue(file: File) -> None:
    rate = file.append(HEADER, Resumed(0.0), *updates(1, 10, 0.5)).rate
    assert rate == pytest.approx(2.0)
    assert file.read(1.0).rate == rate
    assert file.read(7.0).rate == pytest.approx(1.0)
    assert file.read(7.0).silent_s == 7.0


def test_pauses_do_not_count_for_the_rate(file: File) -> None:
    file.append(HEADER, Resumed(0.0), *updates(1, 4, 0.5), Paused(2.0, "a"), Resumed(100.0))
    assert file.read().rate is None
    assert file.append(*updates(5, 6, 0.5, 100.0)).rate == pytest.approx(2.0)


def test_time_left_follows_from_the_rate(file: File) -> None:
    assert file.append(HEADER, Resumed(0.0), *updates(1, 4, 0.5)).left_s == pytest.approx(3.0)


def header(**goals: int) -> Header:
    """Return the header of a run with these goals and epochs of 40 samples."""
    about = {"epoch_samples": "40"}
    return Header(source="run", policy="sync", workers=2, about=about, **goals)


def test_time_left_is_unknown_without_a_goal(file: File) -> None:
    assert file.append(header(), Resumed(0.0), *updates(1, 4, 0.5)).left_s is None


def work(first: int, last: int, samples: int, begin: float = 0.0) -> list[Record]:
    """Return updates of two gradients each, two updates a second."""
    records: list[Record] = []
    for update in updates(first, last, 0.5, begin):
        own = [Gradient(update.t, w, update.update, 0, ACCEPTED, 0, 0, 1, samples) for w in (0, 1)]
        records += [*own, update]
    return records


def test_time_left_follows_from_the_samples_if_they_are_the_goal(file: File) -> None:
    """Eight samples an update, so 10 of 14 updates are left, two a second."""
    moment = file.append(header(samples=112), Resumed(0.0), *work(1, 4, 4))
    assert (moment.samples, moment.samples_goal, moment.epoch_samples) == (32, 112, 40)
    assert moment.left_s == pytest.approx(5.0)


def test_goal_that_is_reached_first_gives_the_time_left(file: File) -> None:
    moment = file.append(header(samples=112, steps=6), Resumed(0.0), *work(1, 4, 4))
    assert moment.left_s == pytest.approx(1.0)


def test_gradients_that_wait_for_an_update_do_not_count(file: File) -> None:
    waiting = Gradient(9.0, 0, 9, 0, ACCEPTED, 0, 0.0, 1.0, 4)
    assert file.append(header(), Resumed(0.0), *work(1, 4, 4), waiting).samples == 32


def test_restoration_takes_back_samples_and_brings_its_goal(file: File) -> None:
    file.append(header(samples=112), Resumed(0.0), *work(1, 8, 4))
    moment = file.append(Restored(4.0, 5, header(samples=200), samples=40), Resumed(4.0))
    assert (moment.samples, moment.samples_goal) == (40, 200)
    moment = file.append(*work(6, 9, 4, 4.0))
    assert (moment.samples, moment.left_s) == (72, pytest.approx(8.0))


def test_fates_are_counted(file: File) -> None:
    fates = [*[ACCEPTED] * 5, Fate.LATE, Fate.CANCELLED, Fate.STALE, Fate.NON_FINITE]
    moment = file.append(
        HEADER, *(Gradient(1.0, 0, i, 0, fate, 0, 0.0, 1.0) for i, fate in enumerate(fates))
    )
    assert (moment.gradients, moment.dropped, moment.non_finite) == (9, 3, 1)
    assert moment.dropped_share == pytest.approx(1 / 3)


def test_workers_that_left_are_not_counted(file: File) -> None:
    assert file.append(HEADER, Joined(0.0, 0), Joined(0.0, 1), Left(1.0, 0)).workers == 1


def test_last_update_gives_contributors_and_scalars(file: File) -> None:
    moment = file.append(
        HEADER,
        Update(1.0, 1, (0, 1), 2, scalars={"loss": 2.0, "accuracy": 0.5}),
        Update(2.0, 2, (1,), 2, scalars={"loss": None}),
    )
    assert (moment.contributors, moment.wanted) == (1, 2)
    assert moment.scalars == {"loss": None, "accuracy": 0.5}


def test_slowest_worker_is_found_by_its_recent_gradients(file: File) -> None:
    """Worker 1 was slow long ago, worker 2 is slow now; the first gradient doesn't count."""
    records: list[Record] = []
    for worker, old_s, new_s in ((0, 1.0, 1.0), (1, 9.0, 1.0), (2, 1.0, 3.0)):
        took = [100.0, *[old_s] * 20, *[new_s] * 20]
        records.append(Joined(0.0, worker))
        records += [Gradient(t, worker, i, 0, ACCEPTED, 0, 0, t) for i, t in enumerate(took)]
    assert file.append(HEADER, *records).slowest == Slowest(2, 3.0, 3.0)


def test_time_of_the_slowest_worker_is_a_bound_if_a_recent_gradient_was_cancelled(
    file: File,
) -> None:
    def work(worker: int, count: int, took_s: float, fate: Fate = ACCEPTED) -> list[Record]:
        return [Gradient(1.0, worker, i, 0, fate, 0, 0.0, took_s) for i in range(count)]

    head = [HEADER, Joined(0.0, 0), Joined(0.0, 1), *work(0, 9, 1.0, Fate.CANCELLED)]
    whole = file.append(*head, *work(1, 9, 2.0))
    assert whole.slowest == Slowest(1, 2.0, 2.0, is_bound=False)
    cut = file.append(*work(1, 1, 2.0, Fate.CANCELLED))
    assert cut.slowest == Slowest(1, 2.0, 2.0, is_bound=True)
    assert file.append(*work(1, 20, 2.0)).slowest == whole.slowest  # that was long ago


def test_single_worker_is_not_the_slowest(file: File) -> None:
    own = [Gradient(1.0, 0, i, 0, ACCEPTED, 0, 0.0, 1.0) for i in range(9)]
    assert file.append(HEADER, Joined(0.0, 0), *own).slowest is None


def test_staleness_is_that_of_recent_gradients(file: File) -> None:
    stale = [Gradient(1.0, 0, i, 0, ACCEPTED, s, 0.0, 1.0) for i, s in enumerate((1, 2, 3))]
    assert file.append(HEADER, *stale).staleness == 2.0


def test_pause_is_shown_until_it_is_over(file: File) -> None:
    assert file.append(HEADER, Resumed(0.0)).paused == ""
    assert file.append(Paused(1.0, "waits for 1")).paused == "waits for 1"
    assert file.append(Resumed(2.0)).paused == ""


def test_end_is_shown(file: File) -> None:
    assert file.append(HEADER, Resumed(0.0), Ended(1.0, 0)).ended == "finished"


def test_restoration_takes_back_lost_updates(file: File) -> None:
    file.append(HEADER, Joined(0.0, 0), Resumed(0.0), *updates(1, 8, 1.0), Ended(8.0, 8))
    moment = file.append(Restored(8.0, 5, HEADER))
    assert (moment.version, moment.lost, moment.restorations) == (5, 3, 1)
    assert (moment.workers, moment.ended) == (0, "")
    assert moment.paused == "server restarted; waiting for workers"
    moment = file.append(Joined(9.0, 0), Resumed(9.0), *updates(6, 7, 1.0, 9.0))
    assert (moment.version, moment.lost, moment.paused) == (7, 3, "")
    assert moment.rate == pytest.approx(1.0)


def test_numbers_that_were_logged_before_a_restoration_are_not_shown(file: File) -> None:
    logged = Update(1.0, 1, (0,), 1, scalars={"loss": 4.0})
    assert file.append(HEADER, Resumed(0.0), logged).scalars == {"loss": 4.0}
    assert file.append(Restored(8.0, 0, HEADER)).scalars == {}


def test_resumed_run_counts_no_restoration(file: File) -> None:
    file.append(HEADER, Joined(0.0, 0), Resumed(0.0), *updates(1, 8, 1.0), Ended(8.0, 8))
    moment = file.append(Restored(8.0, 5, HEADER, resumed=True))
    assert (moment.version, moment.lost, moment.restorations) == (5, 0, 0)
    assert (moment.workers, moment.ended, moment.paused) == (0, "", "waiting for workers")


@pytest.mark.parametrize("policy", ["sync", "backup:1", "deadline", "async", "softsync:2"])
def test_numbers_agree_with_the_summary(policy: str, file: File) -> None:
    trace = simulate(policy, Cluster.parse("50ms + exp:30ms"), RunSpec(workers=4, steps=60))
    moment, summary = file.append(trace.header, *trace.records), summarize(trace)
    assert moment.version == summary.updates
    assert moment.gradients == sum(summary.fates.values())
    assert moment.dropped == moment.gradients - summary.fates[ACCEPTED]


def test_memory_does_not_grow_with_the_run(file: File) -> None:
    def sizes() -> list[int]:
        fields = [getattr(file.live._state, name) for name in file.live._state.__slots__]
        kept = [value for value in fields if hasattr(value, "__len__")]
        return [len(value) for value in kept] + [len(own) for own in file.live._state.here.values()]

    def stretch(begin: int) -> list[Record]:
        records: list[Record] = []
        for i in range(begin, begin + 500):
            t = i * 0.01
            scalars = {f"name {i % 40}": 1.0}
            records += [Gradient(t, w, i, i - 1, ACCEPTED, 0, t, 0.01) for w in (0, 1)]
            records.append(Update(t, i, (0, 1), 2, scalars=scalars))
        return records

    file.append(HEADER, Joined(0.0, 0), Joined(0.0, 1), Resumed(0.0), *stretch(1), *stretch(501))
    before = sizes()
    file.append(*stretch(1001), *stretch(1501))
    assert sizes() == before


@pytest.mark.parametrize(
    "answer",
    [
        Gradient(9.0, 1, 1, 0, ACCEPTED, 0, 1.0, 8.0),
        Left(9.0, 1, "killed", 1.0),
        Update(9.0, 1, (0,), 2),
    ],
)
def test_worker_is_waited_for_until_it_reports_or_leaves_or_an_update_is_made(
    file: File, answer: Record
) -> None:
    file.append(HEADER, Joined(0.0, 0), Joined(0.0, 1), Resumed(1.0))
    assert file.append(Awaited(6.0, 1, 1.0)).waiting_s == {1: 5.0}
    assert file.read(2.0).waiting_s == {1: 7.0}
    assert file.append(answer).waiting_s == {}
