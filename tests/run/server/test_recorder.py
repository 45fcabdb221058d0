# SPDX-License-Identifier: BSD-3-Clause
"""The trace of a run as it is written, and what scripts log into it."""

import os
import resource
from math import inf, isnan, nan
from time import time

import pytest

from paceline.core.events import ApplyUpdate, Contribution, Fate, TimerFired
from paceline.core.policies import parse_policy
from paceline.errors import SpecError, TraceError
from paceline.run.server.recorder import Recorder
from paceline.run.server.scalars import Scalars
from paceline.spec import RunSpec
from paceline.trace.reader import read_trace
from paceline.trace.records import Made, record_event
from paceline.trace.schema import Ended, Gradient, Header, Joined, Paused, Restored, Resumed, Update

HEADER = Header.of("run", parse_policy("sync"), RunSpec(workers=2), {"torch": "2"})


def test_a_trace_is_whole_lines_whenever_it_is_looked_at(tmp_path):
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
            recorder.flush()  # what was written once is not written twice
            assert read_trace(path).records == written
    recorder.write([])
    recorder.write([Ended(9.0, 0)])
    recorder.close()
    found = read_trace(path)
    assert (found.header, found.records) == (HEADER, [*written, Ended(9.0, 0)])
    assert path.read_bytes().endswith(b"\n")


def test_a_trace_that_nothing_happened_in_has_its_header(tmp_path):
    Recorder(tmp_path / "trace.jsonl", HEADER).close()
    assert read_trace(tmp_path / "trace.jsonl").records == []


def test_a_trace_that_cannot_be_written_is_named_before_the_run(tmp_path):
    path = tmp_path / "nowhere" / "trace.jsonl"
    with pytest.raises(SpecError, match=f"cannot write {path}: No such file"):
        Recorder(path, HEADER)
    with pytest.raises(SpecError, match=f"cannot write {tmp_path}: Is a directory"):
        Recorder(tmp_path, HEADER)


def test_an_older_trace_is_not_added_to(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text("old\n" * 1000, encoding="ascii")
    Recorder(path, HEADER).close()
    assert read_trace(path).records == []


def test_a_full_disk_ends_the_trace_with_a_whole_line_and_says_so(tmp_path, capsys):
    """A limit on the size of files stands for the disk: it too cuts what is written."""
    path = tmp_path / "trace.jsonl"
    recorder = Recorder(path, HEADER)
    recorder.write([Joined(0.0, 0)])
    recorder.flush()
    whole = path.stat().st_size
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (whole + 50, hard))
    try:
        recorder.write(Joined(1.0, number) for number in range(5))
        recorder.flush()
        recorder.write([Joined(2.0, 9)])
        recorder.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert read_trace(path).records == [Joined(0.0, 0)]
    said = "the trace ends here, for it cannot be written: File too large\n"
    assert capsys.readouterr().out == said


def test_records_are_made_when_there_is_time_for_them(tmp_path):
    made = []

    def records():
        made.append(1)
        yield Joined(0.0, 0)

    recorder = Recorder(tmp_path / "trace.jsonl", HEADER)
    recorder.write(records())
    assert made == []
    recorder.catch_up()
    assert made == [1]
    recorder.close()
    assert read_trace(tmp_path / "trace.jsonl").records == [Joined(0.0, 0)]


# ---------------------------------------------------------------------------------- going on


def gradient(t, worker, turn):
    return Gradient(t, worker, turn, 0, Fate.ACCEPTED, 0, 0.0, 0.0)


LINES = [
    Joined(0.5, 0),
    gradient(1.0, 0, 1),
    gradient(2.5, 3, 7),
    gradient(2.0, 0, 2),  # time is the latest, wherever it stands
    Restored(2.5, 1, HEADER, 4.0, {0: 2, 3: 7}),
    gradient(2.75, 0, 3),
]


@pytest.fixture
def trace(tmp_path):
    """A trace that a server has left behind."""
    path = tmp_path / "trace.jsonl"
    recorder = Recorder(path, HEADER)
    recorder.write(LINES)
    recorder.close()
    return path


def test_a_trace_goes_on_after_its_last_line(trace):
    before = trace.read_bytes()
    recorder = Recorder(trace, HEADER, begins_anew=False)
    assert (recorder.time, recorder.turns) == (2.75, {0: 3, 3: 7})
    assert trace.read_bytes() == before
    recorder.write([Ended(9.0, 0)])
    recorder.close()
    found = read_trace(trace)
    assert (found.header, found.records) == (HEADER, [*LINES, Ended(9.0, 0)])


def test_a_line_that_its_server_was_killed_over_is_cut(trace):
    """Wherever it breaks off; what was whole before stays."""
    before = trace.read_bytes()
    torn = b'{"type":"gradient","t":99.0,"worker":0,"turn":50,"version":0}'
    for cut in (1, 10, len(torn)):
        trace.write_bytes(before + torn[:cut])
        recorder = Recorder(trace, HEADER, begins_anew=False)
        assert (recorder.time, recorder.turns) == (2.75, {0: 3, 3: 7})
        recorder.write([Ended(3.0, 0)])
        recorder.close()
        assert read_trace(trace).records == [*LINES, Ended(3.0, 0)]


def test_a_trace_that_goes_on_knows_when_its_run_began_and_how_far_it_came(trace):
    recorder = Recorder(trace, HEADER, begins_anew=False)
    assert (recorder.began, recorder.updated) == (None, None)
    recorder.write([Resumed(3.0), Update(4.0, 1, (0,), 1), Paused(4.5, "so"), Resumed(5.0)])
    recorder.write([Update(6.0, 2, (0,), 1), gradient(7.0, 0, 4)])
    recorder.close()
    again = Recorder(trace, HEADER, begins_anew=False)
    assert (again.began, again.updated, again.time) == (3.0, 6.0, 7.0)
    again.close()


@pytest.mark.parametrize("resumed", [False, True])
def test_a_run_goes_on_from_what_its_trace_says(trace, resumed):
    recorder = Recorder(trace, HEADER, begins_anew=False)
    restored = recorder.restore(HEADER, 5, [1.5], resumed)
    recorder.close()
    assert read_trace(trace).records[-1] == restored
    assert restored == Restored(
        2.75, 5, HEADER, recorder.down_s, {0: 3, 3: 7}, [1.5], resumed=resumed
    )


@pytest.mark.parametrize("left", [b"", b'{"type":"head', b"\0" * 100])
def test_a_trace_whose_header_was_never_whole_begins_anew(tmp_path, left):
    path = tmp_path / "trace.jsonl"
    path.write_bytes(left)
    recorder = Recorder(path, HEADER, begins_anew=False)
    assert (recorder.time, recorder.turns) == (0.0, {})
    recorder.write([Joined(1.0, 0)])
    recorder.close()
    found = read_trace(path)
    assert (found.header, found.records) == (HEADER, [Joined(1.0, 0)])


def test_how_long_nobody_wrote_is_never_less_than_nothing(trace):
    """As it would be where the clock of the machine was set back."""
    for written_at, at_least, at_most in ((time() - 100, 100.0, 200.0), (time() + 100, 0.0, 0.0)):
        os.utime(trace, (written_at, written_at))
        recorder = Recorder(trace, HEADER, begins_anew=False)
        assert at_least <= recorder.down_s <= at_most
        recorder.close()
    fresh = Recorder(trace, HEADER)
    assert fresh.down_s == 0.0
    fresh.close()


@pytest.mark.parametrize(
    "junk", [b"junk\n", b"\n", b"[1]\n", b"\xff\xfe\n", b'{"t":"noon"}\n', b"[" * 9999 + b"\n"]
)
def test_a_line_of_junk_is_told_by_its_number_and_the_file_is_left_as_it_is(trace, junk):
    lines = trace.read_bytes().splitlines(keepends=True)
    lines.insert(3, junk)
    broken = b"".join(lines)
    trace.write_bytes(broken)
    with pytest.raises(TraceError, match=f"{trace}:4: .*; move the file away to go on"):
        Recorder(trace, HEADER, begins_anew=False)
    assert trace.read_bytes() == broken


def test_a_trace_that_is_not_there_cannot_be_gone_on_with(tmp_path):
    with pytest.raises(SpecError, match="No such file"):
        Recorder(tmp_path / "trace.jsonl", HEADER, begins_anew=False)


# -------------------------------------------------------------------------------------- scalars


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ([], {}),
        ([(4, {})], {}),
        ([(4, {"loss": 2.0})], {"loss": 2.0}),
        ([(1, {"loss": 2.0}), (3, {"loss": 6.0})], {"loss": 5.0}),
        ([(1, {"loss": 2.0}), (3, {"accuracy": 6.0})], {"loss": 2.0, "accuracy": 6.0}),
        ([(1, {"a": 1.0, "b": 2.0}), (1, {"b": 4.0, "a": 3.0})], {"a": 2.0, "b": 3.0}),
        ([(1, {"loss": 2.0}), (1, {"loss": inf})], {"loss": inf}),
    ],
)
def test_what_was_logged_is_averaged_by_samples_over_those_that_logged_it(given, found):
    scalars = Scalars()
    scalars.give(8, 5, {"loss": -1.0})  # of another update
    for samples, logged in given:
        scalars.give(7, samples, logged)
    assert scalars.take(7) == found
    assert scalars.take(7) == {}
    assert scalars.take(8) == {"loss": -1.0}


def test_a_nan_that_was_logged_shows():
    scalars = Scalars()
    scalars.give(1, 1, {"loss": nan})
    scalars.give(1, 1, {"loss": 1.0})
    assert isnan(scalars.take(1)["loss"])


def test_a_trace_can_be_read_whatever_was_logged(tmp_path):
    """JSON has neither NaN nor infinity."""
    update = ApplyUpdate(1, (Contribution(0, 0, 1),), (1.0,), (1.0,), 1)
    logged = {"nan": nan, "inf": inf, "one": 1.0}
    records = list(record_event(TimerFired(0.0, 0), [update], 0, made={1: Made(scalars=logged)}))
    recorder = Recorder(tmp_path / "trace.jsonl", HEADER)
    recorder.write(records)
    recorder.close()
    [found] = read_trace(tmp_path / "trace.jsonl").updates()
    assert found.scalars == {"nan": None, "inf": None, "one": 1.0}
    assert [found] == records[1:]
