# SPDX-License-Identifier: BSD-3-Clause
"""Tables of arrivals: what is read, and which line is wrong."""

import numpy as np
import pytest

from paceline.errors import SpecError
from paceline.sim.arrivals import is_arrivals, read_arrivals

ROWS = 30 * "0.1,0.2,0.3\n"


def read(folder, text):
    path = folder / "arrivals.csv"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return read_arrivals(path, seed=0)


@pytest.mark.parametrize(
    "text",
    [
        ROWS,
        "worker 0,worker 1,worker 2\n" + ROWS,
        "a,,c\n" + ROWS,
        "\ufeff" + ROWS,
        "\ufeffa,b,c\n" + ROWS,
        ROWS.replace("\n", "\r\n"),
        ROWS.replace("\n", "\n\n"),
        ROWS.replace(",", " , "),
        ROWS.replace("0.1", "1e-1").rstrip(),
        ROWS.replace("0.1", '"0.1"'),
    ],
    ids=[
        "plain",
        "heading",
        "heading with a gap",
        "byte order mark",
        "byte order mark and heading",
        "carriage returns",
        "empty lines",
        "spaces",
        "exponents",
        "quotes",
    ],
)
def test_row_is_an_update_and_column_a_worker(text, tmp_path):
    recording = read(tmp_path, text)

    assert sorted(recording.times) == [0, 1, 2]
    for worker, seconds in enumerate((0.1, 0.2, 0.3)):
        np.testing.assert_allclose(recording.by_version[worker], [seconds] * 30)
    assert recording.model().together
    assert recording.finished is None
    assert recording.left_to_chance() == "all 90 computation times are as recorded"


def test_gradients_that_had_not_arrived_are_estimated(tmp_path):
    """As in a run under backup:1, which cancels one gradient of each update."""
    recording = read(tmp_path, 15 * "0.1,0.2,\n0.15,,0.25\n")

    assert recording.finished == 2
    assert np.all(recording.by_version[2][::2] >= 0.2)
    assert np.all(recording.by_version[1][1::2] >= 0.25)
    assert recording.drawn + recording.bounds == 30


def test_same_seed_completes_the_times_alike(tmp_path):
    text = 15 * "0.1,0.2,\n0.15,0.9,0.25\n" + "0.1,0.2,0.7\n0.1,0.2,0.8\n"
    one, same = (read(tmp_path, text).times[2].tolist() for _ in range(2))
    assert one == same


WRONG = {
    "text in a cell": (ROWS + "0.1,x,0.3\n", "csv:31 must have seconds >= 0 or .*, got 'x'"),
    "text in the first line": ("0.1,x,0.3\n" + ROWS, "csv:1 must have seconds >= 0"),
    "a second heading": ("a,b,c\na,b,c\n" + ROWS, "csv:2 must have seconds >= 0 .*, got 'a'"),
    "a unit": (ROWS + "1ms,2ms,3ms\n", "csv:31 .*, got '1ms'"),
    "a negative time": (ROWS + "0.1,-2,0.3\n", "csv:31 .*, got '-2'"),
    "an infinite time": (ROWS + "0.1,inf,0.3\n", "csv:31 .*, got 'inf'"),
    "not a number": (ROWS + "0.1,nan,0.3\n", "csv:31 .*, got 'nan'"),
    "semicolons": (ROWS.replace(",", ";"), "csv:2 must have .*, got '0.1;0.2;0.3'"),
    "a missing column": (ROWS + "0.1,0.2\n", "csv:31 must have 3 columns, .*, got 2"),
    "one column too many": (ROWS + "0.1,0.2,0.3,\n", "csv:31 must have 3 columns, .*, got 4"),
    "a row without times": (ROWS + ",,\n", "csv:31 must have the time of at least one worker"),
    "a column without times": (30 * "0.1,,0.3\n", "csv has no time of worker 1, column 2"),
    "one worker": (30 * "0.1\n", "csv must have a column for each worker, at least 2, got 1"),
    "too few rows": (29 * "0.1,0.2\n", "csv must have at least 30 rows of arrivals, got 29"),
    "an empty file": ("", "csv must have at least 30 rows of arrivals, got 0"),
    "only zeros": (30 * "0,0\n", "csv must have times > 0, but all of them are 0"),
    "bytes that are not text": (bytes(range(128, 256)), "cannot read .*csv: .* decode"),
    "an open quote": ('"0.1,0.2\n' + ROWS, "cannot read .*csv: unexpected end"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_table_is_refused_with_the_file_and_the_line(wrong, tmp_path):
    text, message = WRONG[wrong]
    with pytest.raises(SpecError, match=message):
        read(tmp_path, text)


def test_missing_file_is_named(tmp_path):
    with pytest.raises(SpecError, match=r"cannot read .*none.csv: No such file"):
        read_arrivals(tmp_path / "none.csv", seed=0)


@pytest.mark.parametrize(
    ("name", "is_one"),
    [("a.csv", True), ("runs/A.CSV", True), ("trace.jsonl", False), ("run", False)],
)
def test_table_is_recognized_by_its_name(name, is_one, tmp_path):
    assert is_arrivals(tmp_path / name) is is_one
