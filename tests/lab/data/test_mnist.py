# SPDX-License-Identifier: BSD-3-Clause
"""MNIST has its known content, and damaged files are reported."""

import gzip
import struct
from collections.abc import Callable

import pytest

from paceline.lab.data.images import Images
from paceline.lab.data.mnist import load_mnist

IDX_X = struct.pack(">4I", 0x0803, 60_000, 28, 28)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "it is empty"),
        (b"not gzip", "Not a gzipped file"),
        (gzip.compress(IDX_X)[:-9], "Compressed file ended before"),
        (gzip.compress(IDX_X)[:-8] + bytes(8), "CRC check failed"),
        (gzip.compress(b"\0\0\x08\x01" + IDX_X[4:]), "got 000008010000ea60"),
        (gzip.compress(IDX_X[:12]), "got 000008030000ea600000001c"),
        (gzip.compress(IDX_X + bytes(99)), "expected 47040000 bytes of values, got 99"),
    ],
    ids=["empty", "not gzip", "truncated", "checksum", "magic", "header", "length"],
)
def test_damaged_idx_file_is_reported(
    load_damaged: Callable[..., str], data: bytes, why: str
) -> None:
    assert why in load_damaged(load_mnist, "mnist/train-images-idx3-ubyte.gz", data)


def test_mnist_has_its_known_content(mnist: Images) -> None:
    assert mnist.train_x.shape == (60_000, 1, 28, 28)
    assert mnist.test_x.shape == (10_000, 1, 28, 28)
    assert mnist.train_y[:10].tolist() == [5, 0, 4, 1, 9, 2, 1, 3, 1, 4]
    assert mnist.test_y[:10].tolist() == [7, 2, 1, 0, 4, 1, 4, 9, 5, 9]
    assert mnist.train_y.bincount().tolist() == [
        5923,
        6742,
        5958,
        6131,
        5842,
        5421,
        5918,
        6265,
        5851,
        5949,
    ]
    assert mnist.test_y.bincount().tolist() == [
        980,
        1135,
        1032,
        1010,
        982,
        892,
        958,
        1028,
        974,
        1009,
    ]
    assert int(mnist.train_x[0].sum()) == 27_525


def test_digits_are_upright_and_centred(mnist: Images) -> None:
    ones = mnist.train_x[mnist.train_y == 1].float().mean(0)[0]
    assert ones[:3].max() < 0.5  # an empty edge
    assert ones.sum(0).argmax() in (13, 14)  # one bright column
