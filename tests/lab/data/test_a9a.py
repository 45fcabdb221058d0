# SPDX-License-Identifier: BSD-3-Clause
"""a9a has its known content, and damaged files are reported."""

import gzip
import hashlib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from paceline.lab.data import a9a as a9a_module
from paceline.lab.data.a9a import Table, load_a9a
from paceline.lab.data.download import locate

GOOD = b"+1 3:1 123:1 \n" * 32_560


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "it is empty"),
        (GOOD, "expected 32561 rows, got 32560"),
        (GOOD + b"-1 3:1 12", "row 32561 is '-1 3:1 12'"),
        (b"0 3:1 4:1\n" + GOOD, "row 1 is '0 3:1 4:1'"),
        (b"-1 3:2\n" + GOOD, "row 1 is '-1 3:2'"),
        (b"-1 0:1\n" + GOOD, "row 1 is '-1 0:1'"),
        (GOOD + b"-1 3:1 124:1\n", "row 32561 is '-1 3:1 124:1'"),
        (b"-1 \xff\n" + GOOD, "row 1 is '-1 \N{REPLACEMENT CHARACTER}'"),
    ],
    ids=["empty", "rows", "truncated", "label", "value", "feature 0", "feature 124", "not text"],
)
def test_damaged_table_is_reported(load_damaged: Callable[..., str], data: bytes, why: str) -> None:
    assert why in load_damaged(load_a9a, "a9a/a9a", data)


def test_a9a_has_its_known_content(a9a: Table) -> None:
    assert a9a.train_x.shape == (32_561, 123)
    assert a9a.test_x.shape == (16_281, 123)
    assert a9a.train_x.dtype == a9a.train_y.dtype == torch.float32
    assert a9a.train_x.unique().tolist() == [0.0, 1.0]
    assert a9a.train_y.unique().tolist() == [-1.0, 1.0]
    assert (int((a9a.train_y > 0).sum()), int((a9a.test_y > 0).sum())) == (7_841, 3_846)
    first = (a9a.train_x[0].nonzero().flatten() + 1).tolist()
    assert first == [3, 11, 14, 19, 39, 42, 55, 64, 67, 73, 75, 76, 80, 83]


@pytest.mark.parametrize("source", a9a_module.SOURCES, ids=lambda source: str(source.path))
def test_a9a_is_the_official_text_except_for_trailing_spaces(
    data_folder: Path, a9a: Table, source: a9a_module.Source
) -> None:
    path = locate(data_folder, source)
    text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    official = b"".join(line.rstrip() + b" \n" for line in text.splitlines())
    assert hashlib.sha256(official).hexdigest() == source.sha256
