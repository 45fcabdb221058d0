# SPDX-License-Identifier: BSD-3-Clause
"""What the launcher knows about its run."""

import msgspec
import pytest

from paceline.core.events import Fate
from paceline.run.launch.monitor import End, RunMonitor
from paceline.trace.schema import FINISHED, Ended, Gradient, Header, Left, Restored, Update

HEADER = Header(source="run", policy="sync", workers=2)


def line(record):
    return msgspec.json.encode(record) + b"\n"


def append(path, *records):
    with path.open("ab") as file:
        file.writelines(map(line, records))


@pytest.fixture
def path(tmp_path):
    return tmp_path / "trace.jsonl"


def test_trace_of_an_earlier_run_is_skipped(path):
    append(path, HEADER, Ended(1.0, 3))
    monitor = RunMonitor(path, steps=9)
    monitor.update()
    assert not monitor.is_over
    late = line(Gradient(1.0, 1, 2, 0, Fate.LATE, 0, 0.0, 0.0))
    with path.open("ab", buffering=0) as file:
        file.write(line(Gradient(1.0, 1, 1, 0, Fate.ACCEPTED, 0, 0.0, 0.0)) + late[:10])
        monitor.update()
        assert monitor.accepted == {1: 1}
        file.write(late[10:] + b"not a line\n" + line(Update(1.0, 9, (1,), 1)))
    monitor.update()
    assert monitor.accepted == {1: 1}
    assert (monitor.version, monitor.is_over) == (9, True)
    append(path, Restored(1.0, 4, HEADER), Update(2.0, 5, (1,), 1))
    monitor.update()
    assert (monitor.version, monitor.is_over) == (9, False)


def test_last_update_is_not_yet_the_end(path):
    monitor = RunMonitor(path, steps=2)
    append(path, HEADER, Update(1.0, 2, (0,), 1))
    monitor.update()
    assert (monitor.is_over, monitor.end) == (True, None)
    append(path, Ended(1.0, 2))
    monitor.update()
    assert monitor.end == End(2, FINISHED)
    assert monitor.is_finished


def test_unfinished_line_of_a_killed_server_does_not_hide_the_next_line(path):
    path.touch()
    monitor = RunMonitor(path, steps=9)
    whole = line(HEADER) + line(Update(1.0, 2, (0,), 1))
    path.write_bytes(whole + line(Update(1.0, 3, (0,), 1))[:13])
    monitor.update()
    assert (monitor.version, monitor.is_serving) == (2, True)
    monitor.on_server_start()
    assert not monitor.is_serving
    path.write_bytes(whole + line(Restored(1.0, 1, HEADER)) + line(Left(1.0, 0)))
    monitor.update()
    assert monitor.left == {0: 1}
