# SPDX-License-Identifier: BSD-3-Clause
"""a9a: predict from 123 binary census features who earns more than 50,000 dollars.

With a linear model this is a convex problem. The files are LIBSVM text, plain or gzipped: each row
has the label, and the numbers, from 1, of the features that are set.
"""

import re
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from paceline.lab.data.download import Source, damaged_file, locate, read_file

__all__ = ["SOURCES", "Table", "load_a9a"]

_FOLDER = "https://www.csie.ntu.edu.tw/~cjlin/libsvmtools/datasets/binary"
_TRAIN = Source(
    "a9a/a9a",
    f"{_FOLDER}/a9a",
    "f5d5ffd8d865ff41328e7ee043e4b020816914ff6843ff15b98905ddbedce906",
    others=("a9a/a9a.gz",),
)
_TEST = Source(
    "a9a/a9a.t",
    f"{_FOLDER}/a9a.t",
    "1f448a153f0320399a7e40836eb207655b0bde0f21fc941cc472193daa9f5de9",
    others=("a9a/a9a.t.gz",),
)
SOURCES = (_TRAIN, _TEST)

_FEATURES = 123
_LINE = re.compile(rb"([+-]1)((?: \d{1,3}:1)+) ?")


@dataclass(frozen=True, eq=False)
class Table:
    """A data set of binary features with two labels."""

    train_x: Tensor  # float32, of shape [rows, features]
    train_y: Tensor  # float32, -1 or +1
    test_x: Tensor
    test_y: Tensor


def load_a9a(folder: Path) -> Table:
    """Read the data set from the data folder; raises SpecError."""
    return Table(
        *_read_rows(locate(folder, _TRAIN), 32_561), *_read_rows(locate(folder, _TEST), 16_281)
    )


def _read_rows(path: Path, rows: int) -> tuple[Tensor, Tensor]:
    lines = read_file(path).splitlines()
    if len(lines) != rows:
        raise damaged_file(path, f"expected {rows} rows, got {len(lines)}")
    labels: list[int] = []
    ones: list[int] = []  # positions in the flattened table
    for number, line in enumerate(lines):
        found = _LINE.fullmatch(line)
        features = [int(item[:-2]) for item in found[2].split()] if found else [0]
        if found is None or not 1 <= min(features) <= max(features) <= _FEATURES:
            raise damaged_file(path, f"row {number + 1} is {line.decode('ascii', 'replace')!r}")
        labels.append(int(found[1]))
        ones += [number * _FEATURES + feature - 1 for feature in features]
    x = torch.zeros(rows * _FEATURES)
    x[torch.tensor(ones)] = 1.0
    return x.view(rows, _FEATURES), torch.tensor(labels, dtype=torch.float32)
