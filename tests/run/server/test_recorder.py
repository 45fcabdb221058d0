# SPDX-License-Identifier: BSD-3-Clause
"""The trace of a run is written in complete lines, and continued after a restart."""

import os
import resource
from contextlib import contextmanager
from math import inf, nan

import pytest

from paceline.core.events import ApplyUpdate, Contribution, Fate, TimerFired
from paceline.core.ledger import Ledger, Origin
from paceline.core.policies import parse_policy
from paceline.errors import SpecError, TraceError
from paceline.run.server.recorder import Recorder
from paceline.spec import RunSpec
from paceline.trace.event_records import Made, record_event
from paceline.trace.reader import read_trace
from paceline.trace.schema import (
    Ended,
    Gap,
    Gradient,
    Header,
    Joined,
    Paused,
    Restored,
    Resumed,
    Update,
)

HEADER = Header.of("run", parse_policy("sync"), RunSpec(workers=2), {"torch": "2"})


def test_trace_always_consists_of_complete_lines(tmp_path):
    path = tmp_path / "trace.jsonl"
    recorder = Recorder(path, HEADER)
    assert path.read_bytes() == b""
    written = []
    for number in range(5):
        records = [Joined(float(number), number), Paused(float(number), "a\nline and “quotes”")]
        recorder.write(records)
        written += records
        if number % 2:
            recorder.flush()
            recorder.flush()  # nothing is written twice
            assert read_trace(path).records == written
    recorder.write([])
    recorder.write([Ended(9.0, 0)])
    recorder.close()
    found = read_trace(path)
    assert (found.header, found.records) == (HEADER, [*written, Ended(9.0, 0)])
    assert path.read_bytes().endswith(b"\n")


def test_trace_without_events_has_its_header(tmp_path):
    Recorder(tmp_path / "trace.jsonl", HEADER).close()
    assert read_trace(tmp_path / "trace.jsonl").records == []


def test_trace_that_cannot_be_opened_is_an_error(tmp_path):
    path = tmp_path / "nowhere" / "trace.jsonl"
    with pytest.raises(SpecError, match=f"cannot write {path}: No such file"):
        Recorder(path, HEADER)
    with pytest.raises(SpecError, match=f"cannot write {tmp_path}: Is a directory"):
        Recorder(tmp_path, HEADER)


def test_new_trace_replaces_an_older_one(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text("old\n" * 1000, encoding="ascii")
    Recorder(path, HEADER).close()
    assert read_trace(path).records == []


@contextmanager
def full_disk(path, free_bytes=0):
    """Limit the size of files, which has the same effect as a full disk: a write is cut off."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + free_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_full_disk_leaves_complete_lines_and_is_reported_once(tmp_path, capsys):
    path = tmp_path / "trace.jsonl"
    recorder = Recorder(path, HEADER)
    recorder.write([Joined(0.0, 0)])
    recorder.flush()
    with full_disk(path, free_bytes=20):
        recorder.write(Joined(1.0, number) for number in range(5))
        recorder.flush()
        recorder.write([Joined(2.0, 9)])
        recorder.flush()
        recorder.resume(Gap(2.5, 0))
        failure = recorder.end(Ended(3.0, 0), Gap(3.0, 0))
    assert failure == "cannot write the end of the trace: File too large"
    assert read_trace(path).records == [Joined(0.0, 0)]
    message = "cannot write the trace, records are lost: File too large\n"
    assert capsys.readouterr().out == message


def test_trace_continues_with_a_gap_when_there_is_space_again(tmp_path, capsys):
    path = tmp_path / "trace.jsonl"
    recorder = Recorder(path, HEADER)
    recorder.write([Joined(0.0, 0)])
    recorder.flush()
    with full_disk(path, free_bytes=20):
        recorder.write(Joined(1.0, number) for number in range(5))
        recorder.flush()
        recorder.resume(Gap(1.5, 3))
        recorder.write([Joined(2.0, 9)])
    recorder.write([Joined(2.25, 9)])
    recorder.resume(Gap(2.5, 4))
    recorder.write([Joined(3.0, 7)])
    assert recorder.end(Ended(4.0, 0), Gap(4.0, 0)) == ""
    *records, end = read_trace(path).records
    assert records == [Joined(0.0, 0), Gap(2.5, 4, records=7), Joined(3.0, 7)]
    assert end.version == 0
    out = capsys.readouterr().out
    assert "recording again; the trace lacks 7 records" in out


@pytest.mark.usefixtures("capsys")  # what pytest captures may be a file, too
def test_header_and_restoration_are_written_even_if_the_disk_was_full_from_the_beginning(trace):
    before = read_trace(trace).records
    for path in (trace, trace.with_name("new.jsonl")):
        recorder = Recorder(path, HEADER, begins_anew=not path.exists())
        restored = recorder.restore(HEADER, Origin(1), resumed=False)
        with full_disk(path):
            recorder.write([Joined(9.0, 0)])
            recorder.flush()
        assert recorder.end(Ended(9.5, 1), Gap(9.5, 1)) == ""
        *records, gap, end = read_trace(path).records
        assert records == [*(before if path == trace else []), restored]
        assert (gap, end.version) == (Gap(9.5, 1, records=1), 1)


def test_end_has_a_checksum_that_reveals_any_change_before_it(tmp_path):
    path = tmp_path / "trace.jsonl"
    recorder = Recorder(path, HEADER)
    recorder.write(Joined(float(number), number) for number in range(5))
    recorder.end(Ended(9.0, 0), Gap(9.0, 0))
    assert read_trace(path).changed_before == 0
    lines = path.read_bytes().splitlines(keepends=True)
    for changed in (lines[:2] + lines[3:], [*lines[:2], lines[2].replace(b"1", b"6"), *lines[3:]]):
        path.write_bytes(b"".join(changed))
        assert read_trace(path).changed_before == len(changed)
        Recorder(path, HEADER, begins_anew=False).close()  # it can be continued


def test_trace_knows_whether_it_has_what_it_had_at_a_checkpoint(trace):
    recorder = Recorder(trace, HEADER, begins_anew=False)
    recorder.write([Update(4.0, 1, (0,), 1)])
    recorder.flush()
    mark = recorder.mark
    recorder.write([Update(5.0, 2, (0,), 1)])
    recorder.close()
    whole = trace.read_bytes()
    assert len(whole) > mark.size_bytes
    for text, version, holds in (
        (whole, 2, True),
        (whole, 3, False),
        (whole[: mark.size_bytes], 1, True),
        (whole[: mark.size_bytes], 2, False),
        (whole[: mark.size_bytes - 1], 1, False),
        (whole.replace(b"0.5", b"0.7"), 2, False),
    ):
        trace.write_bytes(text)
        again = Recorder(trace, HEADER, begins_anew=False)
        assert again.holds(version, mark) == holds
        again.close()


def test_gap_tells_a_continued_trace_where_the_run_was(trace):
    ledger = Ledger(RunSpec(workers=2), None, version=8, turns={0: 40, 5: 2}, begun=True)
    recorder = Recorder(trace, HEADER, begins_anew=False)
    recorder.write([Gap(6.0, 8, ledger=ledger)])
    recorder.close()
    again = Recorder(trace, HEADER, begins_anew=False)
    assert (again.began, again.reached, again.time) == (6.0, 8, 6.0)
    assert again.turns == {0: 40, 3: 7, 5: 2}
    again.close()


def test_records_are_made_when_the_server_is_idle(tmp_path):
    made = []

    def records():
        made.append(1)
        yield Joined(0.0, 0)

    recorder = Recorder(tmp_path / "trace.jsonl", HEADER)
    recorder.write(records())
    assert made == []
    recorder.encode_pending()
    assert made == [1]
    recorder.close()
    assert read_trace(tmp_path / "trace.jsonl").records == [Joined(0.0, 0)]


# ------------------------------------------------------------------------------ continuing a trace


def gradient(t, worker, turn):
    return Gradient(t, worker, turn, 0, Fate.ACCEPTED, 0, 0.0, 0.0)


LINES = [
    Joined(0.5, 0),
    gradient(1.0, 0, 1),
    gradient(2.5, 3, 7),
    gradient(2.0, 0, 2),  # the time of the run is the latest one, in any order
    Restored(2.5, 1, HEADER, 4.0, {0: 2, 3: 7}),
    gradient(2.75, 0, 3),
]


@pytest.fixture
def trace(tmp_path):
    """Write a trace that a server left behind."""
    path = tmp_path / "trace.jsonl"
    recorder = Recorder(path, HEADER)
    recorder.write(LINES)
    recorder.close()
    return path


def test_trace_continues_after_its_last_line(trace):
    before = trace.read_bytes()
    recorder = Recorder(trace, HEADER, begins_anew=False)
    assert (recorder.time, recorder.turns) == (2.75, {0: 3, 3: 7})
    assert trace.read_bytes() == before
    recorder.write([Ended(9.0, 0)])
    recorder.close()
    found = read_trace(trace)
    assert (found.header, found.records) == (HEADER, [*LINES, Ended(9.0, 0)])


def test_incomplete_last_line_is_removed(trace):
    """The server was killed while it wrote; complete lines stay."""
    before = trace.read_bytes()
    incomplete = b'{"type":"gradient","t":99.0,"worker":0,"turn":50,"version":0}'
    for cut in (1, 10, len(incomplete)):
        trace.write_bytes(before + incomplete[:cut])
        recorder = Recorder(trace, HEADER, begins_anew=False)
        assert (recorder.time, recorder.turns) == (2.75, {0: 3, 3: 7})
        recorder.write([Ended(3.0, 0)])
        recorder.close()
        assert read_trace(trace).records == [*LINES, Ended(3.0, 0)]


def test_continued_trace_knows_when_its_run_began_and_was_updated(trace):
    recorder = Recorder(trace, HEADER, begins_anew=False)
    assert (recorder.began, recorder.updated) == (None, None)
    recorder.write([Resumed(3.0), Update(4.0, 1, (0,), 1), Paused(4.5, "too few"), Resumed(5.0)])
    recorder.write([Update(6.0, 2, (0,), 1), gradient(7.0, 0, 4)])
    recorder.close()
    again = Recorder(trace, HEADER, begins_anew=False)
    assert (again.began, again.updated, again.time) == (3.0, 6.0, 7.0)
    again.close()


@pytest.mark.parametrize("resumed", [False, True])
def test_restore_records_where_the_run_continues(trace, resumed):
    recorder = Recorder(trace, HEADER, begins_anew=False)
    restored = recorder.restore(HEADER, Origin(5, memory=[1.5], samples=80), resumed)
    recorder.close()
    assert read_trace(trace).records[-1] == restored
    assert restored == Restored(2.75, 5, HEADER, recorder.down_s, {0: 3, 3: 7}, [1.5], resumed, 80)


def test_continued_trace_knows_the_highest_version_unless_a_user_resumed_an_older_one(trace):
    """What a killed server reached is to be made again; what a user abandoned isn't."""
    recorder = Recorder(trace, HEADER, begins_anew=False)
    recorder.write([Update(4.0, 1, (0,), 1), Update(6.0, 2, (0,), 1)])
    recorder.restore(HEADER, Origin(1), resumed=False)
    recorder.close()
    restarted = Recorder(trace, HEADER, begins_anew=False)
    assert restarted.reached == 2
    restarted.restore(HEADER, Origin(1), resumed=True)
    assert restarted.reached == 1
    restarted.close()
    again = Recorder(trace, HEADER, begins_anew=False)
    assert again.reached == 1
    again.close()


@pytest.mark.parametrize("left", [b"", b'{"type":"head', b"\0" * 100])
def test_trace_without_a_complete_header_begins_again(tmp_path, left):
    path = tmp_path / "trace.jsonl"
    path.write_bytes(left)
    recorder = Recorder(path, HEADER, begins_anew=False)
    assert (recorder.time, recorder.turns) == (0.0, {})
    recorder.write([Joined(1.0, 0)])
    recorder.close()
    found = read_trace(path)
    assert (found.header, found.records) == (HEADER, [Joined(1.0, 0)])


def test_down_time_is_never_negative(trace):
    """Even if the machine's clock was set back."""
    for written_at, down_s in ((900.0, 100.0), (1100.0, 0.0)):
        os.utime(trace, (written_at, written_at))
        recorder = Recorder(trace, HEADER, begins_anew=False, wall_clock=lambda: 1000.0)
        assert recorder.down_s == down_s
        recorder.close()
    fresh = Recorder(trace, HEADER)
    assert fresh.down_s == 0.0
    fresh.close()


@pytest.mark.parametrize(
    "junk", [b"junk\n", b"\n", b"[1]\n", b"\xff\xfe\n", b'{"t":"noon"}\n', b"[" * 9999 + b"\n"]
)
def test_invalid_line_is_named_by_its_number_and_the_file_is_unchanged(trace, junk):
    lines = trace.read_bytes().splitlines(keepends=True)
    lines.insert(3, junk)
    broken = b"".join(lines)
    trace.write_bytes(broken)
    with pytest.raises(TraceError, match=f"{trace}:4: .*; move the file away to continue"):
        Recorder(trace, HEADER, begins_anew=False)
    assert trace.read_bytes() == broken


def test_missing_trace_cannot_be_continued(tmp_path):
    with pytest.raises(SpecError, match="No such file"):
        Recorder(tmp_path / "trace.jsonl", HEADER, begins_anew=False)


def test_trace_can_be_read_whatever_was_logged(tmp_path):
    """JSON has neither NaN nor infinity; both become null."""
    update = ApplyUpdate(1, (Contribution(0, 0, 1),), (1.0,), (1.0,), 1)
    logged = {"nan": nan, "inf": inf, "one": 1.0}
    records = list(record_event(TimerFired(0.0, 0), [update], 0, made={1: Made(scalars=logged)}))
    recorder = Recorder(tmp_path / "trace.jsonl", HEADER)
    recorder.write(records)
    recorder.close()
    [found] = read_trace(tmp_path / "trace.jsonl").updates()
    assert found.scalars == {"nan": None, "inf": None, "one": 1.0}
    assert [found] == records[1:]
