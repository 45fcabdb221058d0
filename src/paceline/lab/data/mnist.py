# SPDX-License-Identifier: BSD-3-Clause
"""MNIST: 60,000 + 10,000 handwritten digits, 28 x 28, grey, in four gzipped idx files."""

import struct
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from paceline.lab.data.download import Source, damaged_file, locate, read_file
from paceline.lab.data.images import Images

__all__ = ["MEAN", "SOURCES", "STD", "load_mnist"]

MEAN, STD = (0.1307,), (0.3081,)  # of the training pixels; white is 1

_FOLDER = "https://ossci-datasets.s3.amazonaws.com/mnist"  # torchvision's source, too


def _source(name: str, sha256: str) -> Source:
    return Source(f"mnist/{name}", f"{_FOLDER}/{name}", sha256)


_TRAIN_X = _source(
    "train-images-idx3-ubyte.gz", "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609"
)
_TRAIN_Y = _source(
    "train-labels-idx1-ubyte.gz", "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c"
)
_TEST_X = _source(
    "t10k-images-idx3-ubyte.gz", "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6"
)
_TEST_Y = _source(
    "t10k-labels-idx1-ubyte.gz", "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6"
)
SOURCES = (_TRAIN_X, _TRAIN_Y, _TEST_X, _TEST_Y)


def load_mnist(folder: Path) -> Images:
    """Read the data set from the data folder; raises SpecError."""
    return Images(
        train_x=_read_idx(locate(folder, _TRAIN_X), 60_000, 28, 28)[:, None],
        train_y=_read_idx(locate(folder, _TRAIN_Y), 60_000).long(),
        test_x=_read_idx(locate(folder, _TEST_X), 10_000, 28, 28)[:, None],
        test_y=_read_idx(locate(folder, _TEST_Y), 10_000).long(),
        classes=10,
    )


def _read_idx(path: Path, *shape: int) -> Tensor:
    """Read an idx file: a magic number with the number of dimensions, their sizes, the bytes."""
    data = read_file(path)
    header = struct.pack(f">{1 + len(shape)}I", 0x0800 + len(shape), *shape)
    if not data.startswith(header):
        raise damaged_file(
            path, f"expected it to begin with {header.hex()}, got {data[: len(header)].hex()}"
        )
    size = len(data) - len(header)
    if size != prod(shape):
        raise damaged_file(path, f"expected {prod(shape)} bytes of values, got {size}")
    return torch.frombuffer(bytearray(data), dtype=torch.uint8, offset=len(header)).view(shape)
