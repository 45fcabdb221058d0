# SPDX-License-Identifier: BSD-3-Clause
"""Tiny-ImageNet: photographs of 200 classes, 64 x 64, 500 + 50 of each; the lab uses twenty.

Reads the official zip file, or one with the same layout that holds only the twenty classes: a
folder of JPEG files per training class, one folder of test images, and a list of their classes. A
class is named by its WordNet id, and its label is its index among the sorted names. Decoding needs
pillow, from the extra `paceline[lab]`.
"""

import io
import zipfile
import zlib
from collections.abc import Sequence
from functools import partial
from hashlib import sha256
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.errors import SpecError
from paceline.lab import extras
from paceline.lab.data.download import Source, damaged_file, locate
from paceline.lab.data.images import Images
from paceline.lab.data.unpacked_cache import cached

__all__ = ["MEAN", "SOURCES", "STD", "TWENTY", "load_tiny_imagenet"]

TWENTY = (
    *("n01742172", "n01944390", "n02094433", "n02132136", "n02281406", "n02481823", "n02791270"),
    *("n02841315", "n02963159", "n03126707", "n03404251", "n03662601", "n03838899", "n03983396"),
    *("n04146614", "n04328186", "n04486054", "n04597913", "n07734744", "n09246464"),
)
"""WordNet ids, from the boa to the cliff: animals, objects and places."""

MEAN, STD = (0.4760, 0.4459, 0.3953), (0.2766, 0.2707, 0.2842)  # of the twenty; white is 1

SOURCES = (
    Source(
        "tiny-imagenet/tiny-imagenet-200.zip",
        "http://cs231n.stanford.edu/tiny-imagenet-200.zip",
        "6198c8ae015e2b3e007c7841da39ec069199b9aa3bfa943a462022fe5e43c821",
        others=("tiny-imagenet-20/tiny-imagenet-20.zip",),
    ),
)

_PER_CLASS = 500
_SIDE = 64


def load_tiny_imagenet(
    folder: Path, classes: Sequence[str] | int = TWENTY, cache: Path | None = None
) -> Images:
    """Read the data set from the data folder; raises SpecError.

    `classes`: the classes to read, or how many, in the order of their names. Unpacking takes
    seconds, unless `cache` holds it already.
    """
    path = locate(folder, *SOURCES)
    wanted = classes if isinstance(classes, int) else tuple(sorted(set(classes)))
    name = f"tiny-imagenet-{sha256(repr(wanted).encode()).hexdigest()[:8]}"
    tensors = cached(cache, name, path, partial(_unpack, path, wanted))
    return Images(**tensors, classes=int(tensors["train_y"][-1]) + 1)


def _unpack(path: Path, wanted: tuple[str, ...] | int) -> dict[str, Tensor]:
    try:
        with zipfile.ZipFile(path) as archive:
            return _read(archive, path.stem, wanted)
    except (zipfile.BadZipFile, zlib.error, KeyError, EOFError, OSError) as error:
        # A KeyError means that a file is missing in the archive.
        raise damaged_file(path, str(error).strip("\"'")) from error


def _read(archive: zipfile.ZipFile, root: str, wanted: tuple[str, ...] | int) -> dict[str, Tensor]:
    found = sorted(archive.read(f"{root}/wnids.txt").decode().split())
    chosen = _choose(found, wanted)
    train = [
        (f"{root}/train/{name}/images/{name}_{number}.JPEG", label)
        for label, name in enumerate(chosen)
        for number in range(_PER_CLASS)
    ]
    rows = archive.read(f"{root}/val/val_annotations.txt").decode().splitlines()
    pairs = [row.split("\t")[:2] for row in rows]
    images = f"{root}/val/images"
    test = [(f"{images}/{file}", chosen.index(name)) for file, name in pairs if name in chosen]
    return {
        "train_x": _pixels(archive, [name for name, _ in train]),
        "train_y": torch.tensor([label for _, label in train]),
        "test_x": _pixels(archive, [name for name, _ in test]),
        "test_y": torch.tensor([label for _, label in test]),
    }


def _choose(found: list[str], wanted: tuple[str, ...] | int) -> list[str]:
    """Return the wanted ones of the classes in the archive."""
    if isinstance(wanted, int):
        if not 1 <= wanted <= len(found):
            raise SpecError(f"classes must be from 1 to {len(found)}, got {wanted}")
        return found[:wanted]
    missing = [name for name in wanted if name not in found]
    if missing:
        raise SpecError(
            f"class {missing[0]} is not among the {len(found)} classes of this Tiny-ImageNet"
        )
    return list(wanted)


def _pixels(archive: zipfile.ZipFile, names: Sequence[str]) -> Tensor:
    """Return the images in torch's order of dimensions; grey ones get three equal channels."""
    out = np.empty((len(names), 3, _SIDE, _SIDE), np.uint8)
    for image, name in zip(out, names, strict=True):
        image[:] = _decode(name, archive.read(name)).transpose(2, 0, 1)
    return torch.from_numpy(out)


def _decode(name: str, data: bytes) -> NDArray[np.uint8]:
    with extras.load("PIL.Image").open(io.BytesIO(data)) as image:
        if image.size != (_SIDE, _SIDE):
            raise OSError(
                f"expected {name} to have {_SIDE} x {_SIDE} pixels, got "
                f"{image.width} x {image.height}"
            )
        return np.asarray(image.convert("RGB"))
