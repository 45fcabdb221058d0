# SPDX-License-Identifier: BSD-3-Clause
"""CIFAR-10: 50,000 + 10,000 colour photographs of ten classes, 32 x 32.

Reads the official binary version: a tar archive with any compression, holding six files of 10,000
rows each. A row is one byte for the label and 3 x 32 x 32 bytes for the pixels.
"""

import hashlib
import lzma
import tarfile
import zlib
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from paceline.lab.data.download import Source, damaged_file, locate
from paceline.lab.data.images import Images
from paceline.lab.data.unpacked_cache import cached

__all__ = ["MEAN", "SOURCES", "STD", "load_cifar10"]

MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)  # of the training images; white is 1

SOURCES = (
    Source(
        "cifar10/cifar-10-binary.tar.gz",
        "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
        "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
        others=("cifar10/cifar-10-batches-bin.tar.xz",),
    ),
)

_ROWS = 10_000  # per file
_ROW = 1 + 3 * 32 * 32
_MD5 = {  # by file, in the order of the data set; the last one is the test set
    "data_batch_1.bin": "5dd7e06a14cb22eb9f671a540d1b7c25",
    "data_batch_2.bin": "5ea93a67294ea407fff1d09f752e9692",
    "data_batch_3.bin": "942cd6a4bcdd0dd3c604fbe906cb4421",
    "data_batch_4.bin": "ae636b3ba5c66a11e91e8cb52e771fcb",
    "data_batch_5.bin": "53f37980c15c3d472c316c40844f3f0d",
    "test_batch.bin": "803d5f7f4d78ea53de84dbe85f74fb6d",
}


def load_cifar10(folder: Path, cache: Path | None = None) -> Images:
    """Read the data set from the data folder; raises SpecError.

    Unpacking takes seconds, unless `cache` holds it already.
    """
    path = locate(folder, *SOURCES)
    return Images(**cached(cache, "cifar10", path, partial(_unpack, path)), classes=10)


def _unpack(path: Path) -> dict[str, Tensor]:
    rows = torch.empty(len(_MD5), _ROWS, _ROW, dtype=torch.uint8)
    missing = list(_MD5)
    try:
        with tarfile.open(path, "r|*") as archive:  # a stream: seeking would unpack it again
            for member in archive:
                name = Path(member.name).name
                file = archive.extractfile(member)
                if name in missing and file is not None:
                    rows[list(_MD5).index(name)] = _read_rows(path, name, file.read())
                    missing.remove(name)
    except (tarfile.TarError, lzma.LZMAError, zlib.error, EOFError, OSError) as error:
        raise damaged_file(path, str(error)) from error
    if missing:
        raise damaged_file(path, f"it lacks {', '.join(missing)}")
    labels, pixels = rows[..., 0].flatten().long(), rows[..., 1:].contiguous().view(-1, 3, 32, 32)
    train = slice(len(labels) - _ROWS)
    test = slice(train.stop, None)
    return {
        "train_x": pixels[train],
        "train_y": labels[train],
        "test_x": pixels[test],
        "test_y": labels[test],
    }


def _read_rows(path: Path, name: str, data: bytes) -> Tensor:
    found = hashlib.md5(data, usedforsecurity=False).hexdigest()
    if found != _MD5[name]:
        raise damaged_file(path, f"expected {name} to have MD5 {_MD5[name]}, got {found}")
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(_ROWS, _ROW)
